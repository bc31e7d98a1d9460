"""The architectures that 3D-Speaker and WeSpeaker publish, and how tensors show their arguments.

`recognise.py` tries the rows of `ARCHITECTURES` in turn. To add one: a row. Arguments that it does
not name keep the defaults of our constructor. The tests check that every published member of
tests/models/members.py is recognised with exactly its arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from speakerlab.checkpoints.names import Toolkit
from speakerlab.models import gemini_dfresnet, redimnet, resnet

Stages = tuple[int, ...]
BLOCKS = r"layer(\d)\.(\d+)\."
# 3D-Speaker's published networks, which differ from WeSpeaker's in their last layers.
ONE_LAYER = {"pooling": "tstp", "two_emb_layer": False}
TWO_LAYERS = {"pooling": "tstp", "two_emb_layer": True}


@dataclass(frozen=True)
class Architecture:
    """One row. Tensor names are ours; all combinations of `choices` are tried."""

    model: str  # a name in speakerlab.models.MODELS
    toolkit: Toolkit
    args: Mapping[str, object] = field(default_factory=dict)  # fixed, as no tensor shows them
    # Argument -> (tensor, axis): the size of that axis.
    sizes: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    # Argument -> pattern with a group for the stage and one for the block: blocks of each stage.
    blocks: Mapping[str, str] = field(default_factory=dict)
    # Blocks of each stage -> depth, if the argument is `depth` and not the blocks themselves.
    depths: Mapping[Stages, int] = field(default_factory=dict)
    # Argument -> tensor that exists if it is true.
    flags: Mapping[str, str] = field(default_factory=dict)
    # Argument -> values to try.
    choices: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def title(self) -> str:
        """Return its name in messages."""
        return f"{self.model} of {'3D-Speaker' if self.toolkit == '3dspeaker' else 'WeSpeaker'}"


def _open_flags(args: Mapping[str, object]) -> dict[str, str]:
    return {} if "two_emb_layer" in args else {"two_emb_layer": "seg_2.weight"}


def _campplus(toolkit: Toolkit, **args: object) -> Architecture:
    return Architecture(
        "campplus",
        toolkit,
        args,
        sizes={
            "embed_dim": ("xvector.dense.linear.weight", 0),
            "init_channels": ("xvector.tdnn.linear.weight", 0),
            "growth_rate": ("xvector.block1.tdnnd1.cam_layer.linear_local.weight", 0),
        },
    )


def _res2(model: str, toolkit: Toolkit, **args: object) -> Architecture:
    """Return a row of ERes2Net or a relative, for one set of widths."""
    return Architecture(
        model,
        toolkit,
        args,
        sizes={"embed_dim": ("seg_1.weight", 0), "m_channels": ("conv1.weight", 0)},
        blocks={"blocks": BLOCKS},
        flags=_open_flags(args),
    )


def _resnet(toolkit: Toolkit, *, deep: bool, **args: object) -> Architecture:
    depths = {blocks: depth for depth, blocks in resnet.STAGES.items() if (depth >= 50) == deep}
    return Architecture(
        "resnet",
        toolkit,
        args,
        sizes={"embed_dim": ("seg_1.weight", 0), "m_channels": ("conv1.weight", 0)},
        blocks={"depth": BLOCKS},
        depths=depths,
        flags=_open_flags(args),
    )


def _xvector(toolkit: Toolkit, **args: object) -> Architecture:
    return Architecture(
        "xvector",
        toolkit,
        args,
        sizes={
            "embed_dim": ("seg_1.weight", 0),
            "hidden_channels": ("frame_1.conv_1d.weight", 0),
            "stats_channels": ("frame_5.conv_1d.weight", 0),
        },
        flags=_open_flags(args),
    )


HUGE = {"base_width": 24, "scale": 3, "expansion": 4}  # also called "aug"
V2_SETS = (
    {"base_width": 26, "scale": 2, "expansion": 2},
    {"base_width": 24, "scale": 4, "expansion": 4},
)

ARCHITECTURES: tuple[Architecture, ...] = (
    _campplus("3dspeaker"),
    _res2("eres2net", "3dspeaker", **ONE_LAYER),
    _res2("eres2net", "3dspeaker", **ONE_LAYER, **HUGE),
    *(_res2("eres2netv2", "3dspeaker", **ONE_LAYER, **widths) for widths in V2_SETS),
    _res2("res2net", "3dspeaker", **ONE_LAYER),
    _resnet("3dspeaker", deep=False, pool_eps=1e-8, **TWO_LAYERS),
    Architecture(
        "ecapa_tdnn",
        "3dspeaker",
        sizes={"embed_dim": ("fc.conv.weight", 0), "channels": ("blocks.0.conv.conv.weight", 0)},
        choices={"global_context": (True, False)},
    ),
    _xvector("3dspeaker", pool_eps=1e-8, **ONE_LAYER),
    _campplus("wespeaker", pool_eps=1e-7),
    _res2("eres2net", "wespeaker", pool_eps=1e-7),
    _res2("eres2net", "wespeaker", pool_eps=1e-7, **HUGE),
    _res2("res2net", "wespeaker", pool_eps=1e-7),
    _resnet("wespeaker", deep=False),
    _resnet("wespeaker", deep=True),
    Architecture(
        "ecapa_tdnn_wespeaker",
        "wespeaker",
        sizes={
            "embed_dim": ("linear.weight", 0),
            "channels": ("layer1.conv.weight", 0),
            "stats_channels": ("conv.weight", 0),
        },
        flags={"emb_bn": "bn2.weight"},
        choices={"global_context": (False, True)},
    ),
    _xvector("wespeaker", pool_eps=1e-7),
    Architecture(
        "simam_resnet",
        "wespeaker",
        sizes={"embed_dim": ("bottleneck.weight", 0), "m_channels": ("front.conv1.weight", 0)},
        choices={"depth": (34, 100)},
    ),
    Architecture(
        "gemini_dfresnet",
        "wespeaker",
        sizes={"embed_dim": ("seg_1.weight", 0)},
        blocks={"depth": r"stages\.(\d)\.(\d+)\."},
        depths={blocks: depth for depth, blocks in gemini_dfresnet.STAGES.items()},
    ),
    Architecture(
        "redimnet",
        "wespeaker",
        sizes={"embed_dim": ("seg_1.weight", 0)},
        choices={"size": tuple(redimnet.SIZES)},
    ),
)
