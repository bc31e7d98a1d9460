"""Bounds of confidence intervals: values of bootstrap replicates in, 95 % intervals out.

Letters: R replicates, G groups that are drawn together, such as speakers or recordings.
Bounds are expanded percentiles (Hesterberg, "What teachers should know about the bootstrap", The
American Statistician 69(4), 2015): with n groups, not 2.5 % of the replicates lie beyond a bound
but Phi(-sqrt(n / (n - 1)) t), where t is the 97.5 % quantile of Student's distribution with n - 1
degrees of freedom.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

MIN_GROUPS = 5  # to resample; fewer have no interval
NUM_REPLICATES = 1000


def interval(values_R: NDArray[np.float64], num_groups: int) -> list[float] | None:
    """Return the 95 % interval [low, high]; None for fewer than five groups."""
    if num_groups < MIN_GROUPS:
        return None
    tail = ndtr(expansion(num_groups) * stdtrit(num_groups - 1, 0.025))
    num_beyond = max(int(tail * (len(values_R) + 1)), 1)
    ascending_R = np.sort(values_R)
    return [float(ascending_R[num_beyond - 1]), float(ascending_R[-num_beyond])]


def ratio_interval(sum_G: np.ndarray, size_G: np.ndarray, *, seed: int = 0) -> list[float] | None:
    """Return the 95 % interval of sum_G.sum() / size_G.sum() by bootstrap over the groups.

    A group of size 0 counts in the draws, but not as a group of `interval`; draws whose sizes are
    all 0 are left out.
    """
    rng, num_groups = np.random.default_rng(seed), len(size_G)
    draws = [rng.integers(num_groups, size=num_groups) for _ in range(NUM_REPLICATES)]
    drawn_R = [sum_G[d].sum() / size for d in draws if (size := size_G[d].sum())]
    return interval(np.array(drawn_R), int(np.count_nonzero(size_G)))


def expansion(num_groups: int) -> float:
    """Return the factor by which the percentiles of n groups lie farther out."""
    return float(np.sqrt(num_groups / (num_groups - 1)))
