"""Clustering settings of a model, learned by `calibrate` and stored with the model.

They are defined here because checkpoints store them and diarization applies them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from speakerlab.core.reading import ONLY_FINITE

THRESHOLD = 0.4  # of ahc, for CAM++ (3D-Speaker); the best value depends on the model


@dataclass(frozen=True)
class Tuning:
    """Clustering method with the lowest DER on labelled recordings, and the threshold of ahc.

    The defaults were not learned.
    """

    __pydantic_config__ = ONLY_FINITE

    method: Literal["ahc", "spectral"] = "spectral"
    threshold: float = THRESHOLD
    # Method -> DER on these recordings.
    der: Mapping[str, float] = field(default_factory=dict)
    source: str | None = None  # description of these recordings
    model_sha256: str | None = (
        None  # of the model that it was learned for; None if unknown
    )
