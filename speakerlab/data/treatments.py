"""Treatments of test utterances before they are embedded: cut to a duration, or re-encoded.

The place of a cut depends only on the id of the utterance; a shorter cut lies inside a longer one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from speakerlab.data.arrays import stable_hash
from speakerlab.data.codecs import check_codec
from speakerlab.data.manifest import Piece

DURATION, CODEC = "duration of the test side", "codec of the test side"


@dataclass(frozen=True)
class Treatment:
    """Cut utterances to a duration, or encode and decode them; shorter ones stay whole."""

    seconds: float = math.inf
    codec: str = ""  # one of `codecs.CODECS`
    condition: str = DURATION  # that this is a value of

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

    @classmethod
    def of_codec(cls, text: str) -> "Treatment":
        """Read the name of a codec, or "none"; ValueError for anything else."""
        try:
            return cls(codec="" if text == "none" else check_codec(text), condition=CODEC)
        except ValueError as error:
            raise ValueError(f"--codecs: {text} {error}") from None

    @property
    def name(self) -> str:
        """Return the treatment as part of a file name; "" if nothing is done."""
        cut = f"{self.seconds:g}s" if math.isfinite(self.seconds) else ""
        return self.codec.replace(":", "-") or cut

    @property
    def value(self) -> str:
        if self.condition == CODEC:
            return self.codec or "none"
        return f"{self.seconds:g} s" if math.isfinite(self.seconds) else "full"

    def apply(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the treated utterances, given whole ones."""
        return [replace(self._cut(piece), codec=self.codec) for piece in pieces]

    def _cut(self, piece: Piece) -> Piece:
        manifest = piece.manifest
        if piece.num_samples <= self.seconds * manifest.sample_rate:
            return piece
        num_samples = round(self.seconds * manifest.sample_rate)
        spare = piece.num_samples - num_samples
        place = stable_hash(f"crop:{manifest.ids[piece.row]}") / 2**64
        return replace(piece, start=piece.start + int(place * (spare + 1)), num_samples=num_samples)


UNTREATED = Treatment()


def read_treatments(durations: Sequence[str], codecs: Sequence[str] = ()) -> list[Treatment]:
    """Read the options of `speakerlab extract` and `score`; each treatment once."""
    read = [*map(Treatment.of_duration, durations), *map(Treatment.of_codec, codecs)]
    return list(dict.fromkeys(read))
