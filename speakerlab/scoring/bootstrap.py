"""Confidence intervals by bootstrap over speakers. In: scores of trials. Out: replicates, bounds.

Letters: N trials, P pairs of speakers (enrolment, test) that have trials, S speakers, K operating
points, R replicates, T false-alarm rates.
For a replicate, the S speakers (of both sides together) are drawn S times with replacement. If a
speaker is drawn w times, a target trial has the weight w(its speaker), and a non-target trial has
the weight w(enrolment speaker) x w(test speaker). A replicate without a target or without a
non-target trial has no EER and is drawn again.
Bounds are expanded percentiles (core/intervals.py). In a simulation with effects of speakers, of
pairs of speakers and of utterances, and an EER of 13 % (the slow test in
tests/scoring/test_bootstrap.py), 90, 95, 95 and 94 of 100 intervals contain the true EER with 5, 7,
20 and 100 speakers. With few errors, these intervals of an EER are too short; those of
scoring/eer_intervals.py are not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri, stdtr

from speakerlab.core.intervals import expansion, interval
from speakerlab.scoring.metrics import (
    BITS,
    P_TARGETS,
    checked,
    eer_of_points,
    min_dcf_of_points,
    order_of,
    sums_before,
)

MANY_TRIALS = 1_000_000  # with more, replicates are slow and the interval is stable
Costs = tuple[np.ndarray, np.ndarray]  # (P) each: sums over targets, over non-targets


@dataclass(frozen=True)
class Replicates:
    """Metrics of one system in each replicate, and the number of speakers behind them."""

    values: dict[str, NDArray[np.float64]]  # metric -> (R)
    # The smaller of the numbers of speakers with target and with non-target trials.
    num_speakers: int

    def interval(self, metric: str) -> list[float] | None:
        """Return the 95 % interval [low, high] of a metric, None with too few speakers."""
        return interval(self.values[metric], self.num_speakers)

    def paired(
        self, other: "Replicates", metric: str
    ) -> tuple[list[float] | None, float | None]:
        """Compare with another system on the same trials, drawn with the same seed.

        Return the 95 % interval of the difference self - other and its two-sided p-value, which is
        below 0.05 if the interval excludes zero. The p-value is the smallest level at which the
        interval excludes zero, with one replicate added on the other side of zero (Efron and
        Tibshirani, An Introduction to the Bootstrap, chapters 13 and 16).
        """
        difference_R = self.values[metric] - other.values[metric]
        ci95 = interval(difference_R, self.num_speakers)
        if ci95 is None:
            return None, None
        num_above = np.count_nonzero(difference_R >= 0)
        num_below = np.count_nonzero(difference_R <= 0)
        num_beyond = min(num_above, num_below)
        share_beyond = (num_beyond + 1) / (len(difference_R) + 1)
        # Invert `interval`: from the share of replicates beyond a bound to the tail of Student's
        # distribution.
        quantile = ndtri(share_beyond) / expansion(self.num_speakers)
        tail = float(stdtr(self.num_speakers - 1, quantile))
        return ci95, min(1.0, 2 * tail)


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
    1,000 replicates, 200 above a million trials. The draws depend only on `seed`, the labels and
    the speakers, so two systems on the same trials have the same draws.
    """
    scores_N, is_target_N = checked(scores, is_target)
    is_same_speaker_N = enrol_speaker_N == test_speaker_N
    assert is_same_speaker_N[is_target_N].all()
    pairs = SpeakerPairs(enrol_speaker_N, test_speaker_N, is_target_N)
    ranked = RankedTrials(scores_N, is_target_N, pairs.pair_N)
    costs: dict[str, Costs] = {}
    if llr is not None:
        costs = _decision_costs(llr, is_target_N, pairs, p_targets)
    if num_replicates is None:
        num_replicates = 200 if len(scores_N) > MANY_TRIALS else 1000

    replicates: list[dict[str, float]] = []
    draws = pairs.draw_weights(seed)
    for weight_P in islice(draws, num_replicates):
        num_target = float(weight_P @ pairs.num_target_P)
        num_nontarget = float(weight_P @ pairs.num_nontarget_P)
        rates = ranked.rates(weight_P, p_targets)
        for name, (miss_P, fa_P) in costs.items():
            miss_cost = weight_P @ miss_P / num_target
            fa_cost = weight_P @ fa_P / num_nontarget
            rates[name] = float(miss_cost + fa_cost)
        replicates.append(rates)

    values: dict[str, NDArray[np.float64]] = {}
    for name in replicates[0]:
        values[name] = np.array([rates[name] for rates in replicates])
    return Replicates(values, pairs.count_speakers_of_both_kinds())


