"""Published models by name: in a cache, downloaded at their first use.

In: `hub:NAME`, `hub:NAME@sha256:HEX`, or `hf:owner/name@REVISION`. Out: a model folder.

`hf:` are model folders that `speakerlab publish` uploaded; see core/huggingface.py. `hub:` are
models of other toolkits, listed in the catalogue and imported at their first use, without any
other package. Their cache is $SPEAKERLAB_CACHE or `~/.cache/speakerlab`; $SPEAKERLAB_HUB is the
address of a mirror. On a machine without network, put the publisher's file into the model's folder
in the cache. A file must have the digest that the user pinned or, without a pin, the digest of the
first file of that name (`hub.json` in the cache); any other file is refused unopened. No publisher
provides digests.
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
from collections.abc import Collection
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from speakerlab.checkpoints.catalogue import (
    MODELS,
    MODELSCOPE,
    PREFIX,
    HubModel,
    known_name,
)
from speakerlab.checkpoints.model_files import (
    EMBEDDER,
    FILES,
    SEGMENTER,
    read_card,
    read_source,
    weights_in,
)
from speakerlab.core import huggingface
from speakerlab.core.atomic import file_sha256, locked, write_json
from speakerlab.core.reading import keys, read_json

log = logging.getLogger(__name__)
PIN = "@sha256:"
DIGESTS = "hub.json"  # in the cache: name -> digest of the first file
TIMEOUT_SECONDS = 60.0
FILES_OF_NEW_REPOSITORIES = {".gitattributes", "README.md", "LICENSE"}
# In a repository of huggingface.co: checkpoints of WeSpeaker, 3D-Speaker and SpeechBrain, and the
# configurations that tell whose they are.
CHECKPOINTS = {"avg_model.pt", "embedding_model.ckpt"}
CONFIGURATIONS = ("config.yaml", "hyperparams.yaml")
WESPEAKER_INDEX = (
    "https://modelscope.cn/api/v1/datasets/wenet/wespeaker_pretrained_models/oss/tree"
)


def is_published(model: str | Path) -> bool:
    """Return whether this is the name of a published model, and not a path."""
    return str(model).startswith((PREFIX, huggingface.PREFIX))


def local(model: str | Path) -> Path:
    """Return the folder of a `hub:` or `hf:` name; return any other path unchanged."""
    # A path of Windows has turned the slash of hf:owner/name around.
    name = model.as_posix() if isinstance(model, PurePath) else model
    if name.startswith(PREFIX):
        return fetch(name)
    if name.startswith(huggingface.PREFIX):
        return fetch_repository(name)
    return Path(model)


def fetch_repository(name: str) -> Path:
    """Return the model folder of `hf:owner/name`; ValueError if the repository holds none."""
    # Nothing else of the repository, such as a pickle, is downloaded.
    folder = huggingface.fetch(name, FILES)
    missing = [file for file in FILES[:2] if not (folder / file).exists()]
    if not any((folder / weights).exists() for weights in (EMBEDDER, SEGMENTER)):
        missing.append(EMBEDDER)
    if missing:
        fix = "give the repository of a model that `speakerlab publish` has uploaded"
        if _lists_checkpoint(name):
            fix = (
                f"it holds a checkpoint of another toolkit: `speakerlab import {name}"
                " --out DIR` converts it, and DIR is a model"
            )
        raise ValueError(
            f"{name}: is no model of speakerlab ({', '.join(missing)} missing); {fix}"
        )
    return folder


def _lists_checkpoint(name: str) -> bool:
    """Return whether a repository holds a checkpoint that `speakerlab import` may know."""
    repository = huggingface.parse(name)
    api = huggingface.api_of(name)
    with huggingface.one_line(name, "listed"):
        files = api.list_repo_files(repository.name, revision=repository.revision)
    return not CHECKPOINTS.isdisjoint(files)


def fetch_checkpoint(name: str) -> Path | None:
    """Return the folder with the checkpoint of another toolkit in `hf:owner/name`.

    None for a repository that holds a model of speakerlab, or neither.
    """
    files = ["card.json", *CHECKPOINTS, *CONFIGURATIONS]
    folder = huggingface.fetch(name, files)
    # A model of speakerlab has a card, and is used as it is.
    if (folder / "card.json").exists():
        return None
    for checkpoint in CHECKPOINTS:
        if (folder / checkpoint).exists():
            return folder
    return None


def upload(
    folder: Path, model: str, *, branch: str | None, private: bool, force: bool
) -> str:
    """Upload a model folder as one commit; return `hf:owner/name@COMMIT`.

    The repository and the branch are made if they do not exist. force: also replace another model.
    Raises ValueError, one line, if the repository holds something else, or for errors of the hub.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    name = huggingface.parse(model).name
    api = huggingface.api_of(model)
    with huggingface.one_line(model, "published"):
        api.create_repo(name, private=private or None, exist_ok=True)
        if branch is not None:
            api.create_branch(name, branch=branch, exist_ok=True)
        repository = api.model_info(name, revision=branch)
    if private and not repository.private:
        raise ValueError(
            f"{model}: exists and is public; make it private on"
            f" {huggingface.page_here(model)}/settings, or leave --private out"
        )
    remote_files = {sibling.rfilename for sibling in repository.siblings or ()}
    pinned = f"{huggingface.PREFIX}{name}@{repository.sha}"
    their_digest = _remote_sha256(pinned, remote_files)
    our_digest = read_card(folder, weights_in(folder))["sha256"]
    if their_digest not in (None, our_digest) and not force:
        raise ValueError(f"{model}: holds another model; use --force to replace it")

    our_files = sorted(path.name for path in folder.iterdir())
    operations: list[Any] = []
    for file in our_files:
        content = str(folder / file)
        operations.append(CommitOperationAdd(file, content))
    # Files of a model that we lack, such as the calibration of an earlier one.
    outdated_files = remote_files & set(FILES) - set(our_files)
    for file in sorted(outdated_files):
        operations.append(CommitOperationDelete(file))
    with huggingface.one_line(model, "published"):
        commit = api.create_commit(
            name,
            operations,
            commit_message=f"Publish the model with sha256 {our_digest[:12]}",
            revision=branch,
            # Refused if another publication came in between.
            parent_commit=repository.sha,
        )
    return f"{huggingface.PREFIX}{name}@{commit.oid}"


