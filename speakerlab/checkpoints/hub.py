"""Published models by name. In: `hub:NAME` or `hub:NAME@sha256:HEX`. Out: a folder in the cache.

The cache is $SPEAKERLAB_CACHE or `~/.cache/speakerlab`; $SPEAKERLAB_HUB is the address of a mirror.
On a machine without network, put the publisher's file into the model's folder in the cache.
A file must have the digest that the user pinned or, without a pin, the digest of the first file of
that name (`hub.json` in the cache); any other file is refused unopened. No publisher provides
digests.
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

from speakerlab.checkpoints.catalogue import (
    MODELS,
    MODELSCOPE,
    PREFIX,
    HubModel,
    known_name,
)
from speakerlab.checkpoints.model_files import read_source
from speakerlab.core.atomic import alone, file_sha256, write_json
from speakerlab.core.reading import read_json

log = logging.getLogger(__name__)
PIN = "@sha256:"
LOCK = "hub.json"  # in the cache: name -> digest of the first file
TIMEOUT_SECONDS = 60.0
WESPEAKER_INDEX = (
    "https://modelscope.cn/api/v1/datasets/wenet/wespeaker_pretrained_models/oss/tree"
)


def local(model: str | Path) -> Path:
    """Return the folder of a `hub:` name; return any other path unchanged."""
    name = str(model)
    if name.startswith(PREFIX):
        return fetch(name)
    return Path(model)


def fetch(name: str) -> Path:
    """Return the model folder of a published model, downloaded and imported on first use.

    Raises ValueError, and leaves the cache as it was, for an unknown name and if a download fails,
    is incomplete or has another digest.
    """
    name = name.removeprefix(PREFIX)
    name, _, pinned = name.partition(PIN)
    name = known_name(name)
    pinned = pinned.lower()
    if pinned and not re.fullmatch("[0-9a-f]{64}", pinned):
        raise ValueError(
            f"{PREFIX}{name}: sha256 '{pinned}' is not 64 hex digits; correct it"
        )
    usual_cache = Path.home() / ".cache" / "speakerlab"
    cache = Path(os.environ.get("SPEAKERLAB_CACHE") or usual_cache)
    folder = cache / name
    if not _is_cached(folder, pinned):
        cache.mkdir(parents=True, exist_ok=True)
        # Every rank of a training asks for its model; the first downloads it for all.
        with alone(cache / ".lock"):
            if not _is_cached(folder, pinned):
                _import(name, cache, pinned)
    return folder


def _is_cached(folder: Path, pinned: str) -> bool:
    """Return whether the model is cached and, with a pinned digest, is from that file."""
    if not (folder / "card.json").exists():
        return False
    if not pinned:
        return True
    source = read_source(folder) or {}
    return source.get("sha256") == pinned


def _import(name: str, cache: Path, pinned: str) -> None:
    """Import a model from the file in its folder, or from a download, into its folder."""
    from speakerlab.checkpoints.foreign import import_checkpoint  # imports torch

    model = MODELS[name]
    folder = cache / name
    lock = cache / LOCK
    first_digests: dict[str, str] = {}
    if lock.exists():
        first_digests = read_json(lock)
    # Trust on first use: no publisher provides digests, but a file that changes later is refused.
    wanted = pinned or first_digests.get(name)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        # A user without network has put the file into the folder by hand.
        by_hand = folder / model.file
        file = by_hand
        if not by_hand.exists():
            file = Path(scratch) / model.file
            address = _address(model, by_hand)
            download(address, file, otherwise=by_hand)

        # Checked before anything reads the content of the file.
        digest = file_sha256(file)
        if wanted is not None and wanted != digest:
            origin = "requested" if pinned else "known"
            raise ValueError(
                f"{PREFIX}{name}: {model.file} has sha256 {digest} instead of the"
                f" {origin} {wanted}; it was not used"
            )

        # Imported beside the folder and then moved, so that the cache never has half a model.
        imported = Path(scratch) / "model"
        about = {
            "hub": name,
            "page": model.page,
            "training_data": model.training_data,
            "licence": model.licence,
        }
        import_checkpoint(
            file,
            imported,
            frontend=model.frontend,
            about=about,
        )
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        imported.replace(folder)
    # Only after the import: a file that cannot be imported must not pin its digest.
    if not wanted:
        log.info(
            "%s%s: first use; later downloads must have sha256:%s", PREFIX, name, digest
        )
    write_json(lock, {**first_digests, name: digest})


def download(address: str, file: Path, *, otherwise: Path) -> None:
    """Download to `file`. Raises ValueError, one line, unless it is complete.

    otherwise: where to put the model's file if it was downloaded elsewhere.
    """
    log.info("downloading %s", address)
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as reply:
            length = reply.headers.get("Content-Length")
            # In pieces: a model may be larger than the free memory.
            with file.open("wb") as target:
                shutil.copyfileobj(reply, target)
    # ValueError: SPEAKERLAB_HUB is not an address.
    except (OSError, http.client.HTTPException, ValueError) as error:
        fix = (
            "try again, set SPEAKERLAB_HUB to a mirror, or put the model's file at"
            f" {otherwise}"
        )
        # Without the chain of errors of the network: the reason is in the text.
        raise ValueError(f"{address}: cannot be downloaded ({error}); {fix}") from None
    # urllib raises no error if the connection is closed early.
    size = file.stat().st_size
    if length is not None and size != int(length):
        raise ValueError(
            f"{address}: the download ended early, after {size} of"
            f" {length} bytes; try again"
        )


def _address(model: HubModel, by_hand: Path) -> str:
    """Return where the file is: on the mirror, or at its publisher."""
    mirror = os.environ.get("SPEAKERLAB_HUB")
    if mirror or not model.path.startswith("wespeaker/"):
        host = (mirror or MODELSCOPE).rstrip("/")
        return f"{host}/{quote(model.path)}"

    # WeSpeaker's files have no fixed address; its index lists the current addresses.
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch) / "index.json"
        download(WESPEAKER_INDEX, index, otherwise=by_hand)
        # The index comes from a third party, so it may have any content.
        try:
            text = index.read_text(encoding="utf-8")
            rows: list[dict[str, Any]] = json.loads(text)["Data"]
            for row in rows:
                if row["Key"] == model.file:
                    return str(row["Url"])
        except (ValueError, KeyError, TypeError):
            pass
        raise ValueError(
            f"{PREFIX}{model.name}: {model.file} is not in the publisher's index "
            f"{WESPEAKER_INDEX}; download it from WeSpeaker's list to {by_hand}"
        )
