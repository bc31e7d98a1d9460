"""Every published network, and the facts that the contract tests need about each model.

To add a network, add a line to `MEMBERS` and run `python tests/parity/make.py --toolkit ... --peer
DIR NAME`, which writes tests/parity/NAME.npz.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

THREE = "speakerlab.models"
WE = "wespeaker.models"
# With random weights the fusions amplify rounding: in the published code, fp32 differs from float64
# by up to 2e-4 (two groups), 1.3e-2 (three) and 0.15 (four). About three times that is allowed.
FUSED = 5e-4
FUSED_3 = 4e-2
FUSED_4 = 0.5
HUGE: dict[str, Any] = {
    "m_channels": 64,
    "base_width": 24,
    "scale": 3,
    "expansion": 4,
}


@dataclass(frozen=True)
class Member:
    """Published network: how to build it here and upstream, and the error allowed."""

    model: str  # a name in speakerlab.models.MODELS
    args: dict[str, object]
    toolkit: Literal[
        "3dspeaker", "wespeaker", "mhfa"
    ]  # selects rules of checkpoints.architectures
    # "module:class or function" that builds the published network from these arguments.
    upstream: str
    upstream_args: dict[str, object] = field(default_factory=dict)
    # The error allowed in fp32. Random weights amplify rounding in some networks: then this is what
    # the published code itself shows, inf where it overflows. The exact test is the one in float64.
    fp32: float = 1e-5
    # How the published code takes the layers of a pretrained model, which ours takes side by side.
    layers: Literal["", "tuple", "last axis", "normalised"] = ""
    # Of its family: `make test` tests the smallest, `make test-all` the others.
    smallest: bool = False

    @property
    def feat_dim(self) -> int:
        """The mel bins that it was published for."""
        feat_dim = self.args.get("feat_dim", 80)
        assert isinstance(feat_dim, int)
        return feat_dim


def three(
    model: str,
    args: dict,
    upstream: str,
    upstream_args: dict | None = None,
    **options,
) -> Member:
    """Return a network of 3D-Speaker."""
    return Member(
        model,
        args,
        toolkit="3dspeaker",
        upstream=f"{THREE}.{upstream}",
        upstream_args=upstream_args or {},
        **options,
    )


def we(
    model: str,
    args: dict,
    upstream: str,
    upstream_args: dict | None = None,
    **options,
) -> Member:
    """Return a network of WeSpeaker."""
    theirs = {
        "feat_dim": 80,
        "embed_dim": args.get("embed_dim", 192),
    }
    theirs.update(upstream_args or {})
    return Member(
        model,
        args,
        toolkit="wespeaker",
        upstream=f"{WE}.{upstream}",
        upstream_args=theirs,
        **options,
    )


def campplus(embed_dim: int, **options) -> Member:
    theirs = {"embedding_size": embed_dim}
    return three(
        "campplus",
        {"embed_dim": embed_dim},
        "campplus.DTDNN:CAMPPlus",
        theirs,
        **options,
    )


def eres2net(embed_dim: int, m_channels: int, **options) -> Member:
    ours = {
        "embed_dim": embed_dim,
        "m_channels": m_channels,
    }
    theirs = {
        "embedding_size": embed_dim,
        "m_channels": m_channels,
    }
    return three(
        "eres2net",
        ours,
        "eres2net.ERes2Net:ERes2Net",
        theirs,
        fp32=FUSED,
        **options,
    )


def eres2netv2(base_width: int, scale: int, expansion: int, **options) -> Member:
    args = {"scale": scale, "expansion": expansion}
    ours = {"base_width": base_width, **args}
    theirs = {"baseWidth": base_width, **args}
    return three(
        "eres2netv2",
        ours,
        "eres2net.ERes2NetV2:ERes2NetV2",
        theirs,
        **options,
    )


def res2net_like(
    builder: str,
    embed_dim: int,
    theirs: dict | None = None,
    *,
    fp32: float = 1e-5,
    **args,
) -> Member:
    """Return WeSpeaker's CAM++, ERes2Net or Res2Net."""
    if builder.startswith("CAMPPlus"):
        model = "campplus"
    elif builder.startswith("ERes2Net"):
        model = "eres2net"
    else:
        model = "res2net"
    ours = {
        "pool_eps": 1e-7,
        "embed_dim": embed_dim,
        **args,
    }
    return we(model, ours, f"{model}:{builder}", theirs, fp32=fp32)


