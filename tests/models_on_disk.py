"""A small published model, as training leaves one behind."""

from pathlib import Path

from speakerlab.checkpoints.published import publish
from speakerlab.scoring.calibration import Calibration

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


def publish_small(exp: Path, config, embedder, calibration: Calibration | None = None) -> Path:
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
