"""Bounds of confidence intervals: values of bootstrap replicates in, 95 % intervals out.

Letters: R replicates, G groups that are drawn together, such as speakers or recordings.
Bounds are expanded percentiles (Hesterberg, "What teachers should know about the bootstrap", The
American Statistician 69(4), 2015): with n groups, the share of the replicates beyond a bound is
not 2.5 % but Phi(-sqrt(n / (n - 1)) t), where t is the 97.5 % quantile of Student's distribution
with n - 1 degrees of freedom.
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
    # The share of the replicates beyond each bound: Phi(-sqrt(n / (n - 1)) t).
    minus_t = stdtrit(num_groups - 1, 0.025)
    tail = ndtr(expansion(num_groups) * minus_t)
    num_replicates = len(values_R)
    num_beyond = int(tail * (num_replicates + 1))
    num_beyond = max(num_beyond, 1)  # few replicates: the bound is the outermost one

    ascending_R = np.sort(values_R)
    low = float(ascending_R[num_beyond - 1])
    high = float(ascending_R[-num_beyond])
    return [low, high]


def ratio_interval(
    sum_G: np.ndarray, size_G: np.ndarray, *, seed: int = 0
) -> list[float] | None:
    """Return the 95 % interval of sum_G.sum() / size_G.sum() by bootstrap over the groups.

    Groups of size 0 are drawn, too, but do not count among the groups of `interval`. Draws whose
    sizes are all 0 are left out.
    """
    rng = np.random.default_rng(seed)
    num_groups = len(size_G)
    ratios: list[float] = []
    for _ in range(NUM_REPLICATES):
        # Draw as many groups as there are, with replacement.
        drawn_groups = rng.integers(num_groups, size=num_groups)
        size = size_G[drawn_groups].sum()
        if size:
            drawn_sum = sum_G[drawn_groups].sum()
            ratios.append(drawn_sum / size)
    num_nonempty = int(np.count_nonzero(size_G))
    return interval(np.array(ratios), num_nonempty)


def expansion(num_groups: int) -> float:
    """Return the factor by which n groups expand the quantile of an interval."""
    return float(np.sqrt(num_groups / (num_groups - 1)))
