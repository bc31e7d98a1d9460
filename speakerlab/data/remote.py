"""Shards in an object store: read in pieces, through a bounded cache on a local disk.

    store --> pieces of 1 MiB --> cache --> `Packed.read` (shards.py), which checks every block

A data directory refers to its shards by `remote.json` in place of the shards: the address, and the
digest of the index. The pieces are cached by this digest, so that shards which were packed again
never get the audio of their former ones. The processes of a host share the cache.

fsspec reads and writes the store; it is only imported when there is one.
"""

import io
import logging
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ctypes import c_int64
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import sha256
from multiprocessing import get_context
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeVar
from urllib.parse import quote

from speakerlab.core.atomic import NO_ROOM, file_sha256, replacing, write_json
from speakerlab.core.ctrl_c import hold_ctrl_c
from speakerlab.core.locks import wait_for_lock
from speakerlab.core.process import die_with_parent, leave_signals_to_parent
from speakerlab.core.reading import read_json
from speakerlab.data.arrays import stable_hash

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")

REFERENCE = "remote.json"
READ_ONLY = ("http", "https")
INSTALL = "pip install fsspec s3fs aiohttp"
# A request costs its latency, a larger piece more bytes that no crop needs yet: at 20 ms and 50
# MB/s, half of the time of a piece of this size is latency.
PIECE_BYTES = 1 << 20
ATTEMPTS = 5
# Seconds before the second attempt; each further pause is twice as long.
FIRST_PAUSE = 0.5
ATTEMPT_SECONDS = 20.0
NUM_CONNECTIONS = 16  # of the process that reads ahead
DEFAULT_GB = 100.0
# Share of a full cache that is removed at once, because listing the files takes a while.
REMOVED_SHARE = 0.1
NUM_LOCKS = 256
INDICES = "index"  # the folder of the copy of an index
ABANDONED_SECONDS = 600.0  # a partial file this old is one of a process that was killed
POLL_SECONDS = 0.02
# Of filesystems of fsspec. Attempts are counted here, not in the libraries below.
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": 10,
            "retries": {"max_attempts": 0},
            "max_pool_connections": 64,
        }
    },
    "file": {"auto_mkdir": True},
}


@dataclass(frozen=True)
class Store:
    """A folder of an object store, by its address; every error is one line that names it."""

    url: str  # without / at the end

    @property
    def is_read_only(self) -> bool:
        return self.url.partition("://")[0] in READ_ONLY

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        """Read a range of a file; raise ValueError after the last of several attempts.

        Raises FileNotFoundError at once if the store has no such file.
        """

        def read_once() -> bytes:
            content = self._read_range(name, start, num_bytes)
            if len(content) > num_bytes:
                raise OSError("it sends more than the range that was asked for")
            if len(content) < num_bytes:
                raise OSError(f"it sent {len(content)} of {num_bytes} bytes")
            return content

        return self._try(name, "read", read_once)

    def read_whole(self, name: str) -> bytes:
        """Read a small file of unknown size; errors are those of `read`."""

        def read_once() -> bytes:
            system, root = self._open()
            return system.cat_file(f"{root}/{name}")

        return self._try(name, "read", read_once)

    def read_parts(self, name: str, num_bytes: int) -> bytes:
        """Read a file of known size, in several requests; errors are those of `read`."""
        # The time of a request is limited.
        parts: list[bytes] = []
        for start in range(0, num_bytes, 8 * PIECE_BYTES):
            part_bytes = min(8 * PIECE_BYTES, num_bytes - start)
            parts.append(self.read(name, start, part_bytes))
        return b"".join(parts)

    def upload(self, path: Path, name: str) -> None:
        """Copy a local file into the store; raise ValueError as `read` does."""

        def upload_once() -> None:
            system, root = self._open()
            system.put_file(str(path), f"{root}/{name}")

        self._try(name, "written", upload_once)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file in the folder; empty if there is no such folder."""

        def list_once() -> dict[str, int]:
            system, root = self._open()
            system.invalidate_cache()
            try:
                rows = system.ls(root, detail=True)
            except FileNotFoundError:
                return {}
            return {row["name"].rpartition("/")[2]: row["size"] for row in rows}

        return self._try("", "listed", list_once)

    def _read_range(self, name: str, start: int, num_bytes: int) -> bytes:
        system, root = self._open()
        path = f"{root}/{name}"
        end = start + num_bytes
        if not system.async_impl:
            return system.cat_file(path, start=start, end=end)
        from fsspec.asyn import sync

        # fsspec's own methods would wait for a store that stalls.
        read: Any = partial(sync, timeout=ATTEMPT_SECONDS)
        return read(system.loop, system._cat_file, path, start=start, end=end)

    def _open(self) -> tuple[Any, str]:
        """Return fsspec's file system, and the path of the folder in it."""
        # Not one for all processes: connections and their thread do not survive a fork.
        return _open_store(self.url, os.getpid())

    def _try(self, name: str, verb: str, act: Callable[[], Result]) -> Result:
        """Return act() of the first attempt that succeeds."""
        where = f"{self.url}/{name}".rstrip("/")
        cause = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                pause = FIRST_PAUSE * 2 ** (attempt - 1)
                log.info("%s: %s; trying again in %.1f s", where, cause, pause)
                time.sleep(pause)
            try:
                return act()
            except FileNotFoundError:
                raise FileNotFoundError(
                    f"{where}: the store has no such file; correct the address in"
                    f" {REFERENCE}, or pack again (speakerlab pack --out)"
                ) from None
            except NoDriverError:
                raise
            # Each library has its own errors, and some of them are no OSError.
            except Exception as error:
                cause = describe(error)
        raise ValueError(
            f"{where}: cannot be {verb}, {ATTEMPTS} attempts failed ({cause}); check the"
            " address, the rights and the network, then start again"
        )