def resnet(depth: int, *, pooling: str = "tstp") -> Member:
    """Return WeSpeaker's ResNet.

    With random weights its values grow with depth: at 293 layers their squares overflow fp32, and
    the published code returns NaN.
    """
    ours = {
        "depth": depth,
        "embed_dim": 256,
        "pooling": pooling,
    }
    theirs = {"pooling_func": pooling.upper()}
    return we(
        "resnet",
        ours,
        f"resnet:ResNet{depth}",
        theirs,
        fp32=math.inf if depth == 293 else 1e-4,
        smallest=depth == 18,
    )


def ecapa(channels: int, *, global_context: bool, emb_bn: bool = False) -> Member:
    """Return WeSpeaker's ECAPA-TDNN."""
    ours = {
        "channels": channels,
        "global_context": global_context,
        "emb_bn": emb_bn,
    }
    suffix = "_GLOB" if global_context else ""
    return we(
        "ecapa_tdnn_wespeaker",
        ours,
        f"ecapa_tdnn:ECAPA_TDNN{suffix}_c{channels}",
        {"emb_bn": emb_bn},
        smallest=channels == 512 and not emb_bn,
    )


def simam_resnet(depth: int, fp32: float) -> Member:
    """Return a SimAM-ResNet; its attention scores reach millions, and two frames may nearly tie."""
    return Member(
        "simam_resnet",
        {"depth": depth, "embed_dim": 256},
        "wespeaker",
        f"{WE}.samresnet:SimAM_ResNet{depth}_ASP",
        {"embed_dim": 256},
        fp32=fp32,
        smallest=depth == 34,
    )


def gemini(depth: int) -> Member:
    return we(
        "gemini_dfresnet",
        {"depth": depth, "embed_dim": 256},
        f"gemini_dfresnet:Gemini_DF_ResNet{depth}",
        smallest=depth == 60,
    )


def redimnet(size: str, fp32: float) -> Member:
    feat_dim = 60 if size == "b0" else 72
    ours = {
        "size": size,
        "feat_dim": feat_dim,
        "embed_dim": 192,
    }
    return we(
        "redimnet",
        ours,
        f"redimnet:ReDimNet{size.upper()}",
        {"feat_dim": feat_dim},
        fp32=fp32,
        smallest=size == "b0",
    )


def redimnet2_stages(text: str) -> list[tuple]:
    """Return the upstream `stages_setup`: strides, blocks, widening, kernels, reduction."""
    stages = []
    for stage in text.split(","):
        numbers = [float(number) for number in stage.split()]
        freq_stride, time_stride, blocks, widening, reduction = numbers
        strides = (int(freq_stride), int(time_stride))
        kernels = [(3, 3)]
        stages.append((strides, int(blocks), widening, kernels, int(reduction)))
    return stages


def redimnet2(size: str, fp32: float, **options: bool) -> Member:
    """Return a ReDimNet2 of the authors' module, with the arguments of their recipes."""
    channels, out_channels, stages = REDIMNET2S[size]
    ours = {
        "size": size,
        "feat_dim": 72,
        "embed_dim": 192,
        **options,
    }
    theirs = {
        "F": 72,
        "C": channels,
        "causal": "none",
        "out_channels": out_channels,
        "return_2d_output": True,
        "stages_setup": redimnet2_stages(stages),
        "agg_gnorm": options.get("group_norm", False),
        "dual_agg": options.get("dual", False),
    }
    return Member(
        "redimnet2",
        ours,
        toolkit="wespeaker",
        upstream="redimnet2.redimnet2:ReDimNet2Wrap",
        upstream_args=theirs,
        fp32=fp32,
        smallest=size == "b0",
    )


