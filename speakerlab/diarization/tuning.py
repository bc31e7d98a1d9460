"""The clustering that fits a model, learned on recordings with known turns and stored with it."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from speakerlab.core.reading import parse_json
from speakerlab.diarization.clustering import METHODS, THRESHOLD, Method

NAMES = ("ahc", "spectral")  # of the methods that need no PLDA


@dataclass(frozen=True)
class Tuning:
    """The method of the lowest DER, and the threshold of ahc. The defaults were not learned."""

    method: str = "spectral"
    threshold: float = THRESHOLD
    der: Mapping[str, float] = field(default_factory=dict)  # method -> DER on these recordings
    source: str | None = None  # description of these recordings

    def build(self, name: str | None = None) -> Method:
        """Build a method by its name (None: the learned one); ValueError if that is not enough."""
        name = name or self.method
        if name not in METHODS or name == "vbx":
            raise ValueError(
                "method: must be ahc, spectral or an object such as that of `learn_vbx`, got "
                f"'{name}'"
            )
        return METHODS[name](**({"threshold": self.threshold} if name == "ahc" else {}))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str) -> "Tuning":
        """Build from what `asdict` gave. Raises ValueError for values that cannot be used."""
        fix = "run `speakerlab calibrate --for diarization` again"
        made = parse_json(json.dumps(values), cls, where=where, fix=fix)
        is_known = values.keys() <= asdict(made).keys()
        if is_known and made.method in NAMES and math.isfinite(made.threshold):
            return made
        raise ValueError(
            f"{where}: holds no method and threshold of diarization, got {values}; {fix}"
        )
