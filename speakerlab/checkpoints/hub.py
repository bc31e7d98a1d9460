"""Published models by name: downloaded once, checked, imported, and opened from the cache later.

In: `hub:ID` or `hub:ID@sha256:HEX`. Out: a model folder in the cache.

The cache is $SPEAKERLAB_CACHE or `~/.cache/speakerlab`; $SPEAKERLAB_HUB is the address of a mirror.
What a file must be is, in this order: the digest that the user pinned, the one of the table, the
one that the first download had (`hub.json` in the cache). A file that is another is not opened.
"""

import difflib
import http.client
import json
import logging
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from speakerlab.checkpoints.foreign import import_checkpoint
from speakerlab.checkpoints.hub_models import MODELS, MODELSCOPE, WESPEAKER_INDEX, HubModel
from speakerlab.checkpoints.published import file_sha256
from speakerlab.core.atomic import write_json

log = logging.getLogger(__name__)
PREFIX = "hub:"
PIN = "@sha256:"
LOCK = "hub.json"  # name -> digest of the file that was taken first
TIMEOUT_SECONDS = 60.0
PIECE_BYTES = 1 << 20


def fetch(name: str) -> Path:
    """The model folder of a published model, downloaded and imported where it is not there yet.

    Raises ValueError with the nearest names for an unknown one, and where a download fails, ends
    early, or is not the file that it must be; the cache then holds what it held before.
    """
    name, _, pinned = name.removeprefix(PREFIX).partition(PIN)
    name, pinned = known_name(name), pinned.lower()
    if pinned and not re.fullmatch("[0-9a-f]{64}", pinned):
        raise ValueError(f"{PREFIX}{name}: sha256 must be 64 hex digits, got '{pinned}'")
    folder = cache_folder() / name
    have = _source_sha256(folder)
    wanted = pinned or MODELS[name].sha256 or _locked().get(name)
    if have is not None and wanted in (have, None):
        return folder
    with tempfile.TemporaryDirectory(dir=_made(cache_folder())) as scratch:
        file = Path(scratch) / MODELS[name].file
        download(_address(name, MODELS[name]), file)
        digest = file_sha256(file)
        if wanted not in (digest, None):
            raise ValueError(
                f"{PREFIX}{name}: the download is another file than the one "
                f"{'asked for' if pinned else 'known'}, got sha256 {digest} instead of {wanted}; "
                "it was removed"
            )
        imported = Path(scratch) / "model"
        import_checkpoint(file, imported, frontend=MODELS[name].frontend)
        _replace(folder, imported)
    if not wanted:
        log.info("%s%s: first download, from now on it must be sha256:%s", PREFIX, name, digest)
    write_json(cache_folder() / LOCK, {**_locked(), name: digest})
    return folder


def known_name(name: str) -> str:
    """The full name of a published model. ValueError with the nearest for an unknown one.

    The owner may be left out, and `damo/`, under which ModelScope had them, is `iic/`.
    """
    own = name.replace("damo/", "iic/", 1) if name.startswith("damo/") else name
    found = [known for known in MODELS if own in (known, known.partition("/")[2])]
    if found:
        return found[0]
    near = _nearest(name, MODELS)
    raise ValueError(
        f"{PREFIX}{name}: no such published model, got '{name}'; the nearest are {', '.join(near)}"
    )


def cache_folder() -> Path:
    """Where downloads are kept."""
    given = os.environ.get("SPEAKERLAB_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "speakerlab"


def download(address: str, file: Path) -> None:
    """Write what is at an address to `file`. Raises ValueError, one line, unless all of it came."""
    log.info("downloading %s", address)
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as reply:
            length = reply.headers.get("Content-Length")
            with file.open("wb") as target:
                got = _copy(reply, target)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ValueError(
            f"{address}: cannot be downloaded, got '{error}'; try again, or set SPEAKERLAB_HUB to "
            "a mirror"
        ) from error
    if length is not None and got != int(length):
        raise ValueError(
            f"{address}: the download ended early, got {got} of {length} bytes; try again"
        )


def _copy(source: IO[bytes], target: IO[bytes]) -> int:
    got = 0
    while piece := source.read(PIECE_BYTES):
        got += target.write(piece)
    return got


def _address(name: str, model: HubModel) -> str:
    """Where the file is: on the mirror, or where its publisher has it."""
    mirror = os.environ.get("SPEAKERLAB_HUB")
    if mirror or not model.in_index:
        return model.mirrored(mirror or MODELSCOPE)
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch) / "index.json"
        download(WESPEAKER_INDEX, index)
        try:
            rows: list[dict[str, Any]] = json.loads(index.read_text(encoding="utf-8"))["Data"]
            return next(str(row["Url"]) for row in rows if row["Key"] == model.file)
        except (ValueError, KeyError, TypeError, StopIteration):
            raise ValueError(
                f"{PREFIX}{name}: {model.file} is not in the publisher's index {WESPEAKER_INDEX}; "
                "download it from WeSpeaker's list and use `speakerlab import`"
            ) from None


def _source_sha256(folder: Path) -> str | None:
    """Digest of the file that a model in the cache was imported from."""
    try:
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return card["source"]["sha256"]


def _locked() -> dict[str, str]:
    path = cache_folder() / LOCK
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _replace(folder: Path, fresh: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.replace(folder)


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    bare = {row.partition("/")[2]: row for row in known}
    close = difflib.get_close_matches(name.rpartition("/")[2], bare, n=3, cutoff=0.0)
    return [bare[row] for row in close]
