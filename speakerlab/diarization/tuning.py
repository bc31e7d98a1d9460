"""The clustering that fits a model, learned on recordings with known turns and stored with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from speakerlab.core.reading import ONLY_FINITE
from speakerlab.diarization.clustering import METHODS, THRESHOLD, Method


@dataclass(frozen=True)
class Tuning:
    """The method of the lowest DER, and the threshold of ahc. The defaults were not learned."""

    __pydantic_config__ = ONLY_FINITE

    method: Literal["ahc", "spectral"] = "spectral"
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
