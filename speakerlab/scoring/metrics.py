"""Error rates of a verification system: scores of trials in; EER, minDCF and an interval out.

Letters: N trials, K operating points.
A trial is accepted where score >= threshold. Equal scores cannot be told apart by a threshold, so
they make one operating point. Everything here is one sort of the scores and sums over that order.
"""

from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

Points = tuple[np.ndarray, np.ndarray, np.ndarray]

MANY_TRIALS = 1_000_000  # above this a replicate is dear, and the interval hardly moves
P_TARGETS = (0.01, 0.05)  # prior probabilities of a target at which minDCF is reported


class Summary(TypedDict):
    """The measured part of a row of results; rates are fractions."""

    eer: float
    eer_ci95: list[float]
    min_dcf: dict[str, float]
    num_target: int
    num_nontarget: int


def operating_points(
    scores: ArrayLike, is_target: ArrayLike, weights: ArrayLike | None = None
) -> Points:
    """Error rates at every threshold that makes a difference.

    `weights` (N) are non-negative; a trial of weight w counts as w equal trials. Returns
    (p_miss_K, p_fa_K, threshold_K): thresholds ascend from the lowest score (all is accepted:
    0 misses) to +inf (nothing is accepted: 0 false alarms).
    """
    scores_N, is_target_N = _checked(scores, is_target)
    order_N, starts_K = _order(scores_N)
    weights_N = _checked_weights(weights, len(scores_N))[order_N]
    is_target_N = is_target_N[order_N]
    miss_K = _sums_before(np.where(is_target_N, weights_N, 0.0))[starts_K]
    reject_K = _sums_before(np.where(is_target_N, 0.0, weights_N))[starts_K]
    for total, kind in ((miss_K[-1], "target"), (reject_K[-1], "non-target")):
        if total <= 0:
            raise ValueError(f"trials: every {kind} trial has weight 0; give one a weight above 0")
    thresholds_K = np.append(scores_N[order_N[starts_K[:-1]]], np.inf)
    return miss_K / miss_K[-1], 1.0 - reject_K / reject_K[-1], thresholds_K


def eer(scores: ArrayLike, is_target: ArrayLike) -> float:
    """Equal error rate as a fraction; two arrays of length N, `is_target` of bool or 0/1."""
    p_miss_K, p_fa_K, _ = operating_points(scores, is_target)
    return eer_of_points(p_miss_K, p_fa_K)


def eer_of_points(p_miss_K: np.ndarray, p_fa_K: np.ndarray) -> float:
    """Where the straight line between the two points around p_miss = p_fa crosses it.

    Takes points as `operating_points` gives them: misses rise from 0, false alarms fall to 0.
    """
    after = int(np.searchsorted(p_miss_K - p_fa_K, 0.0))
    return _crossing(
        p_miss_K[after - 1], p_fa_K[after - 1], float(p_miss_K[after]), float(p_fa_K[after])
    )


def min_dcf(scores: ArrayLike, is_target: ArrayLike, p_target: float = 0.01) -> float:
    """Least detection cost p x miss + (1 - p) x false alarm over all thresholds, costs 1.

    Divided by min(p, 1 - p), the cost of the better of "accept all" and "accept nothing", so a
    useless system has 1 (NIST speaker recognition evaluation plans).
    """
    p_miss_K, p_fa_K, _ = operating_points(scores, is_target)
    return min_dcf_of_points(p_miss_K, p_fa_K, p_target=p_target)


def min_dcf_of_points(p_miss_K: np.ndarray, p_fa_K: np.ndarray, *, p_target: float) -> float:
    """The same from operating points."""
    if not 0.0 < p_target < 1.0:
        raise ValueError(f"minDCF: p_target is not between 0 and 1, got {p_target}; use e.g. 0.01")
    cost_K = p_target * p_miss_K + (1.0 - p_target) * p_fa_K
    return float(cost_K.min() / min(p_target, 1.0 - p_target))


def cllr(llr: ArrayLike, is_target: ArrayLike) -> float:
    """Cost of log-likelihood ratios (N, natural logarithm) in bits, over all priors.

    0 is perfect, 1 is worth nothing (Brummer and du Preez, Computer Speech and Language 20, 2006).
    """
    llr_N, is_target_N = _checked(llr, is_target)
    misses, alarms = np.logaddexp(0, -llr_N[is_target_N]), np.logaddexp(0, llr_N[~is_target_N])
    return float((misses.mean() + alarms.mean()) / (2 * np.log(2)))


