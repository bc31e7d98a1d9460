"""SimAM-ResNet, Gemini DF-ResNet and ReDimNet, as WeSpeaker publishes them."""

from member import Member

SIMAM = "wespeaker.models.samresnet"
GEMINI = "wespeaker.models.gemini_dfresnet"
REDIMNET = "wespeaker.models.redimnet"

MEMBERS = {
    f"simam_resnet{depth}": Member(
        "simam_resnet",
        {"depth": depth, "embed_dim": 256},
        "wespeaker",
        f"{SIMAM}:SimAM_ResNet{depth}_ASP",
        {"embed_dim": 256},
        fp32=fp32,
        smallest=depth == 34,
    )
    # Attention scores run into the millions, and two frames may all but tie.
    for depth, fp32 in ((34, 5e-4), (100, 5e-3))
}
MEMBERS |= {
    f"gemini_dfresnet{depth}": Member(
        "gemini_dfresnet",
        {"depth": depth, "embed_dim": 256},
        "wespeaker",
        f"{GEMINI}:Gemini_DF_ResNet{depth}",
        {"feat_dim": 80, "embed_dim": 256},
        smallest=depth == 60,
    )
    for depth in (60, 114, 183, 237)
}
MEMBERS |= {
    f"redimnet_{size}": Member(
        "redimnet",
        {"size": size, "feat_dim": feat_dim, "embed_dim": 192},
        "wespeaker",
        f"{REDIMNET}:ReDimNet{size.upper()}",
        {"feat_dim": feat_dim, "embed_dim": 192},
        fp32=fp32,
        smallest=size == "b0",
    )
    for size, feat_dim, fp32 in (
        ("b0", 60, 1e-4),
        ("b1", 72, 1e-5),
        ("b2", 72, 1e-4),
        ("b3", 72, 1e-4),
        ("b4", 72, 1e-4),
        ("b5", 72, 1e-2),
        ("b6", 72, 1e-5),
    )
}

SMALL = {
    "simam_resnet": {"embed_dim": 12, "m_channels": 4},
    "gemini_dfresnet": {"embed_dim": 12, "depth": 60, "m_channels": 4},
    "redimnet": {"embed_dim": 12, "size": "b0", "feat_dim": 80},
}

POOLED = {"simam_resnet": "front", "gemini_dfresnet": "stages.3", "redimnet": "backbone"}