ECAPA = "ecapa_tdnn.ECAPA_TDNN:ECAPA_TDNN"
WIDE = {"channels": [1024, 1024, 1024, 1024, 3072]}
REDIMNETS = {
    "b0": 1e-4,
    "b1": 1e-5,
    "b2": 1e-4,
    "b3": 1e-4,
    "b4": 1e-4,
    "b5": 1e-2,
    "b6": 1e-5,
}
# C, out_channels and stages_setup of applications/speaker_rec/examples/vox2/recipes/redimnet2 of
# github.com/entn-at/redimnet2 at cdc8756: strides, blocks, widening, reduction of each stage.
B3_TO_B4 = "1 1 2 4 24, 2 1 3 3 24, 1 2 4 2 24, 2 1 5 1 24, 1 2 4 1 24, 2 1 3 1 24"
REDIMNET2S = {
    "b0": (
        12,
        64,
        "1 1 2 2 36, 2 1 3 1 36, 1 2 4 1 36, 2 1 5 1 36, 1 2 4 1 18, 2 1 3 1 18",
    ),
    "b1": (
        16,
        None,
        "1 1 2 2 32, 2 1 3 1 32, 1 2 4 1 32, 2 1 5 1 32, 1 2 4 1 16, 2 1 3 1 16",
    ),
    "b2": (
        20,
        None,
        "1 1 2 2 40, 2 1 3 1 30, 1 2 4 1 30, 3 1 5 1 20, 1 2 4 1 20, 2 1 3 1 10",
    ),
    "b3": (24, None, B3_TO_B4),
    "b4": (32, None, B3_TO_B4),
    "b5": (
        48,
        256,
        "1 1 2 4 48, 2 1 3 3 48, 1 2 4 2 48, 2 1 5 1 48, 1 2 4 1 32, 2 1 3 1 32",
    ),
    "b6": (
        64,
        224,
        "1 1 3 3 64, 2 1 4 2 64, 1 2 5 2 48, 2 1 5 1 48, 1 2 4 .75 32, 2 1 3 .5 24",
    ),
}
TWO_EMB = {"two_emb_layer": True, "pooling_func": "ASTP"}

MEMBERS: dict[str, Member] = {
    "campplus": campplus(512),
    "campplus_192": campplus(192, smallest=True),
    "eres2net_base": eres2net(192, 32, smallest=True),
    "eres2net_large": eres2net(512, 64),
    "eres2net_huge": three(
        "eres2net", HUGE, "eres2net.ERes2Net_huge:ERes2Net", fp32=FUSED_3
    ),
    "eres2netv2": eres2netv2(26, 2, 2, fp32=FUSED, smallest=True),
    "eres2netv2_w24s4ep4": eres2netv2(24, 4, 4, fp32=FUSED_4),
    "res2net": three("res2net", {}, "res2net.Res2Net:Res2Net", smallest=True),
    "campplus_wespeaker": res2net_like("CAMPPlus", 512),
    "eres2net_base_wespeaker": res2net_like("ERes2Net34_Base", 512, fp32=FUSED),
    "eres2net_large_wespeaker": res2net_like(
        "ERes2Net34_Large", 512, m_channels=64, fp32=FUSED
    ),
    "eres2net_aug_wespeaker": res2net_like(
        "ERes2Net34_aug",
        512,
        fp32=FUSED_3,
        **HUGE,
    ),
    "res2net_base_wespeaker": res2net_like("Res2Net34_Base", 256),
    "res2net_base_two_emb_wespeaker": res2net_like(
        "Res2Net34_Base",
        256,
        TWO_EMB,
        two_emb_layer=True,
        pooling="astp",
        fp32=3e-4,
    ),
    "res2net_large_wespeaker": res2net_like("Res2Net34_Large", 256, m_channels=64),
    "resnet34": three(
        "resnet",
        {
            "embed_dim": 256,
            "two_emb_layer": True,
            "pool_eps": 1e-8,
        },
        "resnet.ResNet:ResNet",
        {"feat_dim": 80, "embedding_size": 256},
    ),
    **{f"resnet{d}_wespeaker": resnet(d) for d in (18, 34, 50, 101, 152, 221, 293)},
    "resnet34_astp_wespeaker": resnet(34, pooling="astp"),
    "ecapa_tdnn": three(
        "ecapa_tdnn",
        {"channels": 1024, "embed_dim": 192},
        ECAPA,
        {"input_size": 80, **WIDE},
    ),
    "ecapa_tdnn_512": three(
        "ecapa_tdnn",
        {"channels": 512, "embed_dim": 192},
        ECAPA,
        {"input_size": 80},
        smallest=True,
    ),
    "ecapa_tdnn_512_wespeaker": ecapa(512, global_context=False),
    "ecapa_tdnn_512_glob_wespeaker": ecapa(512, global_context=True),
    "ecapa_tdnn_512_emb_bn_wespeaker": ecapa(
        512,
        global_context=False,
        emb_bn=True,
    ),
    "ecapa_tdnn_1024_wespeaker": ecapa(1024, global_context=False),
    "ecapa_tdnn_1024_glob_wespeaker": ecapa(1024, global_context=True),
    "xvector": three(
        "xvector",
        {"embed_dim": 512},
        "xvector.TDNN:Xvector",
        {"feat_dim": 80, "embed_dim": 512},
        smallest=True,
    ),
    "xvector_wespeaker": we(
        "xvector",
        {
            "embed_dim": 512,
            "pool_eps": 1e-7,
            "two_emb_layer": True,
        },
        "tdnn:XVEC",
        smallest=True,
    ),
    "simam_resnet34": simam_resnet(34, 5e-4),
    "simam_resnet100": simam_resnet(100, 5e-3),
    **{f"gemini_dfresnet{depth}": gemini(depth) for depth in (60, 114, 183, 237)},
    **{f"redimnet_{size}": redimnet(size, fp32) for size, fp32 in REDIMNETS.items()},
    **{f"redimnet2_{size}": redimnet2(size, 3e-5) for size in REDIMNET2S},
    "adapter_mfa_wespeaker": Member(
        "adapter_mfa",
        {"feat_dim": 5 * 64, "num_layers": 5, "adapter_dim": 32},
        toolkit="wespeaker",
        upstream=f"{WE}.w2vbert_adapter_mfa:W2VBert_Adapter_MFA",
        upstream_args={
            "feat_dim": 64,
            "adapter_dim": 32,
            "num_frontend_hidden_layers": 4,
        },
        layers="tuple",
        smallest=True,
    ),
    "pmfa_wespeaker": Member(
        "pmfa",
        {"feat_dim": 3 * 64, "num_layers": 3},
        toolkit="wespeaker",
        upstream=f"{WE}.whisper_PMFA:whisper_PMFA",
        upstream_args={"output_size": 3 * 64},
        layers="normalised",
        smallest=True,
    ),
    "mhfa_base": Member(
        "mhfa",
        {"feat_dim": 13 * 64, "num_layers": 13},
        toolkit="mhfa",
        upstream="models.Baseline.Spk_Encoder:MHFA",
        upstream_args={"head_nb": 32, "inputs_dim": 64},
        layers="last axis",
        smallest=True,
    ),
    "redimnet2_b3_group_norm": redimnet2("b3", 3e-5, group_norm=True),
    "redimnet2_b6_dual": redimnet2(
        "b6",
        3e-5,
        group_norm=True,
        dual=True,
    ),
}

