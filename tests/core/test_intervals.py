"""Intervals of bootstrap replicates, by hand."""

import numpy as np
import pytest

from speakerlab.core.intervals import interval, ratio_interval


@pytest.mark.parametrize(("num_groups", "num_beyond"), [(7, 4), (20, 15), (10**6, 24)])
def test_the_interval_by_hand(num_groups, num_beyond):
    # Phi(-sqrt(7/6) x 2.447) = 0.0041, Phi(-sqrt(20/19) x 2.093) = 0.0159, Phi(-1.96) = 0.025
    values_R = np.random.default_rng(0).permutation(np.arange(999.0))
    expected = [num_beyond - 1, 999 - num_beyond]
    assert interval(values_R, num_groups) == expected


def test_an_interval_of_a_ratio_is_that_of_its_groups():
    """Errors of 10 groups are 0 or 1 in 10: a binomial share of the groups, over 10."""
    error_G = np.arange(10) % 2
    low, high = ratio_interval(error_G, np.full(10, 10)) or [0, 0]
    assert (low, high) == pytest.approx((0.01, 0.09), abs=0.001)


def test_groups_without_size_do_not_make_an_interval():
    size_G = np.array([1] * 4 + [0] * 90)
    assert ratio_interval(size_G, size_G) is None
    size_G[4] = 1  # a draw may have no group of any size
    assert ratio_interval(size_G, size_G) == [1.0, 1.0]
