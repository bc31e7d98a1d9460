"""Error rates of a verification system. In: scores of trials. Out: EER, DCF and Cllr.

Letters: N trials, M targets, K operating points, P priors, C corners among the operating points.
A trial is accepted if score >= threshold. Equal scores form one operating point. All metrics come
from sorted scores and cumulative sums over them.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

P_TARGETS = (0.01, 0.05)  # prior probabilities of a target at which minDCF is reported
ROUNDING = 1e-12  # of a rate: 1 - 2/3 is a little more than 1/3
BITS = 2 * np.log(2)  # from the sum of two costs in nats to their mean in bits


def operating_points(
    scores: ArrayLike, is_target: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (p_miss_K, p_fa_K, threshold_K): the error rates at every distinct score.

    Thresholds ascend from the lowest score (all trials accepted, 0 misses) to +inf (none accepted,
    0 false alarms). The scores themselves are sorted, which takes half the time of an argsort.
    """
    scores_N, is_target_N = checked(scores, is_target)
    ascending_N = np.sort(scores_N)
    ascending_target_M = np.sort(scores_N[is_target_N])
    starts_K = _starts(ascending_N)
    # Every distinct score, and one above all.
    threshold_K = np.append(ascending_N[starts_K[:-1]], np.inf)

    # Targets below a threshold are missed; at the last threshold all are, even at score +inf.
    miss_K = np.searchsorted(ascending_target_M, threshold_K)
    miss_K[-1] = len(ascending_target_M)
    # The other trials below a threshold are correctly rejected non-targets.
    reject_K = starts_K - miss_K
    p_miss_K = miss_K / miss_K[-1]
    p_fa_K = 1.0 - reject_K / reject_K[-1]
    return p_miss_K, p_fa_K, threshold_K


def eer(scores: ArrayLike, is_target: ArrayLike) -> float:
    """Return the equal error rate, a fraction, of two arrays (N); `is_target`: bool or 0/1."""
    p_miss_K, p_fa_K, _ = operating_points(scores, is_target)
    return eer_of_points(p_miss_K, p_fa_K)


def eer_of_points(p_miss_K: np.ndarray, p_fa_K: np.ndarray) -> float:
    """Return the EER by linear interpolation between the two points around p_miss = p_fa.

    Takes points of `operating_points`: misses rise from 0, false alarms fall to 0.
    """
    # The gap rises from -1 (all trials accepted) to 1.
    gap_K = p_miss_K - p_fa_K
    after = int(np.searchsorted(gap_K, 0.0))
    miss_before = p_miss_K[after - 1]
    miss_after = p_miss_K[after]
    gap_before = gap_K[after - 1]
    gap_after = gap_K[after]
    # The point on the line through both points at which the gap is 0.
    rise = (miss_after - miss_before) * gap_before / (gap_before - gap_after)
    return float(miss_before + rise)


def min_dcf(scores: ArrayLike, is_target: ArrayLike, p_target: float = 0.01) -> float:
    """Return the minimum of p x miss + (1 - p) x false alarm over all thresholds, costs 1.

    It is divided by min(p, 1 - p), the cost of the better of "accept all" and "accept nothing", so
    a useless system has 1 (NIST speaker recognition evaluation plans).
    """
    p_miss_K, p_fa_K, _ = operating_points(scores, is_target)
    return min_dcf_of_points(p_miss_K, p_fa_K, p_target=p_target)


def min_dcf_of_points(
    p_miss_K: np.ndarray,
    p_fa_K: np.ndarray,
    *,
    p_target: float,
) -> float:
    """Return `min_dcf` from operating points."""
    if not 0.0 < p_target < 1.0:
        raise ValueError(
            f"minDCF: p_target must be between 0 and 1, got {p_target}; use e.g. 0.01"
        )
    cost_K = p_target * p_miss_K + (1.0 - p_target) * p_fa_K
    return float(cost_K.min() / min(p_target, 1.0 - p_target))


def cllr(llr: ArrayLike, is_target: ArrayLike) -> float:
    """Return the cost of log-likelihood ratios (N, natural logarithm) in bits, over all priors.

    0 is perfect, 1 carries no information (Brummer and du Preez, Computer Speech and Language 20,
    2006).
    """
    llr_N, is_target_N = checked(llr, is_target)
    miss_costs = np.logaddexp(0, -llr_N[is_target_N])
    alarm_costs = np.logaddexp(0, llr_N[~is_target_N])
    return float((miss_costs.mean() + alarm_costs.mean()) / BITS)