def _remote_sha256(pinned: str, files: Collection[str]) -> str | None:
    """Return the digest of the model in a repository, None for a new one.

    Raises ValueError for a repository of something else.
    """
    if "card.json" in files:
        folder = huggingface.fetch(pinned, ["card.json"])
        card = read_json(folder / "card.json", like=keys(sha256=str))
        return str(card["sha256"])
    foreign_files = sorted(set(files) - FILES_OF_NEW_REPOSITORIES)
    if foreign_files:
        raise ValueError(
            f"{pinned}: holds files that are no model of speakerlab"
            f" ({', '.join(foreign_files[:3])}); choose another name"
        )
    return None


def fetch(name: str) -> Path:
    """Return the model folder of a published model, downloaded and imported on first use.

    Raises ValueError, and leaves the cache as it was, for an unknown name and if a download fails,
    is incomplete or has another digest.
    """
    given_name, is_pinned, pinned = name.removeprefix(PREFIX).partition(PIN)
    name = known_name(given_name)
    pinned = pinned.lower()
    # An empty digest, as of a variable that is not set, must not mean "any".
    if is_pinned and not re.fullmatch("[0-9a-f]{64}", pinned):
        raise ValueError(
            f"{PREFIX}{name}: sha256 '{pinned}' is not 64 hex digits; correct it"
        )
    usual_cache = Path.home() / ".cache" / "speakerlab"
    cache = Path(os.environ.get("SPEAKERLAB_CACHE") or usual_cache)
    folder = cache / name
    if not _is_cached(folder, pinned):
        cache.mkdir(parents=True, exist_ok=True)
        # Every rank of a training asks for its model; the first downloads it for all.
        with locked(cache / ".lock"):
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
    digests_file = cache / DIGESTS
    first_digests: dict[str, str] = {}
    if digests_file.exists():
        first_digests = read_json(digests_file)
    # Trust on first use: no publisher provides digests, but a file that changes later is refused.
    first_digest = first_digests.get(name)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        file = _file_of(model, folder, Path(scratch))
        # Checked before anything reads the content of the file.
        digest = file_sha256(file)
        _check_digest(model, digest, pinned=pinned, first_digest=first_digest)

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
            pretrained=model.pretrained or None,
            about=about,
        )
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        imported.replace(folder)
    # Only after the import: a file that cannot be imported must not pin its digest.
    if not pinned and first_digest is None:
        log.info(
            "%s%s: first use; later downloads must have sha256:%s", PREFIX, name, digest
        )
    write_json(digests_file, {**first_digests, name: digest})


def _file_of(model: HubModel, folder: Path, scratch: Path) -> Path:
    """Return the file that a user without network has put into `folder`, or a download of it."""
    by_hand = folder / model.file
    if by_hand.exists():
        return by_hand
    file = scratch / model.file
    address = _address(model, by_hand)
    download(address, file, otherwise=by_hand)
    return file


def _check_digest(
    model: HubModel, digest: str, *, pinned: str, first_digest: str | None
) -> None:
    """Raise ValueError unless a file has the pinned digest or, without a pin, the first one.

    pinned: "" without a pin. first_digest: of the first file of this model; None before there is
    one.
    """
    expected = pinned or first_digest
    if expected is None or digest == expected:
        return
    origin = "requested" if pinned else "known"
    raise ValueError(
        f"{PREFIX}{model.name}: {model.file} has sha256 {digest} instead of the"
        f" {origin} {expected}; it was not used"
    )


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
    if mirror:
        return f"{mirror.rstrip('/')}/{quote(model.path)}"
    host, _, path = model.path.partition("/")
    if host == "github":
        return f"https://github.com/{quote(path)}"
    if host == "huggingface":
        endpoint = os.environ.get("HF_ENDPOINT") or huggingface.WEBSITE
        return f"{endpoint.rstrip('/')}/{quote(path)}"
    if host == "models":
        return f"{MODELSCOPE}{quote(model.path)}"

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
