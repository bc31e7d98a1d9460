"""Calibration: right where the answer is known, finite where it would not be, kept as it is."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from refusals import refuses

from speakerlab.core.reading import parse_json
from speakerlab.scoring.calibration import Calibration, fit_calibration
from speakerlab.scoring.metrics import act_dcf, cllr, eer, error_rates


def gaussians(num: int, seed: int, shift: float = 0.3, scale: float = 0.1):
    """Scores shift + scale * x, x of mean +1 for targets and -1 for the rest, deviation 1.

    The log-likelihood ratio of x is 2 x.
    """
    rng = np.random.default_rng(seed)
    target_N = np.arange(num) % 5 == 0
    mean_N = np.where(target_N, 1.0, -1.0)
    x_N = mean_N + rng.standard_normal(num)
    return shift + scale * x_N, target_N


def test_gaussian_scores_get_their_true_likelihood_ratio():
    scores_N, target_N = gaussians(100_000, seed=0)
    learned = fit_calibration(scores_N, target_N, source="s")
    assert learned.slope == pytest.approx(2 / 0.1, rel=0.02)
    # x is 0 at the score 0.3, and 1 at 0.4
    llr = learned.llr([0.3, 0.4])
    assert llr == pytest.approx([0.0, 2.0], abs=0.05)
    assert learned.num_target == 20_000
    assert learned.num_nontarget == 80_000


def test_thresholds_hold_on_other_trials():
    scores_N, target_N = gaussians(100_000, seed=1)
    learned = fit_calibration(
        scores_N,
        target_N,
        source="s",
        false_alarm_rates=[0.03],
    )

    scores_N, target_N = gaussians(100_000, seed=2)
    # the threshold of equal error rates
    threshold = learned.threshold
    p_miss, p_fa = error_rates(scores_N, target_N, threshold=threshold)
    assert p_miss == pytest.approx(p_fa, abs=0.02)
    expected_eer = eer(scores_N, target_N)
    assert p_miss == pytest.approx(expected_eer, abs=0.01)

    rates = "0.1 0.05 0.03 0.02 0.01 0.005 0.001"
    assert list(learned.threshold_at_far) == rates.split()
    for rate in (0.1, 0.03, 0.001):
        threshold = learned.threshold_at(rate)
        _, p_fa = error_rates(scores_N, target_N, threshold=threshold)
        assert p_fa == pytest.approx(rate, rel=0.25)


def test_a_threshold_lets_in_what_it_says_by_hand():
    """Non-targets 0.1 0.2 0.3 0.4; one of four may pass, so the threshold is below 0.4."""
    scores = [0.1, 0.2, 0.3, 0.4, 0.35, 0.9]
    is_target = [0, 0, 0, 0, 1, 1]
    learned = fit_calibration(
        scores,
        is_target,
        source="s",
        false_alarm_rates=[0.25],
    )
    threshold = learned.threshold_at(0.25)
    assert threshold == pytest.approx(0.325)
    p_miss, p_fa = error_rates(scores, is_target, threshold=threshold)
    assert p_miss == 0.0
    assert p_fa == 0.25

    with refuses("calibration", "0.25", "0.1"):
        fit_calibration(
            scores,
            is_target,
            source="s",
            false_alarm_rates=[0.1],
        )
    with refuses("calibration", "0.01", "0.25"):
        learned.threshold_at(0.01)


@pytest.mark.parametrize("rate", [5.0, 1.0, 0.0, -0.01, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate):
    scores_N, target_N = [0.0, 1.0, 2.0, 3.0], [False, False, True, True]
    with refuses("calibration", f"got {rate:g}", "1 % is 0.01"):
        fit_calibration(scores_N, target_N, source="s", false_alarm_rates=[rate])
    learned = fit_calibration(scores_N, target_N, source="s")
    with refuses("calibration", f"got {rate:g}", "1 % is 0.01"):
        learned.threshold_at(rate)


def test_separable_scores_give_finite_ratios():
    scores = [0.1, 0.2, 0.8, 0.9]
    is_target = [0, 0, 1, 1]
    learned = fit_calibration(scores, is_target, source="s")
    assert learned.threshold == pytest.approx(0.5)
    assert learned.eer == 0.0
    llr = learned.llr([0.5])
    assert llr == pytest.approx([0.0], abs=1e-6)
    assert 0 < learned.slope < 10


def test_a_calibration_comes_back_from_json_and_a_damaged_one_does_not():
    scores_N, target_N = gaussians(1000, seed=0)
    learned = fit_calibration(scores_N, target_N, source="s")
    values = asdict(learned)
    text = json.dumps(values)
    assert parse_json(text, Calibration, where="") == learned

    not_a_number = {**values, "slope": math.nan}
    incomplete = {"slope": 1.0}
    unknown_key = {**values, "more": 1}
    for damaged in (not_a_number, incomplete, unknown_key):
        text = json.dumps(damaged)
        with refuses("model/calibration.json"):
            parse_json(text, Calibration, where="model/calibration.json")


def test_cllr_by_hand():
    """Ratios of 0 say nothing: 1 bit. A target at log 3: log2(4 / 3); a non-target: log2(4)."""
    is_target = [1, 0]
    assert cllr([0.0, 0.0], is_target) == pytest.approx(1.0)

    log_3 = math.log(3)
    expected = (math.log2(4 / 3) + 2) / 2
    assert cllr([log_3, log_3], is_target) == pytest.approx(expected)

    # exp(800) is beyond float64
    assert cllr([800.0, -800.0], is_target) == 0.0
    assert cllr([-800.0, 800.0], is_target) == pytest.approx(800 / math.log(2))


def test_act_dcf_by_hand():
    """p 0.01 decides at log 99 = 4.6: one of two targets is missed, one of four others passes."""
    llr = [5.0, 4.0, 5.0, 0.0, 0.0, 0.0]
    is_target = [1, 1, 0, 0, 0, 0]
    expected = (0.01 * 0.5 + 0.99 * 0.25) / 0.01
    assert act_dcf(llr, is_target, 0.01) == pytest.approx(expected)
