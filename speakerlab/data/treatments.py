"""Treatments: what is done to test utterances before they are embedded, a condition of the results.

What is cut from an utterance depends only on its id, and a shorter cut lies inside a longer one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from speakerlab.data.arrays import stable_hash
from speakerlab.data.manifest import Piece


@dataclass(frozen=True)
class Treatment:
    """Cut utterances to a duration; those that are not longer are unchanged."""

    seconds: float = math.inf

    @classmethod
    def of_duration(cls, text: str) -> "Treatment":
        """Read "2.5" (seconds) or "full"; ValueError for anything else."""
        try:
            seconds = math.inf if text == "full" else float(text)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            raise ValueError(f"--durations: {text} is no duration; give seconds, or full")
        return cls(seconds)

    @property
    def name(self) -> str:
        """As part of a file name; "" if nothing is done."""
        return f"{self.seconds:g}s" if math.isfinite(self.seconds) else ""

    @property
    def condition(self) -> str:
        """The condition that this is a value of."""
        return "duration of the test side"

    @property
    def value(self) -> str:
        return f"{self.seconds:g} s" if math.isfinite(self.seconds) else "full"

    def apply(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the treated utterances, given whole ones."""
        return [self._cut(piece) for piece in pieces]

    def _cut(self, piece: Piece) -> Piece:
        manifest = piece.manifest
        if piece.num_samples <= self.seconds * manifest.sample_rate:
            return piece
        num_samples = round(self.seconds * manifest.sample_rate)
        spare = piece.num_samples - num_samples
        place = stable_hash(f"crop:{manifest.ids[piece.row]}") / 2**64
        return replace(piece, start=piece.start + int(place * (spare + 1)), num_samples=num_samples)


UNTREATED = Treatment()


def read_treatments(durations: Sequence[str]) -> list[Treatment]:
    """Read the options of `speakerlab extract` and `score`; each treatment once."""
    return list(dict.fromkeys(map(Treatment.of_duration, durations)))
