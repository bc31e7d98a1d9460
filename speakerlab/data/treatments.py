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
    condition: str = DURATION  # the condition whose value this treatment is

    @classmethod
    def of_duration(cls, text: str) -> "Treatment":
        """Read "2.5" (seconds) or "full"; ValueError for anything else."""
        if text == "full":
            return cls(math.inf)
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:  # NaN is not
            raise ValueError(
                f"--durations: {text} is no duration; give seconds, or full"
            )
        return cls(seconds)

    @classmethod
    def of_codec(cls, text: str) -> "Treatment":
        """Read the name of a codec, or "none"; ValueError for anything else."""
        if text == "none":
            return cls(codec="", condition=CODEC)
        try:
            codec = check_codec(text)
        except ValueError as error:
            raise ValueError(f"--codecs: {text} {error}") from None
        return cls(codec=codec, condition=CODEC)

    @property
    def name(self) -> str:
        """Return the treatment as part of a file name; "" if nothing is done."""
        if self.codec:
            return self.codec.replace(":", "-")
        is_whole = math.isinf(self.seconds)
        return "" if is_whole else f"{self.seconds:g}s"

    @property
    def value(self) -> str:
        if self.condition == CODEC:
            return self.codec or "none"
        is_whole = math.isinf(self.seconds)
        return "full" if is_whole else f"{self.seconds:g} s"

    def apply(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the treated utterances, given whole ones."""
        treated: list[Piece] = []
        for piece in pieces:
            cut = self._cut(piece)
            treated.append(replace(cut, codec=self.codec))
        return treated

    def _cut(self, piece: Piece) -> Piece:
        manifest = piece.manifest
        max_samples = self.seconds * manifest.sample_rate
        if piece.num_samples <= max_samples:
            return piece
        num_samples = round(max_samples)
        last_start = piece.num_samples - num_samples
        # In [0, 1), equal for all durations, so that a shorter cut lies inside a longer one.
        utterance = manifest.ids[piece.row]
        fraction = stable_hash(f"crop:{utterance}") / 2**64
        start = piece.start + int(fraction * (last_start + 1))
        return replace(piece, start=start, num_samples=num_samples)


UNTREATED = Treatment()


def read_treatments(
    durations: Sequence[str], codecs: Sequence[str] = ()
) -> list[Treatment]:
    """Read the options of `speakerlab extract` and `score`; each treatment once."""
    treatments = [Treatment.of_duration(text) for text in durations]
    treatments += [Treatment.of_codec(text) for text in codecs]
    return list(dict.fromkeys(treatments))
