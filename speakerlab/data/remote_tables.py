"""A data directory whose tables are in a store, beside its shards; the local copy of the tables.

    speakerlab pack data/train --out s3://bucket/train    # shards, index, tables, directory.json
    data.train: [s3://bucket/train]                       # on any host: `local_folder`

`directory.json` is written last. It has the size and SHA-256 of each table, so that a copy is whole
and is that of the shards.
"""

import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from speakerlab.core.atomic import file_sha256, replacing_folder
from speakerlab.core.reading import parse_json
from speakerlab.data import remote
from speakerlab.data.columns import TABLES, note_rate, store_columns
from speakerlab.data.remote import RemoteShards, Store
from speakerlab.data.tables import list_tables

log = logging.getLogger(__name__)
DIRECTORY = "directory.json"
PACK_AGAIN = "pack again (speakerlab pack --out)"


@dataclass(frozen=True)
class Table:
    """Facts of a table in a store."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class RemoteDirectory:
    """A data directory in a store; `directory.json` has these facts."""

    sample_rate: int
    shards: str  # the folder of the shards in a data directory
    index_sha256: str
    index_bytes: int
    tables: dict[str, Table]


def upload_tables(folder: Path, shards: str, *, sample_rate: int) -> None:
    """Copy the tables to the store of the packed shards, unless they are there already.

    shards: the name of the folder of the shards, which refers to the store.
    """
    reference = remote.read_reference(folder / shards)
    if reference is None:
        raise ValueError(f"{folder}/{shards}: its shards are not in a store")
    tables: dict[str, Table] = {}
    for name in sorted({*list_tables(folder), *TABLES, "about"}):
        path = folder / name
        if path.exists():
            tables[name] = Table(path.stat().st_size, file_sha256(path))
    directory = RemoteDirectory(
        sample_rate=sample_rate,
        shards=shards,
        index_sha256=reference.index_sha256,
        index_bytes=reference.index_bytes,
        tables=tables,
    )

    store = reference.store
    text = json.dumps(asdict(directory), indent=2).encode()
    with suppress(FileNotFoundError):
        if store.read_whole(DIRECTORY) == text:
            return
    for name in tables:
        store.upload(folder / name, name)
    with TemporaryDirectory() as scratch:
        path = Path(scratch, DIRECTORY)
        path.write_bytes(text)
        store.upload(path, DIRECTORY)


@cache
def local_folder(url: str) -> Path:
    """Return the local copy of a data directory in a store; download its tables if need be.

    The store is asked once in a process. Raises FileNotFoundError or ValueError, one line, if there
    is no such directory, or the store cannot be read.
    """
    store = Store(url.rstrip("/"))
    text = store.read_whole(DIRECTORY)
    # Other tables are another directory, so that no training sees half of a change.
    digest = sha256(text).hexdigest()[:16]
    _, _, name = store.url.rpartition("/")
    folder = remote.CACHE.folder / "tables" / digest / name
    with remote.CACHE.lock(folder):
        if not folder.exists():
            _download(store, text, folder)
    return folder


def _download(store: Store, text: bytes, folder: Path) -> None:
    """Write the tables that `directory.json` lists, and the reference to the shards."""
    where = f"{store.url}/{DIRECTORY}"
    directory = parse_json(text, RemoteDirectory, where=where, fix=PACK_AGAIN)
    num_bytes = sum(table.num_bytes for table in directory.tables.values())
    log.info("%s: downloading %.1f MB of tables", store.url, num_bytes / 1e6)
    with replacing_folder(folder) as fresh:
        for name, table in directory.tables.items():
            path = fresh / _checked_name(name, where)
            path.write_bytes(_read_table(store, name, table))
        shards = RemoteShards(
            url=store.url,
            index_sha256=directory.index_sha256,
            index_bytes=directory.index_bytes,
        )
        shards_folder = fresh / _checked_name(directory.shards, where)
        shards_folder.mkdir()
        shards.write_reference(shards_folder)
        note_rate(fresh, directory.sample_rate)
        # They open at once in the other processes of this host.
        store_columns(fresh, sample_rate=directory.sample_rate)


def _read_table(store: Store, name: str, table: Table) -> bytes:
    content = store.read_parts(name, table.num_bytes)
    if sha256(content).hexdigest() != table.sha256:
        raise ValueError(
            f"{store.url}/{name}: is not the table that {DIRECTORY} lists; {PACK_AGAIN}"
        )
    return content


def _checked_name(name: str, where: str) -> str:
    """Return a name; raise ValueError for one that leads out of its folder."""
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"{where}: {name!r} is no name of a table; {PACK_AGAIN}")
    return name
