"""Backbones: feats_BTF -> emb_BD. To add one: a file here, a line below, a YAML in conf/.

Every model takes keyword arguments only, among them `feat_dim` and `embed_dim`, and has the
attributes `feat_dim`, `embed_dim` and `min_frames`: the fewest frames that leave two to pool, or
one for a model that pools only means. (The deviation of one frame is 0 for every speaker.)
Letters: B batch, T frames, F mel bins, D embedding.
"""

from torch import nn

from speakerlab.models.campplus import CAMPPlus
from speakerlab.models.ecapa_tdnn import ECAPATDNN
from speakerlab.models.ecapa_tdnn_wespeaker import ECAPATDNNWeSpeaker
from speakerlab.models.eres2net import ERes2Net, ERes2NetV2
from speakerlab.models.gemini_dfresnet import GeminiDFResNet
from speakerlab.models.redimnet import ReDimNet
from speakerlab.models.res2net import Res2Net
from speakerlab.models.resnet import ResNet
from speakerlab.models.simam_resnet import SimAMResNet
from speakerlab.models.xvector import XVector

MODELS: dict[str, type[nn.Module]] = {
    "campplus": CAMPPlus,
    "eres2net": ERes2Net,
    "eres2netv2": ERes2NetV2,
    "res2net": Res2Net,
    "resnet": ResNet,
    "ecapa_tdnn": ECAPATDNN,
    "ecapa_tdnn_wespeaker": ECAPATDNNWeSpeaker,
    "xvector": XVector,
    "simam_resnet": SimAMResNet,
    "gemini_dfresnet": GeminiDFResNet,
    "redimnet": ReDimNet,
}
