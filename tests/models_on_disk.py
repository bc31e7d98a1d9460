"""A small published model, as training leaves one behind."""

from pathlib import Path
from typing import Any

import torch
from voices import make_noise

from speakerlab.checkpoints.published import publish
from speakerlab.config.build import build_embedder, build_segmenter
from speakerlab.config.schema import load_config
from speakerlab.scoring.calibration import Calibration

ROOT = Path(__file__).parents[1]
XVECTOR = (
    "model={name: xvector, max_seconds: 2.0, "
    "args: {embed_dim: 16, hidden_channels: 16, stats_channels: 24}}"
)
SMALL_PYANNET = [
    "model.args.lstm_layers=1",
    "model.args.lstm_dim=8",
    "model.args.linear_dim=8",
]
CALIBRATION = Calibration(
    slope=10.0,
    intercept=-5.0,
    threshold=0.5,
    threshold_at_far={"0.1": 0.4, "0.01": 0.9999},
    eer=0.05,
    num_target=10,
    num_nontarget=100,
    source="made up",
)


def publish_small(
    exp: Path, config, embedder, calibration: Calibration | None = None
) -> Path:
    """An experiment with `model/` in it."""
    config.write(exp / "config.yaml")
    publish(
        exp / "model",
        embedder=embedder,
        config=config,
        facts={"commit": None},
        calibration=calibration,
    )
    return exp


def publish_xvector(exp: Path, calibration: Calibration | None = None) -> Path:
    """An experiment with a small model that takes two seconds at once; BatchNorm has seen data."""
    config = load_config([], [XVECTOR])
    embedder = build_embedder(config)
    with torch.no_grad():
        embedder.train()(make_noise(1.0, rows=4))
    return publish_small(exp, config, embedder.eval(), calibration)


def publish_segmenter(exp: Path, *settings: str, **facts: Any) -> Path:
    """An experiment with a small segmentation network of random weights."""
    overlay = ROOT / "conf/segmentation/pyannet.yaml"
    config = load_config([overlay], [*SMALL_PYANNET, *settings])
    config.write(exp / "config.yaml")
    publish(
        exp / "model",
        embedder=build_segmenter(config).eval(),
        config=config,
        facts={"commit": None, **facts},
    )
    return exp
