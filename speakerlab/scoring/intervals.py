"""Intervals of error rates by bootstrap over speakers. In: scores of trials. Out: bounds.

Letters: N trials, P pairs of speakers (enrolment, test) that have trials, R replicates, K operating
points.
In a replicate the S speakers (of both sides together) are drawn S times with replacement; a trial
weighs w(enrolment speaker) x w(test speaker), w being how often a speaker was drawn. So a target
trial weighs w squared, which errs on the wide side: simulated with 10 to 40 speakers the interval
holds the true EER in 97 to 100 of 100 cases and is half again as wide as it would have to be
(targets weighing w: 90 to 95 of 100). A replicate left without a target or without a non-target
trial has no EER and is drawn again.
"""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.scoring.bootstrap import Pairs, Sweep
from speakerlab.scoring.metrics import (
    P_TARGETS,
    checked,
    eer_of_points,
    min_dcf_of_points,
    operating_points,
)

MANY_TRIALS = 1_000_000  # above this a replicate is dear, and the interval hardly moves
Replicates = dict[str, NDArray[np.float64]]  # metric -> its value in each replicate (R)


class Summary(TypedDict):
    """The measured part of a row of results; rates are fractions."""

    eer: float
    eer_ci95: list[float]
    min_dcf: dict[str, float]
    num_target: int
    num_nontarget: int


class Paired(TypedDict):
    """A metric of one system minus that of another on the same trials."""

    difference: float
    ci95: list[float]
    p_value: float


def bootstrap(
    scores: ArrayLike,
    is_target: ArrayLike,
    enrol_speaker: ArrayLike,
    test_speaker: ArrayLike,
    *,
    llr: ArrayLike | None = None,
    p_targets: Sequence[float] = P_TARGETS,
    num_replicates: int | None = None,
    seed: int = 0,
) -> Replicates:
    """Replicates of "eer", of "min_dcf_<p>" for each prior p and, with llr, "cllr", "act_dcf_<p>".

    llr: log-likelihood ratios (N), natural logarithm. Speakers (N) may be names or numbers; whole
    numbers are quicker. By default 1,000 replicates, 200 above a million trials. The draws follow
    from `seed`, the truth and the speakers alone, so two systems on the same trials get the same
    ones. The scores are sorted once.
    """
    scores_N, is_target_N = checked(scores, is_target)
    pairs = Pairs.of(enrol_speaker, test_speaker, is_target_N)
    whole, upper = Sweep.of(scores_N, is_target_N, pairs.pair_N, p_targets)
    costs = {} if llr is None else _decision_costs(llr, is_target_N, pairs, p_targets)
    target_P, nontarget_P = pairs.counts(is_target_N), pairs.counts(~is_target_N)
    if num_replicates is None:
        num_replicates = 200 if len(scores_N) > MANY_TRIALS else 1000
    rng = np.random.default_rng(seed)
    rows: list[dict[str, float]] = []
    while len(rows) < num_replicates:
        drawn = rng.integers(pairs.num_speakers, size=pairs.num_speakers)
        weight_P = pairs.weights(np.bincount(drawn, minlength=pairs.num_speakers))
        num_target, num_nontarget = float(weight_P @ target_P), float(weight_P @ nontarget_P)
        if num_target > 0 and num_nontarget > 0:
            rates = upper.rates(weight_P, num_nontarget, p_targets)
            rates = rates or whole.rates(weight_P, num_nontarget, p_targets)
            assert rates is not None
            for name, (miss_P, fa_P) in costs.items():
                cost = weight_P @ miss_P / num_target + weight_P @ fa_P / num_nontarget
                rates[name] = float(cost)
            rows.append(rates)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def interval(values_R: NDArray[np.float64]) -> list[float]:
    """95 % percentile interval [low, high] of replicates."""
    return [float(bound) for bound in np.percentile(values_R, [2.5, 97.5])]


def eer_interval(
    scores: ArrayLike,
    is_target: ArrayLike,
    enrol_speaker: ArrayLike,
    test_speaker: ArrayLike,
    *,
    num_replicates: int | None = None,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % percentile interval of the EER by bootstrap over speakers; arguments of `bootstrap`."""
    drawn = bootstrap(
        scores,
        is_target,
        enrol_speaker,
        test_speaker,
        p_targets=(),
        num_replicates=num_replicates,
        seed=seed,
    )
    low, high = interval(drawn["eer"])
    return low, high


def paired(difference: float, ours_R: np.ndarray, theirs_R: np.ndarray) -> Paired:
    """How sure a difference (ours - theirs) is, from replicates drawn with one seed for both.

    The p-value is two-sided: twice the share of replicates on the other side of zero, each side
    with one replicate more, as in a permutation test (Efron and Tibshirani, An Introduction to the
    Bootstrap, chapters 13 and 16). At most 1.
    """
    assert ours_R.shape == theirs_R.shape, (ours_R.shape, theirs_R.shape)
    difference_R = ours_R - theirs_R
    sides = [np.count_nonzero(difference_R >= 0), np.count_nonzero(difference_R <= 0)]
    p_value = min(1.0, 2 * (min(sides) + 1) / (len(difference_R) + 1))
    return {"difference": difference, "ci95": interval(difference_R), "p_value": float(p_value)}


def summary(
    scores: ArrayLike,
    is_target: ArrayLike,
    replicates: Replicates,
    *,
    p_targets: Sequence[float] = P_TARGETS,
) -> Summary:
    """What a row of results says about one system on one trial list."""
    p_miss_K, p_fa_K, _ = operating_points(scores, is_target)
    num_target = int(np.count_nonzero(is_target))
    return {
        "eer": eer_of_points(p_miss_K, p_fa_K),
        "eer_ci95": interval(replicates["eer"]),
        "min_dcf": {f"{p:g}": min_dcf_of_points(p_miss_K, p_fa_K, p_target=p) for p in p_targets},
        "num_target": num_target,
        "num_nontarget": np.size(is_target) - num_target,
    }


def _decision_costs(
    llr: ArrayLike, is_target_N: np.ndarray, pairs: Pairs, p_targets: Sequence[float]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """metric -> the sums over each pair's targets and non-targets that it is a mean of."""
    llr_N, _ = checked(llr, is_target_N)
    bits_N = np.logaddexp(0, np.where(is_target_N, -llr_N, llr_N)) / (2 * np.log(2))
    costs = {"cllr": (pairs.counts(bits_N * is_target_N), pairs.counts(bits_N * ~is_target_N))}
    for p in p_targets:
        accepted_N = llr_N >= np.log((1 - p) / p)
        least = min(p, 1 - p)
        costs[f"act_dcf_{p:g}"] = (
            pairs.counts(is_target_N & ~accepted_N) * p / least,
            pairs.counts(~is_target_N & accepted_N) * (1 - p) / least,
        )
    return costs