class NoDriverError(ValueError):
    """fsspec lacks a package for an address, or does not know its protocol."""


@cache
def _open_store(url: str, _process: int) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    try:
        from fsspec import asyn
        from fsspec.core import url_to_fs

        # The versions until 2025.3 leave the loop of their parent to a forked process, in which its
        # thread does not run: all requests would wait for ever.
        thread = asyn.iothread[0]
        if thread is not None and not thread.is_alive():
            asyn.reset_lock()
        system, root = url_to_fs(url, **OPTIONS.get(protocol, {}))
    except (ImportError, ValueError) as error:
        raise NoDriverError(
            f"{url}: cannot be opened ({error}); {INSTALL}, or correct the address"
        ) from None
    if protocol == "s3":
        system.retries = 1
    return system, root


def describe(error: Exception) -> str:
    """Return the cause of a failed request, on one line."""
    if type(error).__name__.endswith("TimeoutError"):
        return f"no answer for {ATTEMPT_SECONDS:.0f} s"
    status = getattr(error, "status", None)
    if status is not None:  # aiohttp's message repeats the address
        return f"status {status}"
    return " ".join(str(error).split()) or type(error).__name__


def parse_store(url: str) -> Store:
    """Return the store of an address to write to; raise ValueError for others."""
    if "://" not in url:
        raise ValueError(
            f"--out: '{url}' is no address; give one such as s3://bucket/folder"
        )
    store = Store(url.rstrip("/"))
    if store.is_read_only:
        raise ValueError(
            f"--out: {url} is read-only; write to the store behind it, then change the"
            f" address in {REFERENCE}"
        )
    return store


