"""ResNet, ECAPA-TDNN and x-vector, as 3D-Speaker and WeSpeaker publish them."""

import math

from member import Member

THREE = "speakerlab.models"
WE = "wespeaker.models"
POOLINGS = ("tap", "tsdp", "astp", "mqmhastp")  # beside tstp


def resnet(depth: int, *, pooling: str = "tstp") -> Member:
    """Return WeSpeaker's ResNet.

    With random weights its values grow with depth: at 293 layers their squares overflow fp32, and
    the published code returns NaN.
    """
    args = {"feat_dim": 80, "embed_dim": 256, "pooling_func": pooling.upper()}
    return Member(
        "resnet",
        {"depth": depth, "embed_dim": 256, "pooling": pooling},
        "wespeaker",
        f"{WE}.resnet:ResNet{depth}",
        args,
        fp32=math.inf if depth == 293 else 1e-4,
        smallest=depth == 18,
    )


def ecapa(channels: int, *, global_context: bool, emb_bn: bool = False) -> Member:
    """Return WeSpeaker's ECAPA-TDNN."""
    return Member(
        "ecapa_tdnn_wespeaker",
        {"channels": channels, "global_context": global_context, "emb_bn": emb_bn},
        "wespeaker",
        f"{WE}.ecapa_tdnn:ECAPA_TDNN{'_GLOB' if global_context else ''}_c{channels}",
        {"feat_dim": 80, "embed_dim": 192, "emb_bn": emb_bn},
        smallest=channels == 512 and not emb_bn,
    )


MEMBERS = {
    "resnet34": Member(
        "resnet",
        {"embed_dim": 256, "two_emb_layer": True, "pool_eps": 1e-8},
        "3dspeaker",
        f"{THREE}.resnet.ResNet:ResNet",
        {"feat_dim": 80, "embedding_size": 256},
    ),
    **{f"resnet{d}_wespeaker": resnet(d) for d in (18, 34, 50, 101, 152, 221, 293)},
    **{f"resnet34_{name}_wespeaker": resnet(34, pooling=name) for name in POOLINGS},
    "ecapa_tdnn": Member(
        "ecapa_tdnn",
        {"channels": 1024, "embed_dim": 192},
        "3dspeaker",
        f"{THREE}.ecapa_tdnn.ECAPA_TDNN:ECAPA_TDNN",
        {"input_size": 80, "channels": [1024, 1024, 1024, 1024, 3072]},
    ),
    "ecapa_tdnn_512": Member(
        "ecapa_tdnn",
        {"channels": 512, "embed_dim": 192},
        "3dspeaker",
        f"{THREE}.ecapa_tdnn.ECAPA_TDNN:ECAPA_TDNN",
        {"input_size": 80},
        smallest=True,
    ),
    "ecapa_tdnn_512_wespeaker": ecapa(512, global_context=False),
    "ecapa_tdnn_512_glob_wespeaker": ecapa(512, global_context=True),
    "ecapa_tdnn_512_emb_bn_wespeaker": ecapa(512, global_context=False, emb_bn=True),
    "ecapa_tdnn_1024_wespeaker": ecapa(1024, global_context=False),
    "ecapa_tdnn_1024_glob_wespeaker": ecapa(1024, global_context=True),
    "xvector": Member(
        "xvector",
        {"embed_dim": 512},
        "3dspeaker",
        f"{THREE}.xvector.TDNN:Xvector",
        {"feat_dim": 80, "embed_dim": 512},
        smallest=True,
    ),
    "xvector_wespeaker": Member(
        "xvector",
        {"embed_dim": 512, "pool_eps": 1e-7, "two_emb_layer": True},
        "wespeaker",
        f"{WE}.tdnn:XVEC",
        {"feat_dim": 80, "embed_dim": 512},
        smallest=True,
    ),
}

SMALL: dict[str, dict[str, object]] = {
    "resnet": {"embed_dim": 12, "depth": 18, "m_channels": 8},
    "ecapa_tdnn": {
        "embed_dim": 12,
        "channels": 32,
        "squeezed_channels": 8,
        "attention_channels": 8,
    },
    "ecapa_tdnn_wespeaker": {
        "embed_dim": 12,
        "channels": 32,
        "squeezed_channels": 8,
        "stats_channels": 24,
    },
    "xvector": {"embed_dim": 12, "hidden_channels": 16, "stats_channels": 24},
}

POOLED = {
    "resnet": "layer4",
    "ecapa_tdnn": "mfa",
    "ecapa_tdnn_wespeaker": "conv",
    "xvector": "frame_5",
}
