"""Confidence intervals by bootstrap over speakers: scores of trials in, replicates and bounds out.

Letters: N trials, P pairs of speakers (enrolment, test) that have trials, S speakers, K operating
points, R replicates.
In a replicate the S speakers (of both sides together) are drawn S times with replacement. With w
the number of times that a speaker was drawn, a target trial weighs w(its speaker) and a non-target
trial w(enrolment speaker) x w(test speaker). A replicate without a target or without a non-target
trial has no EER and is drawn again.
Bounds are expanded percentiles (core/intervals.py). Simulated with effects of speakers, pairs of
speakers and utterances (the slow test in tests/scoring/test_bootstrap.py), 95, 95 and 94 of 100
intervals hold the true EER with 7, 20 and 100 speakers, and 90 with five.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri, stdtr

from speakerlab.core.intervals import expansion, interval
from speakerlab.scoring.metrics import (
    P_TARGETS,
    checked,
    eer_of_points,
    min_dcf_of_points,
    order_of,
    sums_before,
)

MANY_TRIALS = 1_000_000  # above this a replicate is slow, and the interval hardly moves


@dataclass(frozen=True)
class Replicates:
    """Metrics of one system in each replicate, and the number of speakers they vary with."""

    values: dict[str, NDArray[np.float64]]  # metric -> (R)
    num_speakers: int  # with target trials or with non-target trials, whichever are fewer

    def interval(self, metric: str) -> list[float] | None:
        """Return the 95 % interval [low, high] of a metric, None with too few speakers."""
        return interval(self.values[metric], self.num_speakers)

    def paired(self, other: "Replicates", metric: str) -> tuple[list[float] | None, float | None]:
        """Compare with another system on the same trials, drawn with the same seed.

        Return the 95 % interval of the difference self - other and its two-sided p-value, which is
        below 0.05 if the interval excludes zero: the smallest share at which it would, with one
        replicate added to those on the other side of zero (Efron and Tibshirani, An Introduction to
        the Bootstrap, chapters 13 and 16).
        """
        difference_R = self.values[metric] - other.values[metric]
        ci95 = interval(difference_R, self.num_speakers)
        if ci95 is None:
            return None, None
        num_beyond = min(np.count_nonzero(difference_R >= 0), np.count_nonzero(difference_R <= 0))
        quantile = ndtri((num_beyond + 1) / (len(difference_R) + 1)) / expansion(self.num_speakers)
        return ci95, min(1.0, 2 * float(stdtr(self.num_speakers - 1, quantile)))


def bootstrap(
    scores: ArrayLike,
    is_target: ArrayLike,
    enrol_speaker_N: np.ndarray,
    test_speaker_N: np.ndarray,
    *,
    llr: ArrayLike | None = None,
    p_targets: Sequence[float] = P_TARGETS,
    num_replicates: int | None = None,
    seed: int = 0,
) -> Replicates:
    """Draw replicates of "eer", "min_dcf_<p>" for each prior and, with llr, "cllr", "act_dcf_<p>".

    llr: log-likelihood ratios (N), natural logarithm. Speakers (N) are numbers from 0. By default
    1,000 replicates, 200 above a million trials. The draws depend only on `seed`, the truth and the
    speakers, so two systems on the same trials get the same.
    """
    scores_N, is_target_N = checked(scores, is_target)
    assert (enrol_speaker_N == test_speaker_N)[is_target_N].all()
    pairs = SpeakerPairs(enrol_speaker_N, test_speaker_N)
    ranked = RankedTrials(scores_N, is_target_N, pairs.pair_N)
    costs = {} if llr is None else _decision_costs(llr, is_target_N, pairs, p_targets)
    target_P, nontarget_P = pairs.sums(is_target_N), pairs.sums(~is_target_N)
    having = (np.flatnonzero(target_P), np.flatnonzero(nontarget_P))  # pairs with either kind
    num_speakers = min(len(np.unique([pairs.enrol_P[p], pairs.test_P[p]])) for p in having)
    if num_replicates is None:
        num_replicates = 200 if len(scores_N) > MANY_TRIALS else 1000
    rng = np.random.default_rng(seed)
    rows: list[dict[str, float]] = []
    while len(rows) < num_replicates:
        drawn = rng.integers(pairs.num_speakers, size=pairs.num_speakers)
        weight_P = pairs.weights(np.bincount(drawn, minlength=pairs.num_speakers))
        num_target, num_nontarget = float(weight_P @ target_P), float(weight_P @ nontarget_P)
        if num_target > 0 and num_nontarget > 0:
            rates = ranked.rates(weight_P, p_targets)
            for name, (miss_P, fa_P) in costs.items():
                cost = weight_P @ miss_P / num_target + weight_P @ fa_P / num_nontarget
                rates[name] = float(cost)
            rows.append(rates)
    values = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return Replicates(values, num_speakers)


class SpeakerPairs:
    """Pairs of speakers that have trials, and the pair of each trial."""

    def __init__(self, enrol_N: np.ndarray, test_N: np.ndarray) -> None:
        """Number the speakers that occur, in the order of their own numbers."""
        both_2N = np.stack([enrol_N, test_N])
        occurs_S = np.bincount(both_2N.ravel()) > 0
        code_2N, self.num_speakers = (np.cumsum(occurs_S) - 1)[both_2N], int(occurs_S.sum())
        pair_N = code_2N[0] * self.num_speakers + code_2N[1]
        pairs, pair_N = np.unique(pair_N, return_inverse=True)
        self.pair_N = pair_N.astype(np.int32)
        self.enrol_P, self.test_P = np.divmod(pairs, self.num_speakers)

    def weights(self, weight_S: np.ndarray) -> NDArray[np.float64]:
        """Draw weight_P; whole numbers, so that sums of them are exact."""
        test_P = np.where(self.enrol_P == self.test_P, 1, weight_S[self.test_P])
        return (weight_S[self.enrol_P] * test_P).astype(np.float64)

    def sums(self, values_N: np.ndarray) -> NDArray[np.float64]:
        """Sum of the values of each pair's trials, (P)."""
        values_N = values_N.astype(np.float64)
        return np.bincount(self.pair_N, values_N, len(self.enrol_P)).astype(np.float64)


