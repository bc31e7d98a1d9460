"""Bayes error rates against counts by hand and against the two costs they become at a prior."""

import numpy as np
import pytest

from speakerlab.scoring.bayes_error import bayes_error
from speakerlab.scoring.metrics import act_dcf, min_dcf

#                 ---- targets ----  -- non-targets --
LLR = np.array([3.0, 1.0, -0.5, 2.0, -2.0, -1.0, 0.5, -3.0])
IS_TARGET = np.arange(8) < 4


def test_curves_equal_a_count_by_hand():
    # Prior 1/2, threshold 0: of four targets -0.5 is missed, of four non-targets 0.5 is accepted,
    # so the error rate is 1/4, over min(p, 1 - p) = 1/2. The best threshold, just above 0.5 or
    # at -0.5, has one error of four on one side: 1/8 over 1/2.
    actual, minimum = bayes_error(LLR, IS_TARGET, [0.0])
    assert actual.tolist() == [0.5] and minimum.tolist() == [0.25]
    # Prior 1/5, log-odds -log(4), threshold log(4) = 1.39: targets 1.0 and -0.5 are missed, no
    # false alarm: 1/5 x 1/2 over 1/5. The best threshold, 1.0, misses one: 1/4.
    actual, minimum = bayes_error(LLR, IS_TARGET, [-np.log(4)])
    np.testing.assert_allclose([actual[0], minimum[0]], [0.5, 0.25], rtol=1e-12)
    # Prior 4/5, threshold -1.39: no miss; -1.0 and 0.5 are accepted: 1/5 x 2/4 over 1/5. The best
    # threshold, -0.5, accepts 0.5 alone.
    actual, minimum = bayes_error(LLR, IS_TARGET, [np.log(4)])
    np.testing.assert_allclose([actual[0], minimum[0]], [0.5, 0.25], rtol=1e-12)


def test_a_ratio_at_the_threshold_is_accepted():
    actual, _ = bayes_error([0.0, -1.0, 0.0], [True, False, False], [0.0])
    assert actual.tolist() == [0.5]  # the target is accepted and so is one of two non-targets


def test_ratios_that_say_nothing_cost_as_much_as_one_answer_to_all():
    actual, minimum = bayes_error(np.zeros(8), IS_TARGET, [-3.0, 3.0])
    np.testing.assert_allclose([actual, minimum], np.ones((2, 2)))


@pytest.mark.parametrize("prior", [0.01, 0.05, 0.5, 0.9])
def test_at_a_prior_they_are_actual_and_minimum_detection_cost(prior):
    rng = np.random.default_rng(0)
    is_target = np.arange(3000) < 500
    llr = np.round(rng.normal(size=3000) * 2 + 4 * is_target - 2, 1)  # with many ties
    actual, minimum = bayes_error(llr, is_target, [np.log(prior / (1 - prior))])
    assert actual[0] == pytest.approx(act_dcf(llr, is_target, prior), rel=1e-12)
    assert minimum[0] == pytest.approx(min_dcf(llr, is_target, prior), rel=1e-12)