def miss_band(
    scores: ArrayLike,
    is_target: ArrayLike,
    enrol_speaker_N: np.ndarray,
    test_speaker_N: np.ndarray,
    p_fa_T: np.ndarray,
    *,
    num_replicates: int = 200,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the bounds (low_T, high_T) of the miss rates at these false-alarm rates (T).

    Each is a 95 % interval by the replicates of `bootstrap`; None with too few speakers. Between
    two operating points, the miss rate is interpolated.
    """
    scores_N, is_target_N = checked(scores, is_target)
    pairs = SpeakerPairs(enrol_speaker_N, test_speaker_N, is_target_N)
    ranked = RankedTrials(scores_N, is_target_N, pairs.pair_N)
    num_speakers = pairs.count_speakers_of_both_kinds()
    miss_rates: list[np.ndarray] = []
    draws = pairs.draw_weights(seed)
    for weight_P in islice(draws, num_replicates):
        p_miss_K, p_fa_K = ranked.points(weight_P)
        # `interp` needs ascending rates.
        miss_rates.append(np.interp(p_fa_T, p_fa_K[::-1], p_miss_K[::-1]))
    p_miss_RT = np.stack(miss_rates)

    bounds: list[list[float]] = []
    for p_miss_R in p_miss_RT.T:
        ci95 = interval(p_miss_R, num_speakers)
        if ci95 is None:
            return None
        bounds.append(ci95)
    low_T, high_T = np.array(bounds).T
    return low_T, high_T


class SpeakerPairs:
    """Pairs of speakers with trials, the pair of each trial, and the draws of replicates."""

    def __init__(
        self, enrol_N: np.ndarray, test_N: np.ndarray, is_target_N: np.ndarray
    ) -> None:
        """Number the speakers with trials, in the order of their given numbers."""
        both_2N = np.stack([enrol_N, test_N])
        occurs = np.bincount(both_2N.ravel()) > 0
        self.num_speakers = int(occurs.sum())
        # The draws depend on the number of speakers, so speakers without trials must not count.
        new_number = np.cumsum(occurs) - 1
        enrol_code_N, test_code_N = new_number[both_2N]
        # A pair as one number, for `unique`.
        code_N = enrol_code_N * self.num_speakers + test_code_N
        code_P, pair_N = np.unique(code_N, return_inverse=True)
        self.pair_N = pair_N.astype(np.int32)
        self.enrol_P, self.test_P = np.divmod(code_P, self.num_speakers)
        # The number of trials of either kind of each pair.
        self.num_target_P = self.sums(is_target_N)
        self.num_nontarget_P = self.sums(~is_target_N)

    def draw_weights(self, seed: int) -> Iterator[NDArray[np.float64]]:
        """Yield the weights of the pairs, (P), in one replicate after the other, without end."""
        rng = np.random.default_rng(seed)
        while True:
            drawn = rng.integers(self.num_speakers, size=self.num_speakers)
            count_S = np.bincount(drawn, minlength=self.num_speakers)
            weight_P = self.weights(count_S)
            has_target = weight_P @ self.num_target_P > 0
            has_nontarget = weight_P @ self.num_nontarget_P > 0
            # The error rates need both kinds of trials: otherwise draw again.
            if has_target and has_nontarget:
                yield weight_P

    def weights(self, count_S: np.ndarray) -> NDArray[np.float64]:
        """Return the weight of each pair's trials, (P). count_S: number of draws of each speaker.

        Weights are whole numbers, so that their sums are exact.
        """
        enrol_count_P = count_S[self.enrol_P]
        test_count_P = count_S[self.test_P]
        # A target trial has one speaker, who counts once.
        is_target_P = self.enrol_P == self.test_P
        weight_P = enrol_count_P * np.where(is_target_P, 1, test_count_P)
        return weight_P.astype(np.float64)

    def sums(self, values_N: np.ndarray) -> NDArray[np.float64]:
        """Return the sum of the values of each pair's trials, (P)."""
        values_N = values_N.astype(np.float64)
        sum_P = np.bincount(self.pair_N, values_N, len(self.enrol_P))
        return sum_P.astype(np.float64)

    def count_speakers_of_both_kinds(self) -> int:
        """Return the smaller of the numbers of speakers with targets and with non-targets."""
        num_with_targets = self._count_speakers(self.num_target_P > 0)
        num_with_nontargets = self._count_speakers(self.num_nontarget_P > 0)
        return min(num_with_targets, num_with_nontargets)

    def _count_speakers(self, is_chosen_P: np.ndarray) -> int:
        """Return the number of speakers, on either side, of the chosen pairs."""
        enrol = self.enrol_P[is_chosen_P]
        test = self.test_P[is_chosen_P]
        return len(np.unique([enrol, test]))


class RankedTrials:
    """Targets and non-targets in ascending order of score, with the places of operating points."""

    def __init__(
        self,
        scores_N: np.ndarray,
        is_target_N: np.ndarray,
        pair_N: np.ndarray,
    ) -> None:
        """Sort the trials once for all replicates."""
        order_N, starts_K = order_of(scores_N)
        is_target_N = is_target_N[order_N]
        pair_N = pair_N[order_N]
        self.target_pairs = pair_N[is_target_N]
        self.nontarget_pairs = pair_N[~is_target_N]
        # Number of targets and of non-targets that score below each operating point.
        targets_before = sums_before(is_target_N.astype(np.int64))
        self.target_starts_K = targets_before[starts_K]
        self.nontarget_starts_K = starts_K - self.target_starts_K
        # Points whose threshold is the score of a target, and the last point.
        has_target = np.diff(self.target_starts_K) > 0
        self.at_targets = np.flatnonzero(np.append(has_target, True))

    def points(self, weight_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the error rates (p_miss_K, p_fa_K); each trial has the weight of its pair."""
        missed_before = sums_before(weight_P[self.target_pairs])
        rejected_before = sums_before(weight_P[self.nontarget_pairs])
        p_miss_K = missed_before[self.target_starts_K] / missed_before[-1]
        p_reject_K = rejected_before[self.nontarget_starts_K] / rejected_before[-1]
        return p_miss_K, 1.0 - p_reject_K

    def rates(
        self,
        weight_P: np.ndarray,
        p_targets: Sequence[float],
    ) -> dict[str, float]:
        """Return EER and minDCF; each trial has the weight of its pair.

        The minimum of a cost is at a point whose threshold is the score of a target: raising the
        threshold up to the next target adds no misses and can only remove false alarms.
        """
        p_miss_K, p_fa_K = self.points(weight_P)
        rates = {"eer": eer_of_points(p_miss_K, p_fa_K)}
        p_miss_at_targets = p_miss_K[self.at_targets]
        p_fa_at_targets = p_fa_K[self.at_targets]
        for p_target in p_targets:
            rates[f"min_dcf_{p_target:g}"] = min_dcf_of_points(
                p_miss_at_targets,
                p_fa_at_targets,
                p_target=p_target,
            )
        return rates


def _decision_costs(
    llr: ArrayLike,
    is_target_N: np.ndarray,
    pairs: SpeakerPairs,
    p_targets: Sequence[float],
) -> dict[str, Costs]:
    """Return metric -> costs, as in `metrics.cllr` and `metrics.act_dcf`.

    A metric is the mean cost over targets plus the mean cost over non-targets.
    """
    llr_N, _ = checked(llr, is_target_N)
    # The cost of a trial rises with the evidence of its ratio against the true label.
    wrong_llr_N = np.where(is_target_N, -llr_N, llr_N)
    bits_N = np.logaddexp(0, wrong_llr_N) / BITS
    miss_bits_P = pairs.sums(bits_N * is_target_N)
    fa_bits_P = pairs.sums(bits_N * ~is_target_N)
    costs: dict[str, Costs] = {"cllr": (miss_bits_P, fa_bits_P)}
    for p_target in p_targets:
        is_accepted_N = llr_N >= np.log((1 - p_target) / p_target)
        num_missed_P = pairs.sums(is_target_N & ~is_accepted_N)
        num_false_P = pairs.sums(~is_target_N & is_accepted_N)
        # The cost of the better of "accept all" and "accept nothing".
        default_cost = min(p_target, 1 - p_target)
        costs[f"act_dcf_{p_target:g}"] = (
            num_missed_P * p_target / default_cost,
            num_false_P * (1 - p_target) / default_cost,
        )
    return costs
