"""Published models by name. In: `hub:NAME` or `hub:NAME@sha256:HEX`. Out: a folder in the cache.

The cache is $SPEAKERLAB_CACHE or `~/.cache/speakerlab`; $SPEAKERLAB_HUB is the address of a mirror.
On a machine without network, put the publisher's file into the model's folder in the cache.
A file must have the digest that the user pinned, else that of the first file of that name
(`hub.json` in the cache); any other file is refused unopened. No publisher gives digests.
"""

import http.client
import json
import logging
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from speakerlab.checkpoints.catalogue import MODELS, MODELSCOPE, PREFIX, HubModel, known_name
from speakerlab.checkpoints.model_files import read_source
from speakerlab.core.atomic import alone, file_sha256, write_json
from speakerlab.core.reading import read_json

log = logging.getLogger(__name__)
PIN = "@sha256:"
LOCK = "hub.json"  # name -> digest of the first file
TIMEOUT_SECONDS = 60.0
WESPEAKER_INDEX = "https://modelscope.cn/api/v1/datasets/wenet/wespeaker_pretrained_models/oss/tree"


def local(model: str | Path) -> Path:
    """Return the folder of a `hub:` name; any other path as it is."""
    return fetch(str(model)) if str(model).startswith(PREFIX) else Path(model)


def fetch(name: str) -> Path:
    """Return the model folder of a published model, downloaded and imported on first use.

    Raises ValueError, and leaves the cache as it was, for an unknown name and if a download fails,
    is incomplete or has another digest.
    """
    name, _, pinned = name.removeprefix(PREFIX).partition(PIN)
    name, pinned = known_name(name), pinned.lower()
    if pinned and not re.fullmatch("[0-9a-f]{64}", pinned):
        raise ValueError(f"{PREFIX}{name}: sha256 '{pinned}' is not 64 hex digits; correct it")
    cache = Path(os.environ.get("SPEAKERLAB_CACHE") or Path.home() / ".cache" / "speakerlab")
    folder = cache / name
    if not _is_cached(folder, pinned):
        cache.mkdir(parents=True, exist_ok=True)
        with alone(cache / ".lock"):  # every rank of a training asks for its model
            if not _is_cached(folder, pinned):
                _import(name, cache, pinned)
    return folder


def _is_cached(folder: Path, pinned: str) -> bool:
    """Return whether the model is there, and from the file with the pinned digest, if any."""
    has_card = (folder / "card.json").exists()
    return has_card and (not pinned or (read_source(folder) or {}).get("sha256") == pinned)


def _import(name: str, cache: Path, pinned: str) -> None:
    """Import a model from the file in its folder, or from a download, into its folder."""
    from speakerlab.checkpoints.foreign import import_checkpoint  # imports torch

    model, folder, lock = MODELS[name], cache / name, cache / LOCK
    first_digests = read_json(lock) if lock.exists() else {}
    wanted = pinned or first_digests.get(name)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        file = folder / model.file
        if not file.exists():
            by_hand, file = file, Path(scratch) / model.file
            download(_address(model, by_hand), file, otherwise=by_hand)
        digest = file_sha256(file)
        if wanted not in (digest, None):
            raise ValueError(
                f"{PREFIX}{name}: {model.file} has sha256 {digest} instead of "
                f"{'the requested' if pinned else 'the known'} {wanted}; it was not used"
            )
        imported = Path(scratch) / "model"
        stated = {key: getattr(model, key) for key in ("page", "training_data", "licence")}
        about = {"hub": name, **stated}
        import_checkpoint(file, imported, frontend=model.frontend, about=about)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        imported.replace(folder)
    if not wanted:
        text = "%s%s: first use; later downloads must have sha256:%s"
        log.info(text, PREFIX, name, digest)
    write_json(lock, {**first_digests, name: digest})


def download(address: str, file: Path, *, otherwise: Path) -> None:
    """Download to `file`. Raises ValueError, one line, unless it is complete.

    otherwise: where to put the model's file if it was downloaded elsewhere.
    """
    log.info("downloading %s", address)
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as reply:
            length = reply.headers.get("Content-Length")
            with file.open("wb") as target:
                shutil.copyfileobj(reply, target)
    except (OSError, http.client.HTTPException, ValueError) as error:
        fix = f"try again, set SPEAKERLAB_HUB to a mirror, or put the model's file at {otherwise}"
        raise ValueError(f"{address}: cannot be downloaded ({error}); {fix}") from error
    if length is not None and file.stat().st_size != int(length):
        raise ValueError(
            f"{address}: the download ended early, after {file.stat().st_size} of {length} bytes; "
            "try again"
        )


def _address(model: HubModel, by_hand: Path) -> str:
    """Return where the file is: on the mirror, or at its publisher."""
    mirror = os.environ.get("SPEAKERLAB_HUB")
    if mirror or not model.path.startswith("wespeaker/"):
        return f"{(mirror or MODELSCOPE).rstrip('/')}/{quote(model.path)}"
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch) / "index.json"
        download(WESPEAKER_INDEX, index, otherwise=by_hand)
        try:
            rows: list[dict[str, Any]] = json.loads(index.read_text(encoding="utf-8"))["Data"]
            return next(str(row["Url"]) for row in rows if row["Key"] == model.file)
        except (ValueError, KeyError, TypeError, StopIteration):
            raise ValueError(
                f"{PREFIX}{model.name}: {model.file} is not in the publisher's index "
                f"{WESPEAKER_INDEX}; download it from WeSpeaker's list to {by_hand}"
            ) from None
