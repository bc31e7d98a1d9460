"""Decisions about recordings: whether two have the same speaker, and who of the enrolled speaks.

Letter: N speakers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Real

import numpy as np

from speakerlab.inference.speech import MIN_DECISION_SECONDS


@dataclass(frozen=True)
class Verification:
    """Comparison of two recordings; without a calibration all but the score is None.

    Without speech in both recordings, `is_same` is None.
    """

    score: float  # cosine of the two embeddings
    llr: float | None  # natural logarithm of the likelihood ratio
    is_same: bool | None  # score >= threshold
    threshold: float | None
    # Seconds of speech in each recording; None for two embeddings.
    speech_seconds: tuple[float, float] | None = None

    @property
    def has_speech(self) -> bool:
        """Return whether both recordings have enough speech for a decision."""
        return self.speech_seconds is None or can_decide(*self.speech_seconds)

    def with_speech(self, speech_seconds: tuple[float, float]) -> "Verification":
        """Return the comparison with its seconds of speech, undecided if they are too few."""
        is_same = self.is_same if can_decide(*speech_seconds) else None
        return replace(self, is_same=is_same, speech_seconds=speech_seconds)


@dataclass(frozen=True)
class Identification:
    """Speakers ranked for a recording; without a calibration or speech `is_known` is None."""

    ranking: list[tuple[str, float]]  # every enrolled speaker and the score, best first
    is_known: bool | None  # the best score reaches the threshold
    threshold: float | None
    speech_seconds: float | None = None  # in the recording; None for an embedding

    @property
    def has_speech(self) -> bool:
        """Return whether the recording has enough speech for a decision."""
        return self.speech_seconds is None or can_decide(self.speech_seconds)

    @property
    def name(self) -> str | None:
        """Return the best speaker; None if the decision is "not enrolled", or without speech."""
        # Without a calibration (None), the best speaker is returned.
        if self.is_known is False or not self.has_speech:
            return None
        best, _ = self.ranking[0]
        return best


def can_decide(*seconds: float) -> bool:
    """Return whether each recording has enough seconds of speech for a decision."""
    return all(speech >= MIN_DECISION_SECONDS for speech in seconds)


def check_point(far: float | None, threshold: float | None) -> None:
    """Raise ValueError for a threshold that is no cosine, or beside a false-alarm rate."""
    if threshold is None:
        return
    if far is not None:
        raise ValueError(
            f"threshold: {threshold!r} is given, and far={far!r}; give one of them"
        )
    # The comparison is also false for nan.
    if not isinstance(threshold, Real) or not -1 <= threshold <= 1:
        raise ValueError(
            f"threshold: must be a cosine from -1 to 1, got {threshold!r}; correct it"
        )


def rank_speakers(names: Iterable[str], score_N: np.ndarray) -> list[tuple[str, float]]:
    """Return (name, score), best first; equal scores keep the order of the names."""
    pairs = list(zip(names, score_N.tolist()))
    pairs.sort(key=lambda pair: -pair[1])
    return pairs
