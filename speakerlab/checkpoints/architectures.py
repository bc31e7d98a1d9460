"""Architectures of 3D-Speaker and WeSpeaker, and the tensors that show their arguments.

`recognise.py` tries the rows of `ARCHITECTURES` in turn. To add one: a row. Arguments that it does
not name keep the defaults of our constructor. The tests check that every published member of
tests/models/members.py is recognised with exactly its arguments.

`RENAMES` maps published parameter names to our names where they differ. To add one: the shortest
pattern that matches nothing else, and a comment about the difference. Tensors are never reshaped.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from speakerlab.checkpoints.toolkit_config import TITLES, Toolkit
from speakerlab.models import gemini_dfresnet, redimnet, redimnet2, resnet


@dataclass(frozen=True)
class Architecture:
    """Row of `ARCHITECTURES`. Tensor names are ours; all combinations of `choices` are tried."""

    model: str  # a name in speakerlab.models.MODELS
    toolkit: Toolkit
    # Arguments that are fixed, because no tensor shows them.
    args: Mapping[str, object] = field(default_factory=dict)
    # Argument -> tensor: the size of its first axis.
    sizes: Mapping[str, str] = field(default_factory=dict)
    # Argument, if it is not fixed -> tensor that exists if it is true.
    flags: Mapping[str, str] = field(default_factory=dict)
    # Argument -> values to try.
    choices: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def title(self) -> str:
        """Return the name for messages."""
        return f"{self.model} of {TITLES[self.toolkit]}"


def _resnet(
    toolkit: Toolkit, model: str, *, depths: Iterable[int] = (), **args: object
) -> Architecture:
    """Return the row of a ResNet, or of an ERes2Net variant with one set of widths."""
    # A ResNet is built by its depth. No tensor has the depth as a size, so all depths are tried.
    choices: dict[str, tuple[object, ...]] = {}
    if depths:
        choices["depth"] = tuple(depths)
    return Architecture(
        model,
        toolkit,
        args,
        sizes={**SEG_1, "m_channels": "conv1.weight"},
        flags=SEG_2,
        choices=choices,
    )


# The last layers of most networks: one, or two with a BatchNorm between them.
SEG_1 = {"embed_dim": "seg_1.weight"}
SEG_2 = {"two_emb_layer": "seg_2.weight"}
CAMPPLUS = {
    "embed_dim": "xvector.dense.linear.weight",
    "init_channels": "xvector.tdnn.linear.weight",
    "growth_rate": "xvector.block1.tdnnd1.cam_layer.linear_local.weight",
}
XVECTOR = {
    **SEG_1,
    "hidden_channels": "frame_1.conv_1d.weight",
    "stats_channels": "frame_5.conv_1d.weight",
}
# The published networks of 3D-Speaker differ from WeSpeaker's in the last layers.
ONE_LAYER = {"pooling": "tstp", "two_emb_layer": False}
TWO_LAYERS = {"pooling": "tstp", "two_emb_layer": True}
# Widths of ERes2Net "huge", also called "aug", of ERes2NetV2, and of its large form. No tensor has
# these widths as a size, so each published set has a row.
HUGE: dict[str, Any] = {"base_width": 24, "scale": 3, "expansion": 4}
V2: dict[str, Any] = {"base_width": 26, "scale": 2, "expansion": 2}
V2_LARGE: dict[str, Any] = {"base_width": 24, "scale": 4, "expansion": 4}
ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("campplus", "3dspeaker", sizes=CAMPPLUS),
    _resnet("3dspeaker", "eres2net", **ONE_LAYER),
    _resnet("3dspeaker", "eres2net", **ONE_LAYER, **HUGE),
    _resnet("3dspeaker", "eres2netv2", **ONE_LAYER, **V2),
    _resnet("3dspeaker", "eres2netv2", **ONE_LAYER, **V2_LARGE),
    _resnet("3dspeaker", "res2net", **ONE_LAYER),
    _resnet("3dspeaker", "resnet", depths=(18, 34), pool_eps=1e-8, **TWO_LAYERS),
    Architecture(
        "ecapa_tdnn",
        "3dspeaker",
        sizes={"embed_dim": "fc.conv.weight", "channels": "blocks.0.conv.conv.weight"},
        choices={"global_context": (True, False)},
    ),
    Architecture(
        "xvector",
        "3dspeaker",
        {"pool_eps": 1e-8, **ONE_LAYER},
        sizes=XVECTOR,
    ),
    Architecture("campplus", "wespeaker", {"pool_eps": 1e-7}, sizes=CAMPPLUS),
    _resnet("wespeaker", "eres2net", pool_eps=1e-7),
    _resnet("wespeaker", "eres2net", pool_eps=1e-7, **HUGE),
    _resnet("wespeaker", "res2net", pool_eps=1e-7),
    _resnet("wespeaker", "resnet", depths=resnet.STAGES),
    Architecture(
        "ecapa_tdnn_wespeaker",
        "wespeaker",
        sizes={
            "embed_dim": "linear.weight",
            "channels": "layer1.conv.weight",
            "stats_channels": "conv.weight",
        },
        flags={"emb_bn": "bn2.weight"},
        choices={"global_context": (False, True)},
    ),
    Architecture(
        "xvector",
        "wespeaker",
        {"pool_eps": 1e-7},
        sizes=XVECTOR,
        flags=SEG_2,
    ),
    Architecture(
        "simam_resnet",
        "wespeaker",
        sizes={"embed_dim": "bottleneck.weight", "m_channels": "front.conv1.weight"},
        choices={"depth": (34, 100)},
    ),
    Architecture(
        "gemini_dfresnet",
        "wespeaker",
        sizes=SEG_1,
        choices={"depth": tuple(gemini_dfresnet.STAGES)},
    ),
    Architecture(
        "redimnet",
        "wespeaker",
        sizes=SEG_1,
        choices={"size": tuple(redimnet.SIZES)},
    ),
    # The row also covers the files of ReDimNet2's authors.
    Architecture(
        "redimnet2",
        "wespeaker",
        sizes={"embed_dim": "linear.weight"},
        flags={"group_norm": "backbone.stem_gnorm.weight"},
        choices={"size": tuple(redimnet2.SIZES), "dual": (False, True)},
    ),
)

# (pattern, replacement) pairs, applied in turn with `re.sub` to a published name.
RENAMES: dict[tuple[str, Toolkit], list[tuple[str, str]]] = {
    # In the two stages with attentive blocks the first of the 3x3 convolutions is separate.
    # The largest numbers are raised first, so that none is raised twice.
    ("eres2net", "wespeaker"): [
        (r"^(layer[34]\.\d+\.(?:convs|bns))\.2\.", r"\1.3."),
        (r"^(layer[34]\.\d+\.(?:convs|bns))\.1\.", r"\1.2."),
        (r"^(layer[34]\.\d+\.(?:convs|bns))\.0\.", r"\1.1."),
        (r"^(layer[34]\.\d+\.)(conv|bn)2_1\.", r"\1\2s.0."),
    ],
    ("redimnet", "wespeaker"): [
        # The weight of the first stage's only input: frozen, and 1 after the softmax.
        (r"^backbone\.inputs_weights\.0$", ""),
        (r"^backbone\.stage(\d)\.", r"backbone.stages.\1."),
        # A wrapper that chooses between two kinds of blocks.
        (r"^(backbone\.stages\.\d\.\d+)\.conv_block\.", r"\1."),
    ],
    ("redimnet2", "wespeaker"): [
        # The constants of the features, and the frozen weight of the first stage's only input.
        (r"^(spec|frontend)\..*", ""),
        (r"^backbone\.stage0(_pre)?\.0\.w$", ""),
        # The parts of a stage: in one list or, if it has two outputs, in four modules.
        (
            r"^backbone\.stage(\d)(?:\.\d+|_1d)\.(?=red_dim_conv|tcm|exp_dim_conv)",
            r"backbone.stages.\1.context.",
        ),
        (r"^backbone\.stage(\d)_up_2d\.1\.", r"backbone.stages.\1.norms.0."),
        (r"^backbone\.stage(\d)_up_1d\.1\.", r"backbone.stages.\1.norms.1."),
        (
            r"^backbone\.stage(\d)\.(?!2\.)\d+\.(?=weight$|bias$)",
            r"backbone.stages.\1.norms.0.",
        ),
        (r"^backbone\.stage(\d)(?:_pre)?\.", r"backbone.stages.\1.pre."),
        (r"^(backbone\.stages\.\d\.pre\.\d+)\.conv_block\.", r"\1."),
    ],
}


def to_our_name(name: str, *, model: str, toolkit: Toolkit) -> str:
    """Return our name of a published tensor, empty if it has no part in the embedding."""
    renames = RENAMES.get((model, toolkit), [])
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name
