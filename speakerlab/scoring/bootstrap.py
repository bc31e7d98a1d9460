"""Error rates of one list of trials under many weightings of its speakers.

In: trials with the speakers of both sides. Out: rates where a trial weighs what its pair of
speakers does.
Letters: N trials, P pairs of speakers (enrolment, test) that have trials, S speakers, K operating
points.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.scoring.metrics import (
    crossing,
    eer_of_points,
    min_dcf_of_points,
    order_of,
    sums_before,
)

FEW_PAIRS = 1_000_000  # of speakers: so many may be counted without looking which there are
FEW_NUMBERS = 10_000_000  # speakers that are numbers below this are counted, not sorted
SPARE = 4.0  # times the share of non-targets that matters is looked at in most replicates


@dataclass(frozen=True)
class Pairs:
    """The pairs of speakers that have trials, and which of them each trial is of."""

    pair_N: NDArray[np.int32]
    enrol_P: NDArray[np.intp]
    test_P: NDArray[np.intp]
    num_speakers: int

    @classmethod
    def of(cls, enrol: ArrayLike, test: ArrayLike, is_target_N: np.ndarray) -> "Pairs":
        (enrol_N, test_N), num_speakers = _speaker_codes(enrol, test, is_target_N)
        pair_N = enrol_N * num_speakers + test_N
        if num_speakers**2 <= FEW_PAIRS:  # pairs without trials weigh nothing
            pairs = np.arange(num_speakers**2)
        else:
            pairs, pair_N = np.unique(pair_N, return_inverse=True)
        enrol_P, test_P = np.divmod(pairs, num_speakers)
        return cls(pair_N.astype(np.int32), enrol_P, test_P, num_speakers)

    def weights(self, weight_S: np.ndarray) -> NDArray[np.float64]:
        """weight_P; whole numbers, so that sums of them are exact."""
        return (weight_S[self.enrol_P] * weight_S[self.test_P]).astype(np.float64)

    def counts(self, chosen_N: np.ndarray) -> NDArray[np.float64]:
        """How many of the trials each pair has, or the sum of their values."""
        weights_N = chosen_N.astype(np.float64)
        return np.bincount(self.pair_N, weights_N, len(self.enrol_P)).astype(np.float64)


@dataclass(frozen=True)
class Sweep:
    """Targets and non-targets in rising order of score, and where operating points cut them.

    Of the non-targets only those from number `skipped` on are held: at the thresholds below it so
    many are let in that neither the EER nor a least cost is there, which `rates` makes sure of.
    """

    target_pairs: NDArray[np.int32]
    nontarget_pairs: NDArray[np.int32]
    target_starts_K: NDArray[np.intp]
    nontarget_starts_K: NDArray[np.intp]  # counted from `skipped` on
    at_targets: NDArray[np.intp]  # points from which on a target is missed, and the last point
    skipped: int

    @classmethod
    def of(
        cls,
        scores_N: np.ndarray,
        is_target_N: np.ndarray,
        pair_N: np.ndarray,
        p_targets: Sequence[float],
    ) -> "tuple[Sweep, Sweep]":
        """(one that holds all, one that holds what most replicates need)."""
        order_N, starts_K = order_of(scores_N)
        is_target_N, pair_N = is_target_N[order_N], pair_N[order_N]
        target_starts_K = sums_before(is_target_N.astype(np.int64))[starts_K]
        has_target_K = np.append(np.diff(target_starts_K) > 0, True)
        whole = cls(
            target_pairs=pair_N[is_target_N],
            nontarget_pairs=pair_N[~is_target_N],
            target_starts_K=target_starts_K,
            nontarget_starts_K=starts_K - target_starts_K,
            at_targets=np.flatnonzero(has_target_K),
            skipped=0,
        )
        p_miss_K = target_starts_K / target_starts_K[-1]
        p_fa_K = 1.0 - whole.nontarget_starts_K / whole.nontarget_starts_K[-1]
        shares = [SPARE * eer_of_points(p_miss_K, p_fa_K)]
        shares += [SPARE * p / (1 - p) for p in p_targets]
        return whole, whole.upper(min(max(shares), 1.0))

    def upper(self, share: float) -> "Sweep":
        """From the first operating point on that lets in at most this share of the non-targets."""
        total = int(self.nontarget_starts_K[-1])
        k = int(np.searchsorted(self.nontarget_starts_K, (1.0 - share) * total))
        skipped = int(self.nontarget_starts_K[k])
        return replace(
            self,
            nontarget_pairs=self.nontarget_pairs[skipped:],
            target_starts_K=self.target_starts_K[k:],
            nontarget_starts_K=self.nontarget_starts_K[k:] - skipped,
            at_targets=self.at_targets[self.at_targets >= k] - k,
            skipped=skipped,
        )

    def rates(
        self, weight_P: np.ndarray, num_nontarget: float, p_targets: Sequence[float]
    ) -> dict[str, float] | None:
        """EER and minDCF where a trial weighs what its pair does; None if they may lie lower down.

        num_nontarget: what all non-targets weigh. Bisection looks at 20 of a million operating
        points for the EER. A cost is least at a point whose threshold is the score of a target: a
        higher one with as few misses only saves alarms.
        """
        miss = sums_before(weight_P[self.target_pairs])
        reject = sums_before(weight_P[self.nontarget_pairs])
        below = num_nontarget - reject[-1]

        def rates(k: int) -> tuple[float, float]:
            p_fa = 1.0 - (below + reject[self.nontarget_starts_K[k]]) / num_nontarget
            return miss[self.target_starts_K[k]] / miss[-1], p_fa

        before, after = 0, len(self.target_starts_K) - 1
        p_miss, p_fa = rates(before)
        if self.skipped and not (p_miss < p_fa and all((1 - p) * p_fa >= p for p in p_targets)):
            return None  # below, every cost is above that of accepting nothing
        while after - before > 1:
            middle = (before + after) // 2
            p_miss, p_fa = rates(middle)
            before, after = (middle, after) if p_miss < p_fa else (before, middle)
        found = {"eer": crossing(*rates(before), *rates(after))}
        if p_targets:
            k = self.at_targets
            p_miss_K = miss[self.target_starts_K[k]] / miss[-1]
            p_fa_K = 1.0 - (below + reject[self.nontarget_starts_K[k]]) / num_nontarget
            for p in p_targets:
                found[f"min_dcf_{p:g}"] = min_dcf_of_points(p_miss_K, p_fa_K, p_target=p)
        return found


def _speaker_codes(
    enrol_speaker: ArrayLike, test_speaker: ArrayLike, is_target_N: np.ndarray
) -> tuple[NDArray[np.int64], int]:
    """Numbers 0..S-1 for the speakers of either side, (2, N), and S."""
    enrol_N, test_N = np.asarray(enrol_speaker), np.asarray(test_speaker)
    if not enrol_N.shape == test_N.shape == is_target_N.shape:
        raise ValueError(
            f"speakers: one a trial and side is needed, got {enrol_N.shape} and {test_N.shape} "
            f"for {is_target_N.shape} trials; give three arrays of equal length"
        )
    wrong_N = is_target_N & (enrol_N != test_N)
    if wrong_N.any():
        first = int(wrong_N.argmax())
        raise ValueError(
            f"trials: {np.count_nonzero(wrong_N)} target trials join two speakers, got "
            f"{enrol_N[first]} and {test_N[first]} at trial {first}; mend the speakers or the list"
        )
    both = np.stack([enrol_N, test_N])
    if both.dtype.kind in "iu" and both.size and both.min() >= 0 and both.max() < FEW_NUMBERS:
        is_there = np.bincount(both.ravel()) > 0
        return (np.cumsum(is_there) - 1)[both], int(is_there.sum())
    names, codes = np.unique(both, return_inverse=True)
    return codes.reshape(2, -1).astype(np.int64), len(names)