@dataclass
class Cache:
    """Files on a local disk, of at most `max_bytes` together; the least recently used go first.

    Its processes, and their threads, exclude each other by locks. A file is complete when it gets
    its name. It may be removed while it is read: the reader has it open.
    """

    configured_folder: Path | None  # None: the default folder
    max_bytes: int

    @property
    def folder(self) -> Path:
        if self.configured_folder is not None:
            return self.configured_folder
        usual = Path.home() / ".cache" / "speakerlab"
        return Path(os.environ.get("SPEAKERLAB_CACHE") or usual) / "shards"

    def read(self, path: Path, first: int, num_bytes: int) -> bytes | None:
        """Return a range of a file; None if it is not there, or ends early."""
        try:
            file = io.FileIO(path)
        except FileNotFoundError:
            return None
        with file:
            file.seek(first)
            content = file.read(num_bytes)
            # Its time is that of its last use. Another user's file keeps its time.
            with suppress(OSError):
                os.utime(path)
        return content if len(content) == num_bytes else None

    def add(self, path: Path, content: bytes) -> None:
        """Write a file; if there is no room, remove the least recently used ones first.

        Raises ValueError, one line, if other files fill the disk.
        """
        self._reserve(len(content))
        try:
            _write(path, content)
            return
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        # The disk has less room than the cache may take: make room, and try once more.
        self._shrink(len(content))
        try:
            _write(path, content)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise ValueError(
                f"{self.folder}: the disk is full ({error.strerror}); make room,"
                " lower runtime.cache_gb, or set runtime.cache_dir to another disk"
            ) from None

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        """Keep others from adding this file; one lock is for many files, so never nest them."""
        number = stable_hash(str(path)) % NUM_LOCKS
        with self._locked(f"{number}"):
            yield

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        folder = self.folder / "locks"
        # Unlike the locks in core/atomic.py, this one also excludes other threads.
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / name).open("ab")
        except OSError as error:
            raise ValueError(
                f"{folder}: cannot be written ({error.strerror}); set runtime.cache_dir"
                " to a folder of yours on a local disk"
            ) from None
        with file:
            try:
                wait_for_lock(file)
            except OSError as error:
                raise ValueError(
                    f"{folder}: cannot be locked ({error.strerror}); set"
                    " runtime.cache_dir to a folder on a local disk"
                ) from None
            yield

    def _reserve(self, num_bytes: int) -> None:
        """Count bytes that are going to be added; make room for them."""
        with self._locked("ledger"):
            used = self._read_ledger()
            if used is None or used + num_bytes > self.max_bytes:
                remaining_bytes = int(self.max_bytes * (1 - REMOVED_SHARE))
                used = self._evict(min(self.max_bytes - num_bytes, remaining_bytes))
            self._write_ledger(used + num_bytes)

    def _shrink(self, num_bytes: int) -> None:
        """Remove a quarter of the bytes, for `num_bytes` that are already counted."""
        with self._locked("ledger"):
            used = self._read_ledger()
            # Unknown if the full disk had no room for the ledger either: count the files.
            if used is None:
                used = self._evict(self.max_bytes)
            remaining = self._evict(used * 3 // 4)
            self._write_ledger(remaining + num_bytes)

    def _read_ledger(self) -> int | None:
        """Return the bytes of all files or, if some were removed since, more; None if unknown."""
        ledger = self.folder / "ledger"
        try:
            return int(ledger.read_text(encoding="ascii"))
        # Not written yet, or cut short when the host went down.
        except (FileNotFoundError, ValueError):
            return None

    def _write_ledger(self, num_bytes: int) -> None:
        ledger = self.folder / "ledger"
        try:
            ledger.write_text(f"{num_bytes}", encoding="ascii")
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            ledger.unlink(missing_ok=True)  # unknown: the next process counts the files

    def _evict(self, max_bytes: int) -> int:
        """Remove the least recently used files above `max_bytes`; return the bytes that remain."""
        files: list[tuple[float, int, Path]] = []
        for path in self.folder.glob("*/*/*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                if S_ISREG(status.st_mode):  # tables are in folders of this depth
                    files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        abandoned_before = time.time() - ABANDONED_SECONDS
        for used_at, size, path in sorted(files):
            if total <= max_bytes:
                break
            # A process may be writing a partial file, or be about to open an index.
            may_be_needed = path.suffix == ".partial" or path.parent.name == INDICES
            if may_be_needed and used_at > abandoned_before:
                continue
            path.unlink(missing_ok=True)
            total -= size
        return total


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as partial:
        partial.write_bytes(content)


# The cache of this process and its children: there is one disk, whoever reads the shards.
CACHE = Cache(None, max_bytes=int(DEFAULT_GB * 1e9))


def use_cache(folder: str | None, gigabytes: float) -> None:
    """Set the cache of this process, before it reads a manifest; None: the default folder."""
    CACHE.configured_folder = None if folder is None else Path(folder).expanduser()
    CACHE.max_bytes = int(gigabytes * 1e9)


@dataclass(frozen=True)
class RemoteShards:
    """Shards in a store; `remote.json` has these facts."""

    url: str
    index_sha256: str
    index_bytes: int

    @property
    def store(self) -> Store:
        return Store(self.url.rstrip("/"))

    def write_reference(self, folder: Path) -> None:
        """Write `remote.json` into the folder of the shards in a data directory."""
        write_json(folder / REFERENCE, asdict(self))

    def download_index(self, name: str) -> Path:
        """Return the local copy of the index; raise ValueError if the store has another one."""
        path = CACHE.folder / self.index_sha256[:16] / INDICES / name
        with CACHE.lock(path):
            if path.exists() and file_sha256(path) == self.index_sha256:
                with suppress(OSError):
                    os.utime(path)  # used now, so others are removed first
                return path
            # Twice, because a bit may be damaged on its way.
            for _ in range(2):
                content = self.store.read_parts(name, self.index_bytes)
                if sha256(content).hexdigest() == self.index_sha256:
                    CACHE.add(path, content)
                    return path
        raise ValueError(
            f"{self.url}/{name}: is not the index that {REFERENCE} refers to; if the"
            f" shards were packed again, copy {REFERENCE} from there, else pack again"
            " (speakerlab pack --out)"
        )

    def read(
        self, shard: str, start: int, num_bytes: int, *, shard_bytes: int
    ) -> bytes:
        """Read a range of a shard through the cache; shard_bytes: where its last piece ends."""
        end = start + num_bytes
        parts: list[bytes] = []
        for number in _pieces_of(start, end):
            piece_start = number * PIECE_BYTES
            piece_end = min(piece_start + PIECE_BYTES, shard_bytes)
            first = max(start, piece_start) - piece_start
            last = min(end, piece_end) - piece_start
            path = self._piece(shard, number)
            part = CACHE.read(path, first, last - first)
            if part is None:
                piece = self._download(path, shard, piece_start, piece_end)
                part = piece[first:last]
            parts.append(part)
        return b"".join(parts)

    def discard(self, shard: str, start: int, num_bytes: int) -> None:
        """Remove a range, in which a block is damaged, from the cache."""
        for number in _pieces_of(start, start + num_bytes):
            self._piece(shard, number).unlink(missing_ok=True)

    def _piece(self, shard: str, number: int) -> Path:
        # The ending keeps any name, even .., in the folder.
        folder = quote(shard, safe="") + ".pieces"
        return CACHE.folder / self.index_sha256[:16] / folder / f"{number}"

    def _download(self, path: Path, shard: str, start: int, end: int) -> bytes:
        """Return a piece, from the store unless another process has downloaded it meanwhile."""
        num_bytes = end - start
        with CACHE.lock(path):
            piece = CACHE.read(path, 0, num_bytes)
            if piece is None:
                piece = self.store.read(shard, start, num_bytes)
                CACHE.add(path, piece)
        return piece


def _pieces_of(start: int, end: int) -> range:
    """Return the numbers of the pieces that hold a range of a shard."""
    first = start // PIECE_BYTES
    stop = -(-end // PIECE_BYTES)  # rounded up
    return range(first, stop)


def read_reference(folder: Path) -> RemoteShards | None:
    """Return the remote shards that a folder refers to; None if it does not."""
    path = folder / REFERENCE
    if not path.exists():
        return None
    remote = read_json(path, RemoteShards)
    if not re.fullmatch("[0-9a-f]{64}", remote.index_sha256):
        raise ValueError(
            f"{path}: is damaged (index_sha256 is not 64 hex digits); copy it again, or"
            " pack again (speakerlab pack --out)"
        )
    return remote


def crops_ahead(local_ranks: int) -> int:
    """Return the number of crops that a rank may read ahead: half of the cache, shared by ranks.

    A crop takes about one piece.
    """
    num_pieces = CACHE.max_bytes // 2 // PIECE_BYTES
    return max(num_pieces // local_ranks, 1)


def warn_of_small_cache(num_bytes: int) -> None:
    """Log a line if the cache is smaller than what is needed: one window, and one read ahead."""
    if num_bytes > CACHE.max_bytes:
        log.warning(
            "runtime.cache_gb: %.1f GB are less than the %.1f GB of utterances that are"
            " shuffled at once, so that shards are downloaded several times; raise it",
            CACHE.max_bytes / 1e9,
            num_bytes / 1e9,
        )


def read_ahead(
    lists: Iterable[list[Item]],
    draw: Callable[[Item], Result],
    fetch: Callable[[Result], object],
    *,
    num_ahead: int,
) -> Iterator[list[Item]]:
    """Yield `lists`, while another process fetches up to `num_ahead` items beyond them.

    draw: called in order, in one thread. fetch: called in several threads; its errors are dropped,
    because whoever needs the item meets them again.
    """
    num_yielded = RawValue(c_int64, 0)
    # Forked: the process continues with a copy of the lists, which may be a generator, and shares
    # the columns of the manifest.
    reader = get_context("fork").Process(
        target=_fetch_lists,
        args=(lists, draw, fetch, num_yielded, num_ahead),
        daemon=True,
    )
    with hold_ctrl_c():
        reader.start()
    try:
        for items in lists:
            num_yielded.value += len(items)
            yield items
    finally:
        reader.kill()
        reader.join()


def _fetch_lists(
    lists: Iterable[list[Item]],
    draw: Callable[[Item], Result],
    fetch: Callable[[Result], object],
    num_yielded: Any,
    num_ahead: int,
) -> None:
    die_with_parent()
    leave_signals_to_parent()
    # When the parent exits, multiprocessing sends SIGTERM to this process, and waits for its end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    num_passed = 0  # items of the lists so far
    running: deque[Future[object]] = deque()
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        for items in lists:
            while num_passed >= num_yielded.value + num_ahead:
                time.sleep(POLL_SECONDS)
            num_passed += len(items)
            if num_passed <= num_yielded.value:
                continue  # the data workers already read these
            for item in items:
                drawn = draw(item)
                running.append(pool.submit(fetch, drawn))
                # Wait for the oldest request, so that not all items are drawn at once.
                if len(running) > 2 * NUM_CONNECTIONS:
                    running.popleft().exception()
