"""Published models by name. In: `hub:ID` or `hub:ID@sha256:HEX`. Out: a model folder in the cache.

The cache is $SPEAKERLAB_CACHE or `~/.cache/speakerlab`; $SPEAKERLAB_HUB is the address of a mirror.
A download must have the digest that the user pinned, else that of the table, else that of the first
download (`hub.json` in the cache); any other file is refused unopened.

The table: 3D-Speaker's models are those of its speakerlab/bin/infer_sv.py, on ModelScope.
WeSpeaker's are those of its docs/pretrained.md and wespeaker/cli/hub.py, which finds the address of
an archive in the index of a data set. To add a model: one line in its list below.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from speakerlab.checkpoints.foreign import import_checkpoint
from speakerlab.checkpoints.toolkit_config import Toolkit
from speakerlab.core.atomic import file_sha256, write_json
from speakerlab.core.faults import nearest

log = logging.getLogger(__name__)
PREFIX = "hub:"
PIN = "@sha256:"
LOCK = "hub.json"  # name -> digest of the first download
TIMEOUT_SECONDS = 60.0
MODELSCOPE = "https://www.modelscope.cn/"
WESPEAKER_INDEX = "https://modelscope.cn/api/v1/datasets/wenet/wespeaker_pretrained_models/oss/tree"


@dataclass(frozen=True)
class HubModel:
    """One published model."""

    path: str  # on a mirror: `models/ID/resolve/REVISION/FILE` or `wespeaker/ARCHIVE`
    frontend: Toolkit
    sha256: str | None = None  # None: the publisher has none, today all of them

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]


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
    folder, lock = cache / name, cache / LOCK
    first_digests = json.loads(lock.read_text(encoding="utf-8")) if lock.exists() else {}
    wanted = pinned or MODELS[name].sha256 or first_digests.get(name)
    card = folder / "card.json"
    if card.exists():
        found = json.loads(card.read_text(encoding="utf-8"))["source"]["sha256"]
        if wanted in (found, None):
            return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        file = Path(scratch) / MODELS[name].file
        download(_address(name, MODELS[name]), file)
        digest = file_sha256(file)
        if wanted not in (digest, None):
            raise ValueError(
                f"{PREFIX}{name}: the download has sha256 {digest} instead of "
                f"{'the requested' if pinned else 'the known'} {wanted}; it was removed"
            )
        imported = Path(scratch) / "model"
        import_checkpoint(file, imported, frontend=MODELS[name].frontend)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        imported.replace(folder)
    if not wanted:
        text = "%s%s: first download; later ones must have sha256:%s"
        log.info(text, PREFIX, name, digest)
    write_json(lock, {**first_digests, name: digest})
    return folder


def known_name(name: str) -> str:
    """Return the full name of a published model; ValueError with the nearest for an unknown one.

    The owner may be left out; `damo/`, ModelScope's former owner, is `iic/`.
    """
    own = name.replace("damo/", "iic/", 1) if name.startswith("damo/") else name
    for known in MODELS:
        if own in (known, known.partition("/")[2]):
            return known
    hint = nearest(name.rpartition("/")[2], (known.partition("/")[2] for known in MODELS))
    raise ValueError(f"{PREFIX}{name}: no such published model{hint}")


def download(address: str, file: Path) -> None:
    """Download to `file`. Raises ValueError, one line, unless it is complete."""
    log.info("downloading %s", address)
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as reply:
            length = reply.headers.get("Content-Length")
            with file.open("wb") as target:
                shutil.copyfileobj(reply, target)
    except (OSError, http.client.HTTPException, ValueError) as error:
        fix = "try again, or set SPEAKERLAB_HUB to a mirror"
        raise ValueError(f"{address}: cannot be downloaded ({error}); {fix}") from error
    if length is not None and file.stat().st_size != int(length):
        raise ValueError(
            f"{address}: the download ended early, after {file.stat().st_size} of {length} bytes; "
            "try again"
        )


def _address(name: str, model: HubModel) -> str:
    """Return where the file is: on the mirror, or at its publisher."""
    mirror = os.environ.get("SPEAKERLAB_HUB")
    if mirror or not model.path.startswith("wespeaker/"):
        return f"{(mirror or MODELSCOPE).rstrip('/')}/{quote(model.path)}"
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


# Name without "iic/speech_", revision and file.
MODELSCOPE_MODELS = """
campplus_sv_zh-cn_16k-common v1.0.0 campplus_cn_common.bin
eres2net_sv_zh-cn_16k-common v1.0.5 pretrained_eres2net_aug.ckpt
eres2netv2_sv_zh-cn_16k-common v1.0.1 pretrained_eres2netv2.ckpt
eres2netv2w24s4ep4_sv_zh-cn_16k-common v1.0.1 pretrained_eres2netv2w24s4ep4.ckpt
eres2net_base_200k_sv_zh-cn_16k-common v1.0.0 pretrained_eres2net.pt
campplus_sv_zh_en_16k-common_advanced v1.0.0 campplus_cn_en_common.pt
campplus_sv_en_voxceleb_16k v1.0.2 campplus_voxceleb.bin
eres2net_sv_en_voxceleb_16k v1.0.2 pretrained_eres2net.ckpt
eres2net_base_sv_zh-cn_3dspeaker_16k v1.0.1 eres2net_base_model.ckpt
eres2net_large_sv_zh-cn_3dspeaker_16k v1.0.0 eres2net_large_model.ckpt
ecapa-tdnn_sv_zh-cn_cnceleb_16k v1.0.0 ecapa-tdnn.ckpt
ecapa-tdnn_sv_zh-cn_3dspeaker_16k v1.0.0 ecapa-tdnn.ckpt
ecapa-tdnn_sv_en_voxceleb_16k v1.0.1 ecapa_tdnn.bin
"""
# Name in WeSpeaker's command line and archive; campplus and eres2net take 3D-Speaker's features.
WESPEAKER_MODELS = """
chinese cnceleb_resnet34.tar.gz
english voxceleb_resnet221_LM.tar.gz
campplus campplus_cn_common_200k.tar.gz
eres2net eres2net_cn_commom_200k.tar.gz
vblinkp voxblink2_samresnet34.zip
vblinkf voxblink2_samresnet34_ft.zip
"""
# Archives of its list of models.
WESPEAKER_ARCHIVES = """
voxceleb_resnet34.zip voxceleb_resnet34_LM.zip voxceleb_resnet152_LM.zip
voxceleb_resnet221_LM.zip voxceleb_resnet293_LM.zip voxceleb_CAM++.zip voxceleb_CAM++_LM.zip
voxceleb_ECAPA512.zip voxceleb_ECAPA512_LM.zip voxceleb_ECAPA1024.zip voxceleb_ECAPA1024_LM.zip
voxceleb_gemini_dfresnet114_LM.zip cnceleb_resnet34.zip cnceleb_resnet34_LM.zip
voxblink2_samresnet34.zip voxblink2_samresnet34_ft.zip voxblink2_samresnet100.zip
voxblink2_samresnet100_ft.zip
"""


def _list_models() -> dict[str, HubModel]:
    models: dict[str, HubModel] = {}
    for name, revision, file in map(str.split, MODELSCOPE_MODELS.strip().splitlines()):
        path = f"models/iic/speech_{name}/resolve/{revision}/{file}"
        models[f"iic/speech_{name}"] = HubModel(path, "3dspeaker")
    named = [line.split() for line in WESPEAKER_MODELS.strip().splitlines()]
    for name, archive in named + [[a.partition(".")[0], a] for a in WESPEAKER_ARCHIVES.split()]:
        frontend = "3dspeaker" if name in ("campplus", "eres2net") else "wespeaker"
        models[f"wespeaker/{name}"] = HubModel(f"wespeaker/{archive}", frontend)
    return models


MODELS = _list_models()