def act_dcf(llr: ArrayLike, is_target: ArrayLike, p_target: float = 0.01) -> float:
    """Return the detection cost, normalised like `min_dcf`, of log-likelihood ratios.

    The threshold is optimal for well-calibrated ratios: log((1 - p) / p).
    """
    threshold = np.log((1 - p_target) / p_target)
    p_miss, p_fa = error_rates(llr, is_target, threshold=threshold)
    # The minimum over this single operating point.
    p_miss_1 = np.array([p_miss])
    p_fa_1 = np.array([p_fa])
    return min_dcf_of_points(p_miss_1, p_fa_1, p_target=p_target)


def error_rates(
    scores: ArrayLike, is_target: ArrayLike, *, threshold: float
) -> tuple[float, float]:
    """Return (share of targets below the threshold, share of non-targets at or above it)."""
    scores_N, is_target_N = checked(scores, is_target)
    accepted_N = scores_N >= threshold
    p_miss = 1 - accepted_N[is_target_N].mean()
    p_fa = accepted_N[~is_target_N].mean()
    return float(p_miss), float(p_fa)


def min_cllr(scores: ArrayLike, is_target: ArrayLike) -> float:
    """Return the smallest `cllr`, in bits, over monotonic maps from scores to ratios.

    The map is found by pooling adjacent violators (Brummer and du Preez, Computer Speech and
    Language 20, 2006); equal scores have equal ratios. The difference `cllr` - `min_cllr` is the
    calibration loss.
    """
    # Imported here, because the import takes half a second.
    from scipy.optimize import isotonic_regression

    scores_N, is_target_N = checked(scores, is_target)
    order_N, starts_K = order_of(scores_N)
    ascending_target_N = is_target_N[order_N].astype(np.int64)
    # Here K are the groups of equal scores, one fewer than the operating points.
    targets_before = sums_before(ascending_target_N)[starts_K]
    target_K = np.diff(targets_before)
    count_K = np.diff(starts_K)
    nontarget_K = count_K - target_K
    num_target = targets_before[-1]
    num_nontarget = len(scores_N) - num_target

    posterior_K = isotonic_regression(target_K / count_K, weights=count_K).x
    # Ratios of 0 or infinity are never wrong and cost nothing, so dividing by 0 is no error.
    with np.errstate(divide="ignore"):
        odds_K = posterior_K / (1 - posterior_K) * (num_nontarget / num_target)
        miss_cost_K = np.where(target_K > 0, np.log1p(1 / odds_K), 0.0)
        alarm_cost_K = np.where(nontarget_K > 0, np.log1p(odds_K), 0.0)
    mean_miss_cost = target_K @ miss_cost_K / num_target
    mean_alarm_cost = nontarget_K @ alarm_cost_K / num_nontarget
    return float((mean_miss_cost + mean_alarm_cost) / BITS)


