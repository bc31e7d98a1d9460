"""Clustering settings of a model, learned by `calibrate` and stored with the model.

They are defined here because checkpoints store them and diarization applies them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from speakerlab.core.reading import ONLY_FINITE

THRESHOLD = 0.4  # of ahc, for CAM++ (3D-Speaker); the best value depends on the model
FB = 1.0  # of vbx, for a window every 0.75 s; the best value depends on its PLDA


@dataclass(frozen=True)
class Tuning:
    """Clustering method with the lowest DER on labelled recordings, and the settings of the others.

    The defaults were not learned.
    """

    __pydantic_config__ = ONLY_FINITE

    method: Literal["ahc", "spectral", "vbx"] = "spectral"
    threshold: float = THRESHOLD
    # Method -> DER on these recordings.
    der: Mapping[str, float] = field(default_factory=dict)
    source: str | None = None  # description of these recordings
    # Of the model that it was learned for; None if unknown.
    model_sha256: str | None = None
    # Of vbx: the scale of the speakers' prior, the file with its PLDA beside this one (None: there
    # is none), and a description of the speakers that it was learned from.
    fb: float = FB
    plda_sha256: str | None = None
    plda_source: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a method that could not be built."""
        if self.method == "vbx" and self.plda_sha256 is None:
            raise ValueError("method: is vbx, which needs a plda_sha256")
        if self.fb <= 0:
            raise ValueError(f"fb: must be above 0, got {self.fb:g}")
