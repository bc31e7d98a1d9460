"""Error rates of a verification system: scores of trials in; EER, DCF and Cllr out.

Letters: N trials, M targets, K operating points.
A trial is accepted if score >= threshold. Equal scores form one operating point. Everything here is
a sort of the scores, and sums over those below each.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

P_TARGETS = (0.01, 0.05)  # prior probabilities of a target at which minDCF is reported
ROUNDING = 1e-12  # of a rate: 1 - 2/3 is a little more than 1/3


def operating_points(
    scores: ArrayLike, is_target: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the error rates at every threshold that makes a difference.

    (p_miss_K, p_fa_K, threshold_K): thresholds ascend from the lowest score (all trials accepted,
    0 misses) to +inf (none accepted, 0 false alarms). The scores are sorted without their trials,
    which takes half the time of an order.
    """
    scores_N, is_target_N = checked(scores, is_target)
    ascending_N, target_M = np.sort(scores_N), np.sort(scores_N[is_target_N])
    starts_K = _starts(ascending_N)
    threshold_K = np.append(ascending_N[starts_K[:-1]], np.inf)
    miss_K = np.searchsorted(target_M, threshold_K)
    miss_K[-1] = len(target_M)  # a score may be +inf
    reject_K = starts_K - miss_K
    return miss_K / miss_K[-1], 1.0 - reject_K / reject_K[-1], threshold_K


def eer(scores: ArrayLike, is_target: ArrayLike) -> float:
    """Return the equal error rate, a fraction, of two arrays (N); `is_target`: bool or 0/1."""
    p_miss_K, p_fa_K, _ = operating_points(scores, is_target)
    return eer_of_points(p_miss_K, p_fa_K)


def eer_of_points(p_miss_K: np.ndarray, p_fa_K: np.ndarray) -> float:
    """Return the EER by linear interpolation between the two points around p_miss = p_fa.

    Takes points of `operating_points`: misses rise from 0, false alarms fall to 0.
    """
    after = int(np.searchsorted(p_miss_K - p_fa_K, 0.0))
    (miss_0, miss_1), (fa_0, fa_1) = p_miss_K[after - 1 : after + 1], p_fa_K[after - 1 : after + 1]
    gap_0, gap_1 = miss_0 - fa_0, miss_1 - fa_1
    return float(miss_0 + (miss_1 - miss_0) * gap_0 / (gap_0 - gap_1))


def min_dcf(scores: ArrayLike, is_target: ArrayLike, p_target: float = 0.01) -> float:
    """Return the minimum of p x miss + (1 - p) x false alarm over all thresholds, costs 1.

    Divided by min(p, 1 - p), the cost of the better of "accept all" and "accept nothing", so a
    useless system has 1 (NIST speaker recognition evaluation plans).
    """
    p_miss_K, p_fa_K, _ = operating_points(scores, is_target)
    return min_dcf_of_points(p_miss_K, p_fa_K, p_target=p_target)


def min_dcf_of_points(p_miss_K: np.ndarray, p_fa_K: np.ndarray, *, p_target: float) -> float:
    """Return `min_dcf` from operating points."""
    if not 0.0 < p_target < 1.0:
        raise ValueError(f"minDCF: p_target must be between 0 and 1, got {p_target}; use e.g. 0.01")
    cost_K = p_target * p_miss_K + (1.0 - p_target) * p_fa_K
    return float(cost_K.min() / min(p_target, 1.0 - p_target))


def cllr(llr: ArrayLike, is_target: ArrayLike) -> float:
    """Return the cost of log-likelihood ratios (N, natural logarithm) in bits, over all priors.

    0 is perfect, 1 carries no information (Brummer and du Preez, Computer Speech and Language 20,
    2006).
    """
    llr_N, is_target_N = checked(llr, is_target)
    misses, alarms = np.logaddexp(0, -llr_N[is_target_N]), np.logaddexp(0, llr_N[~is_target_N])
    return float((misses.mean() + alarms.mean()) / (2 * np.log(2)))


def act_dcf(llr: ArrayLike, is_target: ArrayLike, p_target: float = 0.01) -> float:
    """Return the detection cost, normalised like `min_dcf`, of log-likelihood ratios.

    The threshold is optimal for well-calibrated ratios: log((1 - p) / p).
    """
    rates = error_rates(llr, is_target, threshold=np.log((1 - p_target) / p_target))
    return min_dcf_of_points(*np.array(rates)[:, None], p_target=p_target)


def error_rates(
    scores: ArrayLike, is_target: ArrayLike, *, threshold: float
) -> tuple[float, float]:
    """Return (share of targets below the threshold, share of non-targets at or above it)."""
    scores_N, is_target_N = checked(scores, is_target)
    accepted_N = scores_N >= threshold
    return float(1 - accepted_N[is_target_N].mean()), float(accepted_N[~is_target_N].mean())


