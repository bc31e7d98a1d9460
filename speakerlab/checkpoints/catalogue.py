"""The published models that `hub:NAME` finds: files, names, training data and licences.

3D-Speaker's models are those of its speakerlab/bin/infer_sv.py, on ModelScope; its repository
describes their training data and states a licence for its code only. WeSpeaker's models are those
of its docs/pretrained.md and wespeaker/cli/hub.py; it gives a model the licence of its data set
(VoxBlink2's is stated in the repository of that data set). To add a model: one line in a list.
"""

from dataclasses import dataclass
from difflib import get_close_matches

from speakerlab.checkpoints.toolkit_config import Toolkit

PREFIX = "hub:"
MODELSCOPE = "https://www.modelscope.cn/"
WESPEAKER_LIST = "https://github.com/wenet-e2e/wespeaker/blob/master/docs/pretrained.md"
NEAR = 0.82  # similarity of a name that is probably misspelled
LIST = "`speakerlab import --list` lists all"
NOT_STATED = "not stated"
MANDARIN_200K = "200,000 Mandarin speakers, not public"


@dataclass(frozen=True)
class HubModel:
    """One published model."""

    short_name: str
    path: str  # on a mirror: `models/ID/resolve/REVISION/FILE` or `wespeaker/ARCHIVE`
    frontend: Toolkit
    training_data: str
    licence: str
    page: str

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]


# Short name, name without "iic/speech_", revision, file and training data.
MODELSCOPE_MODELS = f"""
campplus-zh-200k campplus_sv_zh-cn_16k-common v1.0.0 campplus_cn_common.bin {MANDARIN_200K}
eres2net-zh-200k eres2net_sv_zh-cn_16k-common v1.0.5 pretrained_eres2net_aug.ckpt {MANDARIN_200K}
eres2netv2-zh-200k eres2netv2_sv_zh-cn_16k-common v1.0.1 pretrained_eres2netv2.ckpt {MANDARIN_200K}
eres2netv2-w24s4ep4-zh-200k eres2netv2w24s4ep4_sv_zh-cn_16k-common v1.0.1 \
pretrained_eres2netv2w24s4ep4.ckpt {MANDARIN_200K}
eres2net-base-zh-200k eres2net_base_200k_sv_zh-cn_16k-common v1.0.0 pretrained_eres2net.pt \
{MANDARIN_200K}
campplus-zh-en campplus_sv_zh_en_16k-common_advanced v1.0.0 campplus_cn_en_common.pt \
Chinese and English, not public
campplus-voxceleb campplus_sv_en_voxceleb_16k v1.0.2 campplus_voxceleb.bin VoxCeleb
eres2net-voxceleb eres2net_sv_en_voxceleb_16k v1.0.2 pretrained_eres2net.ckpt VoxCeleb
eres2net-base-3dspeaker eres2net_base_sv_zh-cn_3dspeaker_16k v1.0.1 eres2net_base_model.ckpt \
3D-Speaker
eres2net-large-3dspeaker eres2net_large_sv_zh-cn_3dspeaker_16k v1.0.0 eres2net_large_model.ckpt \
3D-Speaker
ecapa-cnceleb ecapa-tdnn_sv_zh-cn_cnceleb_16k v1.0.0 ecapa-tdnn.ckpt CN-Celeb
ecapa-3dspeaker ecapa-tdnn_sv_zh-cn_3dspeaker_16k v1.0.0 ecapa-tdnn.ckpt 3D-Speaker
ecapa-voxceleb ecapa-tdnn_sv_en_voxceleb_16k v1.0.1 ecapa_tdnn.bin VoxCeleb
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
# First word of an archive -> training data and licence.
WESPEAKER_DATA = {
    "voxceleb": ("VoxCeleb", "CC BY 4.0"),
    "cnceleb": ("CN-Celeb", "that of CN-Celeb"),
    "voxblink2": ("VoxBlink2", "CC BY-NC-SA 4.0"),
    "voxblink2 ft": ("VoxBlink2, then VoxCeleb2", "CC BY-NC-SA 4.0 and CC BY 4.0"),
    "campplus": (MANDARIN_200K, NOT_STATED),
    "eres2net": (MANDARIN_200K, NOT_STATED),
}


def _list_models() -> dict[str, HubModel]:
    models: dict[str, HubModel] = {}
    for line in MODELSCOPE_MODELS.strip().splitlines():
        short, tail, revision, file, data = line.split(maxsplit=4)
        name = f"iic/speech_{tail}"
        path, page = f"models/{name}/resolve/{revision}/{file}", f"{MODELSCOPE}models/{name}"
        models[name] = HubModel(short, path, "3dspeaker", data, NOT_STATED, page)
    named = [line.split() for line in WESPEAKER_MODELS.strip().splitlines()]
    for name, archive in named + [[a.partition(".")[0], a] for a in WESPEAKER_ARCHIVES.split()]:
        of_data = archive.partition("_")[0] + (" ft" if "_ft." in archive else "")
        frontend = "3dspeaker" if name in ("campplus", "eres2net") else "wespeaker"
        about = (*WESPEAKER_DATA[of_data], WESPEAKER_LIST)
        models[f"wespeaker/{name}"] = HubModel(name, f"wespeaker/{archive}", frontend, *about)
    return models


MODELS = _list_models()


def known_name(name: str) -> str:
    """Return the full name of a published model; ValueError with the nearest for an unknown one.

    The owner may be left out; `damo/`, ModelScope's former owner, is `iic/`.
    """
    own = name.replace("damo/", "iic/", 1) if name.startswith("damo/") else name
    for known, model in MODELS.items():
        if own in (known, known.partition("/")[2], model.short_name):
            return known
    raise ValueError(f"{PREFIX}{name}: no such published model; {near_miss(name) or LIST}")


def near_miss(name: str) -> str:
    """Return "did you mean hub:NAME?" if a published model has almost this name, else ""."""
    lower = {known.lower(): known for known in MODELS}
    lower |= {key.partition("/")[2]: known.partition("/")[2] for key, known in lower.items()}
    lower |= {model.short_name.lower(): model.short_name for model in MODELS.values()}
    close = get_close_matches(name.lower(), lower, n=1, cutoff=NEAR)
    return f"did you mean {PREFIX}{lower[close[0]]}?" if close else ""


def table() -> str:
    """Return the list of published models, one per line, with what their publishers state."""
    rows = [("name", "training data", "licence", "other name")]
    for known, model in MODELS.items():
        names = f"{PREFIX}{model.short_name}", f"{PREFIX}{known}"
        rows.append((names[0], model.training_data, model.licence, names[1]))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    note = (
        f"{NOT_STATED}: the publisher's repository states none for its models; see the page of the "
        f"model,\n{MODELSCOPE}models/iic/..., before you use or share it"
    )
    return "\n".join([*lines, "", note]) + "\n"
