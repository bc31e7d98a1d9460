"""Backbones: feats_BTF, log mel features in fp32, -> emb_BD.

To add one: a file here, a line below, a YAML in conf/, and a line for the tests (CONTRIBUTING.md).

Every model takes keyword arguments only, among them `feat_dim` and `embed_dim`, and has the
attributes `feat_dim`, `embed_dim` and `min_frames`: the fewest frames that leave two to pool, or
one for a model that pools only means. (The deviation of one frame is 0 for every speaker.) A model
with the argument `num_layers` takes the layers of a pretrained model (`frontend.name: ssl`) side by
side, so its `feat_dim` is that of all layers together.
Names and shapes of the parameters match the published checkpoints.
Letters: B batch, T frames, F mel bins, D embedding.
"""

from collections.abc import Mapping

from torch import nn

from speakerlab.core.registry import Registry

# The modules are imported when a name is first looked up, not here.
MODELS: Mapping[str, type[nn.Module]] = Registry(
    __name__,
    {
        "campplus": "campplus:CAMPPlus",
        "eres2net": "eres2net:ERes2Net",
        "eres2netv2": "eres2net:ERes2NetV2",
        "res2net": "res2net:Res2Net",
        "resnet": "resnet:ResNet",
        "ecapa_tdnn": "ecapa_tdnn:ECAPATDNN",
        "ecapa_tdnn_wespeaker": "ecapa_tdnn:ECAPATDNNWeSpeaker",
        "xvector": "xvector:XVector",
        "simam_resnet": "simam_resnet:SimAMResNet",
        "gemini_dfresnet": "gemini_dfresnet:GeminiDFResNet",
        "redimnet": "redimnet:ReDimNet",
        "redimnet2": "redimnet2:ReDimNet2",
        # Over the layers of a pretrained model.
        "adapter_mfa": "adapter_mfa:AdapterMFA",
        "mhfa": "mhfa:MHFA",
        "pmfa": "pmfa:PMFA",
    },
)
# Networks of the task `segmentation`: feats_BTF -> log_prob_BFC, log-probabilities of the sets of
# local speakers (core/powerset.py) in F frames. They take `feat_dim`, and have the attributes
# `feat_dim`, `min_samples`, `hop_samples`, `field_samples` and `num_sets`, and the method
# `num_frames`; samples and frames count their input.
SEGMENTERS: Mapping[str, type[nn.Module]] = Registry(
    __name__,
    {
        "pyannet": "pyannet:PyanNet",
    },
)