def min_cllr(scores: ArrayLike, is_target: ArrayLike) -> float:
    """Return the least `cllr`, in bits, of rising maps from scores to log-likelihood ratios.

    The map is found by pooling adjacent violators (Brummer and du Preez, Computer Speech and
    Language 20, 2006); equal scores get one ratio. What `cllr` has above it is lost by calibration.
    """
    from scipy.optimize import isotonic_regression  # here: it takes half a second to import

    scores_N, is_target_N = checked(scores, is_target)
    order_N, starts_K = order_of(scores_N)
    before_K = sums_before(is_target_N[order_N].astype(np.int64))[starts_K]
    target_K, count_K = np.diff(before_K), np.diff(starts_K)
    posterior_K = isotonic_regression(target_K / count_K, weights=count_K).x
    num_target, num_nontarget = before_K[-1], len(scores_N) - before_K[-1]
    with np.errstate(divide="ignore"):  # ratios of 0 or infinity cost nothing: they are never wrong
        odds_K = posterior_K / (1 - posterior_K) * (num_nontarget / num_target)
        missed_K = np.where(target_K > 0, np.log1p(1 / odds_K), 0.0)
        alarm_K = np.where(target_K < count_K, np.log1p(odds_K), 0.0)
    misses, alarms = target_K @ missed_K, (count_K - target_K) @ alarm_K
    return float((misses / num_target + alarms / num_nontarget) / (2 * np.log(2)))


def bayes_error(
    llr: ArrayLike, is_target: ArrayLike, log_odds: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Return normalised Bayes error rates (actual_P, minimum_P) at prior log-odds (P).

    llr (N) are natural logarithms; log-odds t are those of a prior p = 1 / (1 + exp(-t)) of a
    target. At each p the rates are `act_dcf` and `min_dcf` (Brummer and de Villiers, "The BOSARIS
    Toolkit: theory, algorithms and code for surviving the new DCF", 2011).
    """
    from scipy.special import expit  # here: slow to import

    p_miss_K, p_fa_K, threshold_K = operating_points(llr, is_target)
    log_odds_P = np.asarray(log_odds, dtype=np.float64)
    decided_P = np.searchsorted(threshold_K, -log_odds_P)  # the first threshold not below -t
    p_P, scale_P = expit(log_odds_P), expit(-np.abs(log_odds_P))
    actual_P = p_P * p_miss_K[decided_P] + (1 - p_P) * p_fa_K[decided_P]
    # only corners can cost least: below them false alarms rise, above them misses do
    is_corner_K = (np.diff(p_fa_K, prepend=np.inf) < 0) & (np.diff(p_miss_K, append=np.inf) > 0)
    miss_C, fa_C = p_miss_K[is_corner_K], p_fa_K[is_corner_K]
    minimum_P = [(p * miss_C + (1 - p) * fa_C).min() for p in p_P]
    return actual_P / scale_P, np.array(minimum_P) / scale_P


def threshold_at(
    scores: ArrayLike, is_target: ArrayLike, *, far: float | None = None, frr: float | None = None
) -> float:
    """Return the threshold of the scores for a requested rate; give one of the two.

    far: the lowest threshold that accepts at most this share of the non-targets (false-alarm or
    false-acceptance rate). frr: the highest that rejects at most this share of the targets (miss or
    false-rejection rate). Infinite if only rejecting all trials is good enough.
    """
    rate, name = (frr, "frr") if far is None else (far, "far")
    if rate is None or not 0.0 <= rate <= 1.0:
        raise ValueError(f"threshold: {name} must be between 0 and 1, got {rate}; use e.g. 0.01")
    p_miss_K, p_fa_K, threshold_K = operating_points(scores, is_target)
    if far is not None:
        return float(threshold_K[int(np.argmax(p_fa_K <= rate + ROUNDING))])
    return float(threshold_K[int(np.searchsorted(p_miss_K, rate + ROUNDING, side="right")) - 1])


def checked(scores: ArrayLike, is_target: ArrayLike) -> tuple[np.ndarray, NDArray[np.bool_]]:
    """Return (scores_N as float64, is_target_N); ValueError if none can be computed."""
    scores_N, is_target_N = np.asarray(scores, dtype=np.float64), np.asarray(is_target)
    if scores_N.ndim != 1 or scores_N.shape != is_target_N.shape:
        raise ValueError(
            f"scores: need one number per trial, got shapes {scores_N.shape} for scores and "
            f"{is_target_N.shape} for is_target; give two arrays of equal length"
        )
    if is_target_N.dtype != np.bool_ and not np.isin(is_target_N, (0, 1)).all():
        raise ValueError(
            f"is_target: must be true or false (or 1 and 0), got other {is_target_N.dtype} values; "
            "make a bool array"
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
            f"scores: {np.count_nonzero(nan_N)} of {len(nan_N)} are NaN, the first at trial "
            f"{int(nan_N.argmax())}; check the embeddings"
        )
    return scores_N, is_target_N


def order_of(scores_N: np.ndarray) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the ascending order, and the start of each group of equal scores (last: N)."""
    order_N = np.argsort(scores_N)
    return order_N, _starts(scores_N[order_N])


def _starts(ascending_N: np.ndarray) -> NDArray[np.intp]:
    """Start of each group of equal values, and last the end."""
    is_new_N = np.append(True, ascending_N[1:] != ascending_N[:-1])
    return np.append(np.flatnonzero(is_new_N), len(ascending_N))


def sums_before(values_N: np.ndarray) -> np.ndarray:
    """Sum of the values before each place, and last the total: (N + 1)."""
    sums = np.zeros(len(values_N) + 1, dtype=values_N.dtype)
    np.cumsum(values_N, out=sums[1:])
    return sums
