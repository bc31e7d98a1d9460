"""What decisions by log-likelihood ratios cost at every prior: ratios in, two curves out.

Letters: N trials, K operating points, P priors.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from speakerlab.scoring.metrics import operating_points


def bayes_error(
    llr: ArrayLike, is_target: ArrayLike, log_odds: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Normalised Bayes error rates (actual_P, minimum_P) at prior log-odds (P).

    llr (N) are natural logarithms; log-odds t stand for a prior of p = 1 / (1 + exp(-t)) of a
    target. Actual: the error rate p x miss + (1 - p) x false alarm where a trial is accepted when
    its ratio is at least -t, which is best if the ratios are right. Minimum: that of the best
    threshold. Both are divided by min(p, 1 - p), what the better of "accept all" and "accept
    nothing" costs (Brummer and de Villiers, "The BOSARIS Toolkit: theory, algorithms and code for
    surviving the new DCF", 2011). So at a p they are `metrics.act_dcf` and `metrics.min_dcf`.
    Raises ValueError as these do.
    """
    p_miss_K, p_fa_K, threshold_K = operating_points(llr, is_target)
    log_odds_P = np.asarray(log_odds, dtype=np.float64)
    decided_P = np.searchsorted(threshold_K, -log_odds_P)  # the first threshold not below -t
    p_P, scale_P = expit(log_odds_P), expit(-np.abs(log_odds_P))
    actual_P = p_P * p_miss_K[decided_P] + (1 - p_P) * p_fa_K[decided_P]
    miss_C, fa_C = _corners(p_miss_K, p_fa_K)
    minimum_P = [(p * miss_C + (1 - p) * fa_C).min() for p in p_P]
    return actual_P / scale_P, np.array(minimum_P) / scale_P


def _corners(p_miss_K: np.ndarray, p_fa_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points that can cost least: below them false alarms grow, above them misses do."""
    gained_K = np.diff(p_fa_K, prepend=np.inf) < 0
    loses_K = np.diff(p_miss_K, append=np.inf) > 0
    return p_miss_K[gained_K & loses_K], p_fa_K[gained_K & loses_K]