def bayes_error(
    llr: ArrayLike, is_target: ArrayLike, log_odds: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Return normalised Bayes error rates (actual_P, minimum_P) at prior log-odds (P).

    llr (N) are natural logarithms; log-odds t correspond to the target prior p = 1 / (1 + exp(-t)).
    At each p the rates are `act_dcf` and `min_dcf` (Brummer and de Villiers, "The BOSARIS Toolkit:
    theory, algorithms and code for surviving the new DCF", 2011).
    """
    from scipy.special import expit  # here: slow to import

    p_miss_K, p_fa_K, threshold_K = operating_points(llr, is_target)
    log_odds_P = np.asarray(log_odds, dtype=np.float64)
    p_target_P = expit(log_odds_P)
    # min(p, 1 - p), the cost of a system without information.
    scale_P = expit(-np.abs(log_odds_P))

    # At log-odds t, Bayes decisions accept ratios >= -t: take the first threshold >= -t.
    decided_P = np.searchsorted(threshold_K, -log_odds_P)
    miss_P = p_miss_K[decided_P]
    fa_P = p_fa_K[decided_P]
    actual_P = p_target_P * miss_P + (1 - p_target_P) * fa_P

    # Only corners can have the minimum cost: a lower threshold has more false alarms, a higher one
    # more misses.
    fa_falls_K = np.diff(p_fa_K, prepend=np.inf) < 0
    miss_rises_K = np.diff(p_miss_K, append=np.inf) > 0
    is_corner_K = fa_falls_K & miss_rises_K
    miss_C = p_miss_K[is_corner_K]
    fa_C = p_fa_K[is_corner_K]
    minima: list[np.floating] = []
    for p_target in p_target_P:
        cost_C = p_target * miss_C + (1 - p_target) * fa_C
        minima.append(cost_C.min())
    minimum_P = np.array(minima)
    return actual_P / scale_P, minimum_P / scale_P


def threshold_at(
    scores: ArrayLike,
    is_target: ArrayLike,
    *,
    far: float | None = None,
    frr: float | None = None,
) -> float:
    """Return the threshold of the scores for a requested rate, either far or frr.

    far: find the lowest threshold that accepts at most this share of the non-targets (false-alarm
    or false-acceptance rate). frr: find the highest threshold that rejects at most this share of
    the targets (miss or false-rejection rate). Infinite if the rate requires rejecting all trials.
    """
    rate = far
    name = "far"
    if far is None:
        rate = frr
        name = "frr"
    if rate is None or not 0.0 <= rate <= 1.0:
        raise ValueError(
            f"threshold: {name} must be between 0 and 1, got {rate}; use e.g. 0.01"
        )
    p_miss_K, p_fa_K, threshold_K = operating_points(scores, is_target)
    highest_rate = rate + ROUNDING
    if far is not None:
        # The first point with few enough false alarms; p_fa_K descends.
        point = int(np.argmax(p_fa_K <= highest_rate))
    else:
        # The last point with few enough misses; p_miss_K ascends.
        num_points = int(np.searchsorted(p_miss_K, highest_rate, side="right"))
        point = num_points - 1
    return float(threshold_K[point])


def checked(
    scores: ArrayLike, is_target: ArrayLike
) -> tuple[np.ndarray, NDArray[np.bool_]]:
    """Return (scores_N as float64, is_target_N); ValueError if they allow no metric."""
    scores_N = np.asarray(scores, dtype=np.float64)
    is_target_N = np.asarray(is_target)
    if scores_N.ndim != 1 or scores_N.shape != is_target_N.shape:
        raise ValueError(
            f"scores: need one number per trial, got shapes {scores_N.shape} for scores"
            f" and {is_target_N.shape} for is_target; give two arrays of equal length"
        )
    is_bool = is_target_N.dtype == np.bool_
    # `astype` below would make any other number True.
    if not is_bool and not np.isin(is_target_N, (0, 1)).all():
        raise ValueError(
            "is_target: must be true or false (or 1 and 0), got other"
            f" {is_target_N.dtype} values; make a bool array"
        )
    is_target_N = is_target_N.astype(np.bool_)
    num_target = int(np.count_nonzero(is_target_N))
    num_nontarget = len(is_target_N) - num_target
    for kind, num_trials in (("target", num_target), ("non-target", num_nontarget)):
        if num_trials == 0:
            raise ValueError(
                f"trials: an error rate needs {kind} trials, got none of"
                f" {len(is_target_N)}; use a list with both kinds"
            )
    nan_N = np.isnan(scores_N)
    if nan_N.any():
        raise ValueError(
            f"scores: {np.count_nonzero(nan_N)} of {len(nan_N)} are NaN, the first at"
            f" trial {int(nan_N.argmax())}; check the embeddings"
        )
    return scores_N, is_target_N


def order_of(scores_N: np.ndarray) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the ascending order, and the start of each group of equal scores (last: N)."""
    order_N = np.argsort(scores_N)
    return order_N, _starts(scores_N[order_N])


def _starts(ascending_N: np.ndarray) -> NDArray[np.intp]:
    """Return the start of each group of equal values, followed by the end."""
    differs_from_last = ascending_N[1:] != ascending_N[:-1]
    is_start_N = np.append(True, differs_from_last)
    starts = np.flatnonzero(is_start_N)
    return np.append(starts, len(ascending_N))


def sums_before(values_N: np.ndarray) -> np.ndarray:
    """Return the sum of the values before each index, followed by the total: (N + 1)."""
    sums = np.zeros(len(values_N) + 1, dtype=values_N.dtype)
    np.cumsum(values_N, out=sums[1:])
    return sums