# Model -> arguments that make it small, so that a test takes milliseconds.
RES2NET: dict[str, object] = {
    "embed_dim": 12,
    "m_channels": 8,
    "blocks": (1, 2, 2, 1),
}
ECAPA_TDNN: dict[str, object] = {
    "embed_dim": 12,
    "channels": 32,
    "squeezed_channels": 8,
}
SMALL: dict[str, dict[str, object]] = {
    "campplus": {
        "embed_dim": 12,
        "init_channels": 16,
        "growth_rate": 8,
        "bn_size": 2,
        "blocks": (2, 3, 2),
        "head_channels": 4,
    },
    "eres2net": RES2NET,
    "eres2netv2": {**RES2NET, "scale": 3},
    "res2net": {**RES2NET, "scale": 4},
    "resnet": {
        "embed_dim": 12,
        "depth": 18,
        "m_channels": 8,
    },
    "ecapa_tdnn": {**ECAPA_TDNN, "attention_channels": 8},
    "ecapa_tdnn_wespeaker": {**ECAPA_TDNN, "stats_channels": 24},
    "xvector": {
        "embed_dim": 12,
        "hidden_channels": 16,
        "stats_channels": 24,
    },
    "simam_resnet": {"embed_dim": 12, "m_channels": 4},
    "gemini_dfresnet": {
        "embed_dim": 12,
        "depth": 60,
        "m_channels": 4,
    },
    "redimnet": {
        "embed_dim": 12,
        "size": "b0",
        "feat_dim": 80,
    },
    "redimnet2": {
        "embed_dim": 12,
        "size": "b0",
        "feat_dim": 80,
    },
    "adapter_mfa": {"embed_dim": 12, "num_layers": 2, "adapter_dim": 8},
    "mhfa": {
        "embed_dim": 12,
        "num_layers": 2,
        "num_heads": 4,
        "compression_dim": 8,
    },
    "pmfa": {"embed_dim": 12, "num_layers": 2},
}

# Model -> the submodule whose output, frames last, is what the model pools.
POOLED = {
    "campplus": "xvector.out_nonlinear",
    "eres2net": "fuse_mode1234",
    "eres2netv2": "fuse34",
    "res2net": "layer4",
    "resnet": "layer4",
    "ecapa_tdnn": "mfa",
    "ecapa_tdnn_wespeaker": "conv",
    "xvector": "frame_5",
    "simam_resnet": "front",
    "gemini_dfresnet": "stages.3",
    "redimnet": "backbone",
    "redimnet2": "backbone",
    "adapter_mfa": "pooling.attention",
    "mhfa": "att_head",
    "pmfa": "pooling.linear2",
}
