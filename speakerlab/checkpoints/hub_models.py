"""The models that 3D-Speaker and WeSpeaker publish: under which name, and where their files are.

3D-Speaker's are the table `supports` of its speakerlab/bin/infer_sv.py, which downloads from
ModelScope; a single file of a repository there has the address MODELSCOPE below. WeSpeaker's are
those of its docs/pretrained.md and wespeaker/cli/hub.py, which finds the address of an archive in
an index of the data set WESPEAKER_INDEX.

`sha256` is None where the publisher gives none, which is everywhere so far: see `hub.py` for what
is done then. To add a model: a row.
"""

from dataclasses import dataclass
from urllib.parse import quote

from speakerlab.checkpoints.toolkit_config import FrontendName

MODELSCOPE = "https://www.modelscope.cn/"
WESPEAKER_INDEX = "https://modelscope.cn/api/v1/datasets/wenet/wespeaker_pretrained_models/oss/tree"


@dataclass(frozen=True)
class HubModel:
    """One published model."""

    path: str  # of its file on a mirror: see `mirrored`
    in_index: bool  # whether the address is found by asking WESPEAKER_INDEX for the file's name
    frontend: FrontendName
    sha256: str | None = None

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]

    def mirrored(self, base: str) -> str:
        """The address below a base: `models/ID/resolve/REVISION/FILE`, `wespeaker/ARCHIVE`."""
        return f"{base.rstrip('/')}/{quote(self.path)}"


def _modelscope(name: str, revision: str, file: str) -> tuple[str, HubModel]:
    return name, HubModel(f"models/{name}/resolve/{revision}/{file}", False, "3dspeaker")


def _wespeaker(
    archive: str, *, name: str = "", frontend: FrontendName = "wespeaker"
) -> tuple[str, HubModel]:
    stem = name or archive.partition(".")[0]
    return f"wespeaker/{stem}", HubModel(f"wespeaker/{archive}", True, frontend)


SV = "iic/speech_"
MODELS: dict[str, HubModel] = dict(
    [
        _modelscope(f"{SV}campplus_sv_zh-cn_16k-common", "v1.0.0", "campplus_cn_common.bin"),
        _modelscope(f"{SV}eres2net_sv_zh-cn_16k-common", "v1.0.5", "pretrained_eres2net_aug.ckpt"),
        _modelscope(f"{SV}eres2netv2_sv_zh-cn_16k-common", "v1.0.1", "pretrained_eres2netv2.ckpt"),
        _modelscope(
            f"{SV}eres2netv2w24s4ep4_sv_zh-cn_16k-common",
            "v1.0.1",
            "pretrained_eres2netv2w24s4ep4.ckpt",
        ),
        _modelscope(
            f"{SV}eres2net_base_200k_sv_zh-cn_16k-common", "v1.0.0", "pretrained_eres2net.pt"
        ),
        _modelscope(
            f"{SV}campplus_sv_zh_en_16k-common_advanced", "v1.0.0", "campplus_cn_en_common.pt"
        ),
        _modelscope(f"{SV}campplus_sv_en_voxceleb_16k", "v1.0.2", "campplus_voxceleb.bin"),
        _modelscope(f"{SV}eres2net_sv_en_voxceleb_16k", "v1.0.2", "pretrained_eres2net.ckpt"),
        _modelscope(
            f"{SV}eres2net_base_sv_zh-cn_3dspeaker_16k", "v1.0.1", "eres2net_base_model.ckpt"
        ),
        _modelscope(
            f"{SV}eres2net_large_sv_zh-cn_3dspeaker_16k", "v1.0.0", "eres2net_large_model.ckpt"
        ),
        _modelscope(f"{SV}ecapa-tdnn_sv_zh-cn_cnceleb_16k", "v1.0.0", "ecapa-tdnn.ckpt"),
        _modelscope(f"{SV}ecapa-tdnn_sv_zh-cn_3dspeaker_16k", "v1.0.0", "ecapa-tdnn.ckpt"),
        _modelscope(f"{SV}ecapa-tdnn_sv_en_voxceleb_16k", "v1.0.1", "ecapa_tdnn.bin"),
        # By the names of WeSpeaker's command line; the second pair takes 3D-Speaker's features.
        _wespeaker("cnceleb_resnet34.tar.gz", name="chinese"),
        _wespeaker("voxceleb_resnet221_LM.tar.gz", name="english"),
        _wespeaker("campplus_cn_common_200k.tar.gz", name="campplus", frontend="3dspeaker"),
        _wespeaker("eres2net_cn_commom_200k.tar.gz", name="eres2net", frontend="3dspeaker"),
        _wespeaker("voxblink2_samresnet34.zip", name="vblinkp"),
        _wespeaker("voxblink2_samresnet34_ft.zip", name="vblinkf"),
        # By the names of its list of models.
        _wespeaker("voxceleb_resnet34.zip"),
        _wespeaker("voxceleb_resnet34_LM.zip"),
        _wespeaker("voxceleb_resnet152_LM.zip"),
        _wespeaker("voxceleb_resnet221_LM.zip"),
        _wespeaker("voxceleb_resnet293_LM.zip"),
        _wespeaker("voxceleb_CAM++.zip"),
        _wespeaker("voxceleb_CAM++_LM.zip"),
        _wespeaker("voxceleb_ECAPA512.zip"),
        _wespeaker("voxceleb_ECAPA512_LM.zip"),
        _wespeaker("voxceleb_ECAPA1024.zip"),
        _wespeaker("voxceleb_ECAPA1024_LM.zip"),
        _wespeaker("voxceleb_gemini_dfresnet114_LM.zip"),
        _wespeaker("cnceleb_resnet34.zip"),
        _wespeaker("cnceleb_resnet34_LM.zip"),
        _wespeaker("voxblink2_samresnet34.zip"),
        _wespeaker("voxblink2_samresnet34_ft.zip"),
        _wespeaker("voxblink2_samresnet100.zip"),
        _wespeaker("voxblink2_samresnet100_ft.zip"),
    ]
)
