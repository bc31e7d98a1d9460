"""CAM++, ERes2Net, ERes2NetV2 and Res2Net, as 3D-Speaker and WeSpeaker publish them."""

from member import Member

THREE = "speakerlab.models"
WE = "wespeaker.models"
# With random weights the fusions amplify rounding: in the published code, fp32 differs from float64
# by up to 2e-4 (two groups), 1.3e-2 (three) and 0.15 (four). About three times that is allowed.
FUSED, FUSED_3, FUSED_4 = 5e-4, 4e-2, 0.5
HUGE = {"m_channels": 64, "base_width": 24, "scale": 3, "expansion": 4}


def campplus(embed_dim: int) -> Member:
    """Return 3D-Speaker's CAM++."""
    return Member(
        "campplus",
        {"embed_dim": embed_dim},
        "3dspeaker",
        f"{THREE}.campplus.DTDNN:CAMPPlus",
        {"embedding_size": embed_dim},
        smallest=embed_dim == 192,
    )


def eres2net(embed_dim: int, m_channels: int) -> Member:
    """Return 3D-Speaker's ERes2Net."""
    return Member(
        "eres2net",
        {"embed_dim": embed_dim, "m_channels": m_channels},
        "3dspeaker",
        f"{THREE}.eres2net.ERes2Net:ERes2Net",
        {"embedding_size": embed_dim, "m_channels": m_channels},
        fp32=FUSED,
        smallest=m_channels == 32,
    )


def eres2netv2(base_width: int, scale: int, expansion: int) -> Member:
    """Return 3D-Speaker's ERes2NetV2."""
    return Member(
        "eres2netv2",
        {"base_width": base_width, "scale": scale, "expansion": expansion},
        "3dspeaker",
        f"{THREE}.eres2net.ERes2NetV2:ERes2NetV2",
        {"baseWidth": base_width, "scale": scale, "expansion": expansion},
        fp32=FUSED if scale == 2 else FUSED_4,
        smallest=scale == 2,
    )


def wespeaker(
    model: str, builder: str, args: dict, their_args: dict | None = None, *, fp32: float = 1e-5
) -> Member:
    """Return a WeSpeaker network."""
    return Member(
        model,
        {"pool_eps": 1e-7, **args},
        "wespeaker",
        f"{WE}.{model}:{builder}",
        {"feat_dim": 80, "embed_dim": args["embed_dim"], **(their_args or {})},
        fp32=fp32,
    )


MEMBERS = {
    "campplus": campplus(512),
    "campplus_192": campplus(192),
    "eres2net_base": eres2net(192, 32),
    "eres2net_large": eres2net(512, 64),
    "eres2net_huge": Member(
        "eres2net",
        HUGE,
        "3dspeaker",
        f"{THREE}.eres2net.ERes2Net_huge:ERes2Net",
        fp32=FUSED_3,
    ),
    "eres2netv2": eres2netv2(26, 2, 2),
    "eres2netv2_w24s4ep4": eres2netv2(24, 4, 4),
    "res2net": Member(
        "res2net", {}, "3dspeaker", f"{THREE}.res2net.Res2Net:Res2Net", smallest=True
    ),
    "campplus_wespeaker": wespeaker("campplus", "CAMPPlus", {"embed_dim": 512}),
    "eres2net_base_wespeaker": wespeaker(
        "eres2net", "ERes2Net34_Base", {"embed_dim": 512}, fp32=FUSED
    ),
    "eres2net_large_wespeaker": wespeaker(
        "eres2net", "ERes2Net34_Large", {"embed_dim": 512, "m_channels": 64}, fp32=FUSED
    ),
    "eres2net_aug_wespeaker": wespeaker(
        "eres2net", "ERes2Net34_aug", {"embed_dim": 512, **HUGE}, fp32=FUSED_3
    ),
    "res2net_base_wespeaker": wespeaker("res2net", "Res2Net34_Base", {"embed_dim": 256}),
    "res2net_base_two_emb_wespeaker": wespeaker(
        "res2net",
        "Res2Net34_Base",
        {"embed_dim": 256, "two_emb_layer": True, "pooling": "astp"},
        {"two_emb_layer": True, "pooling_func": "ASTP"},
        fp32=3e-4,
    ),
    "res2net_large_wespeaker": wespeaker(
        "res2net", "Res2Net34_Large", {"embed_dim": 256, "m_channels": 64}
    ),
}

SMALL = {
    "campplus": {
        "embed_dim": 12,
        "init_channels": 16,
        "growth_rate": 8,
        "bn_size": 2,
        "blocks": (2, 3, 2),
        "head_channels": 4,
    },
    "eres2net": {"embed_dim": 12, "m_channels": 8, "blocks": (1, 2, 2, 1)},
    "eres2netv2": {"embed_dim": 12, "m_channels": 8, "blocks": (1, 2, 2, 1), "scale": 3},
    "res2net": {"embed_dim": 12, "m_channels": 8, "blocks": (1, 2, 2, 1), "scale": 4},
}

POOLED = {
    "campplus": "xvector.out_nonlinear",
    "eres2net": "fuse_mode1234",
    "eres2netv2": "fuse34",
    "res2net": "layer4",
}