class RankedTrials:
    """Targets and non-targets in ascending order of score, and where operating points cut them."""

    def __init__(self, scores_N: np.ndarray, is_target_N: np.ndarray, pair_N: np.ndarray) -> None:
        """Sort the trials once for all replicates."""
        order_N, starts_K = order_of(scores_N)
        is_target_N, pair_N = is_target_N[order_N], pair_N[order_N]
        self.target_pairs, self.nontarget_pairs = pair_N[is_target_N], pair_N[~is_target_N]
        self.target_starts_K = sums_before(is_target_N.astype(np.int64))[starts_K]
        self.nontarget_starts_K = starts_K - self.target_starts_K
        # points from which on a target is missed, and the last point
        self.at_targets = np.flatnonzero(np.append(np.diff(self.target_starts_K) > 0, True))

    def rates(self, weight_P: np.ndarray, p_targets: Sequence[float]) -> dict[str, float]:
        """Return EER and minDCF when each trial weighs what its pair does.

        A cost is least at a point whose threshold is the score of a target: a higher threshold with
        as few misses only saves false alarms.
        """
        miss = sums_before(weight_P[self.target_pairs])
        reject = sums_before(weight_P[self.nontarget_pairs])
        p_miss_K = miss[self.target_starts_K] / miss[-1]
        p_fa_K = 1.0 - reject[self.nontarget_starts_K] / reject[-1]
        best = p_miss_K[self.at_targets], p_fa_K[self.at_targets]
        costs = {f"min_dcf_{p:g}": min_dcf_of_points(*best, p_target=p) for p in p_targets}
        return {"eer": eer_of_points(p_miss_K, p_fa_K), **costs}


def _decision_costs(
    llr: ArrayLike, is_target_N: np.ndarray, pairs: SpeakerPairs, p_targets: Sequence[float]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return metric -> the sums over each pair's targets and non-targets behind its mean."""
    llr_N, _ = checked(llr, is_target_N)
    bits_N = np.logaddexp(0, np.where(is_target_N, -llr_N, llr_N)) / (2 * np.log(2))
    costs = {"cllr": (pairs.sums(bits_N * is_target_N), pairs.sums(bits_N * ~is_target_N))}
    for p in p_targets:
        accepted_N = llr_N >= np.log((1 - p) / p)
        least = min(p, 1 - p)
        costs[f"act_dcf_{p:g}"] = (
            pairs.sums(is_target_N & ~accepted_N) * p / least,
            pairs.sums(~is_target_N & accepted_N) * (1 - p) / least,
        )
    return costs
