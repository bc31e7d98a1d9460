"""Backbones: feats_BTF -> emb_BD. To add one: a file here, a line below, a YAML in conf/.

Every model takes keyword arguments only, among them `feat_dim` and `embed_dim`, and has the
attributes `embed_dim` and `min_frames` (the fewest frames that it can pool).
Letters: B batch, T frames, F mel bins, D embedding.
"""

from torch import nn

from speakerlab.models.campplus import CAMPPlus
from speakerlab.models.eres2net import ERes2Net

MODELS: dict[str, type[nn.Module]] = {
    "campplus": CAMPPlus,
    "eres2net": ERes2Net,
}