def act_dcf(llr: ArrayLike, is_target: ArrayLike, p_target: float = 0.01) -> float:
    """Detection cost, normalised like `min_dcf`, of deciding by log-likelihood ratios.

    The threshold is the one that is best if the ratios are right: log((1 - p) / p).
    """
    llr_N, is_target_N = _checked(llr, is_target)
    p_miss, p_fa = error_rates(llr_N, is_target_N, threshold=np.log((1 - p_target) / p_target))
    points = np.array([p_miss]), np.array([p_fa])
    return min_dcf_of_points(*points, p_target=p_target)


def error_rates(
    scores: ArrayLike, is_target: ArrayLike, *, threshold: float
) -> tuple[float, float]:
    """(share of targets below the threshold, share of non-targets at or above it)."""
    scores_N, is_target_N = _checked(scores, is_target)
    accepted_N = scores_N >= threshold
    return float(1 - accepted_N[is_target_N].mean()), float(accepted_N[~is_target_N].mean())


def eer_interval(
    scores: ArrayLike,
    is_target: ArrayLike,
    enrol_speaker: ArrayLike,
    test_speaker: ArrayLike,
    *,
    num_replicates: int | None = None,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % percentile interval of the EER by bootstrap over speakers.

    In a replicate the S speakers (of both sides together) are drawn S times with replacement; a
    trial weighs w(enrol speaker) x w(test speaker), w being how often a speaker was drawn. So a
    target trial weighs w squared, which errs on the wide side: simulated with 10 to 40 speakers
    the interval holds the true EER in 97 to 100 of 100 cases and is half again as wide as it
    would have to be (targets weighing w: 90 to 95 of 100). A replicate left without a target or
    without a non-target trial has no EER and is drawn again.

    Speakers (N) may be names or numbers; whole numbers are quicker. By default 1,000 replicates,
    200 above a million trials. The scores are sorted once.
    """
    scores_N, is_target_N = _checked(scores, is_target)
    speakers_N2, num_speakers = _speaker_codes(enrol_speaker, test_speaker, is_target_N)
    order_N, starts_K = _order(scores_N)
    is_target_N, speakers_N2 = is_target_N[order_N], speakers_N2[order_N]
    target_starts_K = np.append(0, np.cumsum(is_target_N))[starts_K]
    starts = (target_starts_K, starts_K - target_starts_K)
    target_speakers_2 = np.ascontiguousarray(speakers_N2[is_target_N].T)
    nontarget_speakers_2 = np.ascontiguousarray(speakers_N2[~is_target_N].T)

    if num_replicates is None:
        num_replicates = 200 if len(scores_N) > MANY_TRIALS else 1000
    rng = np.random.default_rng(seed)
    eers: list[float] = []
    while len(eers) < num_replicates:
        drawn = rng.integers(num_speakers, size=num_speakers)
        weight_S = np.bincount(drawn, minlength=num_speakers)
        miss_N = _sums_before(weight_S[target_speakers_2[0]] * weight_S[target_speakers_2[1]])
        reject_N = _sums_before(
            weight_S[nontarget_speakers_2[0]] * weight_S[nontarget_speakers_2[1]]
        )
        if miss_N[-1] > 0 and reject_N[-1] > 0:
            eers.append(_eer_of_sums(miss_N, reject_N, *starts))
    low, high = np.percentile(eers, [2.5, 97.5])
    return float(low), float(high)


def summary(
    scores: ArrayLike,
    is_target: ArrayLike,
    enrol_speaker: ArrayLike,
    test_speaker: ArrayLike,
    *,
    seed: int = 0,
) -> Summary:
    """What a row of results says about one system on one trial list."""
    p_miss_K, p_fa_K, _ = operating_points(scores, is_target)
    num_target = int(np.count_nonzero(is_target))
    return {
        "eer": eer_of_points(p_miss_K, p_fa_K),
        "eer_ci95": list(eer_interval(scores, is_target, enrol_speaker, test_speaker, seed=seed)),
        "min_dcf": {f"{p:g}": min_dcf_of_points(p_miss_K, p_fa_K, p_target=p) for p in P_TARGETS},
        "num_target": num_target,
        "num_nontarget": np.size(is_target) - num_target,
    }


def _checked(scores: ArrayLike, is_target: ArrayLike) -> tuple[np.ndarray, NDArray[np.bool_]]:
    scores_N, is_target_N = np.asarray(scores, dtype=np.float64), np.asarray(is_target)
    if scores_N.ndim != 1 or scores_N.shape != is_target_N.shape:
        raise ValueError(
            f"scores: one number a trial is needed, got shapes {scores_N.shape} for scores and "
            f"{is_target_N.shape} for is_target; give two arrays of equal length"
        )
    if is_target_N.dtype != np.bool_ and not np.isin(is_target_N, (0, 1)).all():
        raise ValueError(
            f"is_target: only true and false (or 1 and 0) are known, got {is_target_N.dtype} "
            "values; make a bool array"
        )
    is_target_N = is_target_N.astype(np.bool_)
    num_target = int(np.count_nonzero(is_target_N))
    for count, kind in ((num_target, "target"), (len(is_target_N) - num_target, "non-target")):
        if count == 0:
            raise ValueError(
                f"trials: an error rate needs {kind} trials, got none of {len(is_target_N)}; "
                "use a list with both kinds"
            )
    nan_N = np.isnan(scores_N)
    if nan_N.any():
        raise ValueError(
            f"scores: {np.count_nonzero(nan_N)} of {len(nan_N)} are not a number, the first at "
            f"trial {int(nan_N.argmax())}; look for broken embeddings"
        )
    return scores_N, is_target_N


def _checked_weights(weights: ArrayLike | None, num_trials: int) -> NDArray[np.float64]:
    if weights is None:
        return np.ones(num_trials)
    weights_N = np.asarray(weights, dtype=np.float64)
    if weights_N.shape != (num_trials,) or not (np.isfinite(weights_N) & (weights_N >= 0)).all():
        raise ValueError(
            f"weights: {num_trials} finite numbers >= 0 are needed, got shape {weights_N.shape}; "
            "give one a trial"
        )
    return weights_N


def _order(scores_N: np.ndarray) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The ascending order, and where in it each group of equal scores starts (last: N)."""
    order_N = np.argsort(scores_N)
    ascending_N = scores_N[order_N]
    is_new_N = np.append(True, ascending_N[1:] != ascending_N[:-1])
    return order_N, np.append(np.flatnonzero(is_new_N), len(order_N))


def _sums_before(values_N: np.ndarray) -> np.ndarray:
    """The sum of what stands before each place, and last of all: (N + 1)."""
    sums = np.zeros(len(values_N) + 1, dtype=values_N.dtype)
    np.cumsum(values_N, out=sums[1:])
    return sums


def _crossing(miss_0: float, fa_0: float, miss_1: float, fa_1: float) -> float:
    gap_0, gap_1 = miss_0 - fa_0, miss_1 - fa_1
    return float(miss_0 + (miss_1 - miss_0) * gap_0 / (gap_0 - gap_1))


def _eer_of_sums(
    miss_sums: np.ndarray,
    reject_sums: np.ndarray,
    target_starts_K: np.ndarray,
    nontarget_starts_K: np.ndarray,
) -> float:
    """EER from sums of weights over the sorted targets and over the sorted non-targets.

    Bisection looks at 20 of a million operating points, so a replicate costs its two sums only.
    """

    def rates(k: int) -> tuple[float, float]:
        miss = miss_sums[target_starts_K[k]] / miss_sums[-1]
        return miss, 1.0 - reject_sums[nontarget_starts_K[k]] / reject_sums[-1]

    before, after = 0, len(target_starts_K) - 1
    while after - before > 1:
        middle = (before + after) // 2
        miss, fa = rates(middle)
        before, after = (middle, after) if miss < fa else (before, middle)
    return _crossing(*rates(before), *rates(after))


def _speaker_codes(
    enrol_speaker: ArrayLike, test_speaker: ArrayLike, is_target_N: np.ndarray
) -> tuple[NDArray[np.int32], int]:
    """Numbers 0..S-1 for the speakers of both sides, (N, 2), and S."""
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
    names, codes = np.unique(np.stack([enrol_N, test_N], axis=1), return_inverse=True)
    return codes.reshape(-1, 2).astype(np.int32), len(names)
