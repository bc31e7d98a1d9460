"""Error rates against hand counts and against brute force."""

import time

import numpy as np
import pytest
from counted import brute_eer, brute_points, simulated
from refusals import refuses

from speakerlab.scoring import bootstrap, metrics

TIED_SCORES = [0.9, 0.5, 0.5, 0.5, 0.2, 0.1]
TIED_IS_TARGET = [1, 1, 1, 0, 0, 0]


def random_trials(seed, num_trials=60):
    """Scores with many ties, and both kinds of trials."""
    rng = np.random.default_rng(seed)
    is_target = np.arange(num_trials) < rng.integers(1, num_trials)
    scores = np.round(rng.normal(size=num_trials) + is_target, rng.integers(0, 3))
    order = rng.permutation(num_trials)
    return scores[order], is_target[order]


def test_ties_are_one_operating_point():
    # between (miss 0, fa 1/3) at 0.5 and (miss 2/3, fa 0) at 0.9: a third of the way, 2/9
    assert metrics.eer(TIED_SCORES, TIED_IS_TARGET) == pytest.approx(2 / 9, abs=1e-12)


def test_operating_points_by_hand():
    p_miss, p_fa, thresholds = metrics.operating_points(TIED_SCORES, TIED_IS_TARGET)
    np.testing.assert_allclose(thresholds, [0.1, 0.2, 0.5, 0.9, np.inf])
    np.testing.assert_allclose(p_miss, [0, 0, 0, 2 / 3, 1])
    np.testing.assert_allclose(p_fa, [1, 2 / 3, 1 / 3, 0, 0], atol=1e-12)


@pytest.mark.parametrize(
    ("scores", "is_target", "expected"),
    [
        ([1.0, 0.9, 0.2, 0.1], [1, 1, 0, 0], 0.0),
        ([0.2, 0.1, 1.0, 0.9], [1, 1, 0, 0], 1.0),
        ([0.5, 0.5, 0.5, 0.5], [1, 1, 0, 0], 0.5),
        ([3.0, 1.0, 2.0, 0.0], [1, 1, 0, 0], 0.5),
        ([4, 3, 2, 0, 5, 1, -1, -2], [1, 1, 1, 1, 0, 0, 0, 0], 0.25),
        ([0.9, 0.95, 0.1], [1, 0, 0], 0.5),  # one target, which one of two alarms beats
    ],
)
def test_eer_by_hand(scores, is_target, expected):
    assert metrics.eer(scores, is_target) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_eer_and_min_dcf_equal_brute_force(seed):
    scores, is_target = random_trials(seed)
    assert metrics.eer(scores, is_target) == pytest.approx(brute_eer(scores, is_target), abs=1e-12)
    for p in (0.01, 0.05, 0.5, 0.9):
        costs = [
            (p * miss + (1 - p) * fa) / min(p, 1 - p)
            for miss, fa in brute_points(scores, is_target, np.ones(len(scores)))
        ]
        assert metrics.min_dcf(scores, is_target, p_target=p) == pytest.approx(min(costs))


def test_min_dcf_by_hand():
    # threshold 0.5 accepts all targets and 1 of 3 non-targets; 0.9 misses 2 of 3 targets
    assert metrics.min_dcf(TIED_SCORES, TIED_IS_TARGET, p_target=0.5) == pytest.approx(1 / 3)
    assert metrics.min_dcf(TIED_SCORES, TIED_IS_TARGET) == pytest.approx(2 / 3)


def test_a_useless_system_has_min_dcf_1():
    assert metrics.min_dcf([0.0] * 5, [1, 0, 0, 1, 0]) == pytest.approx(1.0)


def test_order_of_trials_does_not_matter():
    scores, is_target, enrol, test = simulated(num_speakers=10, per_speaker=5, seed=0)
    scores = np.round(scores, 2)
    order = np.random.default_rng(1).permutation(len(scores))
    for function in (metrics.eer, metrics.min_dcf):
        assert function(scores[order], is_target[order]) == function(scores, is_target)
    drawn, again = (
        bootstrap.bootstrap(*(side[rows] for side in (scores, is_target, enrol, test)))["eer"]
        for rows in (order, slice(None))
    )
    assert drawn.tolist() == again.tolist()


@pytest.mark.parametrize(
    ("scores", "is_target", "subject", "value"),
    [
        ([0.1, 0.2], [0, 0], "trials", "2"),
        ([0.1, 0.2], [1, 1], "trials", "2"),
        ([0.1, np.nan, 0.3], [1, 0, 1], "scores", "trial 1"),
        ([0.1, 0.2], [1, 0, 1], "scores", "(3,)"),
        ([0.1, 0.2], [1, 2], "is_target", "int64"),
    ],
)
def test_bad_trials_are_one_line(scores, is_target, subject, value):
    for function in (metrics.eer, metrics.min_dcf, metrics.operating_points):
        with refuses(subject, value) as error:
            function(scores, is_target)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("p_target", [0.0, 1.0, -0.1])
def test_prior_out_of_range_is_refused(p_target):
    with refuses("minDCF", p_target):
        metrics.min_dcf([0.1, 0.2], [1, 0], p_target=p_target)


def test_half_a_million_trials_take_a_fraction_of_a_second():
    rng = np.random.default_rng(0)
    is_target = rng.random(581_480) < 0.5
    scores = rng.normal(size=581_480) + 4 * is_target
    start = time.process_time()
    assert metrics.eer(scores, is_target) == pytest.approx(0.02275, abs=0.001)  # Phi(-2)
    assert time.process_time() - start < 1.0  # 0.1 s on an idle core


def all_rising_maps(is_target):
    """Cllr of the best map, found by trying every way to cut the sorted trials into groups."""
    num_target = sum(is_target)
    prior_odds = num_target / (len(is_target) - num_target)
    best = np.inf
    for cuts in range(2 ** (len(is_target) - 1)):
        bounds = [i + 1 for i in range(len(is_target) - 1) if cuts >> i & 1]
        groups = np.split(np.array(is_target), bounds)
        with np.errstate(divide="ignore"):
            ratios = [np.log(g.sum() / (len(g) - g.sum()) / prior_odds) for g in groups]
        if all(a <= b for a, b in zip(ratios, ratios[1:])):
            llr = np.repeat(ratios, [len(g) for g in groups])
            best = min(best, metrics.cllr(llr, is_target))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_min_cllr_equals_brute_force(seed):
    is_target = np.random.default_rng(seed).permutation([1] * (3 + seed % 3) + [0] * 5)
    found = metrics.min_cllr(np.arange(len(is_target)), is_target)
    assert found == pytest.approx(all_rising_maps(is_target), abs=1e-12)


def test_min_cllr_by_hand():
    assert metrics.min_cllr([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1]) == 0.0
    assert metrics.min_cllr([0.9, 0.8, 0.2, 0.1], [0, 0, 1, 1]) == pytest.approx(1.0)
    # equal scores have one ratio, here 2 to 1: (log2(1 + 1/2) + log2(1 + 2)) / 2 of both kinds is
    # paid by 2 of 3 targets and 1 of 3 non-targets, the others are told apart
    paid = (2 / 3 * np.log2(1.5) + 1 / 3 * np.log2(3)) / 2
    assert metrics.min_cllr([0, 0, 1, 1, 1, 2], [0, 0, 1, 1, 0, 1]) == pytest.approx(paid)


def test_min_cllr_is_at_most_cllr_and_blind_to_rising_maps():
    scores, is_target, _, _ = simulated(num_speakers=12, per_speaker=5, seed=2)
    least = metrics.min_cllr(scores, is_target)
    assert least <= min(metrics.cllr(slope * scores, is_target) for slope in (1, 2, 4, 8))
    assert metrics.min_cllr(np.exp(3 * scores), is_target) == pytest.approx(least, abs=1e-12)


def test_threshold_at_a_wished_rate():
    scores, is_target = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0, 0, 1, 0, 1, 1]
    assert metrics.threshold_at(scores, is_target, far=1 / 3) == 0.3  # lets in the 0.4 alone
    assert metrics.threshold_at(scores, is_target, far=0.3) == 0.5
    assert metrics.threshold_at(scores, is_target, far=0.0) == 0.5
    assert metrics.threshold_at([0.1, 0.2], [1, 0], far=0.0) == np.inf
    assert metrics.threshold_at(scores, is_target, frr=0.0) == 0.3
    assert metrics.threshold_at(scores, is_target, frr=0.34) == 0.5
    assert metrics.threshold_at(scores, is_target, frr=1.0) == np.inf
    for wrong in ({}, {"far": 0.1, "frr": 0.1}, {"far": 1.5}, {"frr": float("nan")}):
        with refuses("threshold"):
            metrics.threshold_at(scores, is_target, **wrong)


#                 ---- targets ----  -- non-targets --
LLR = np.array([3.0, 1.0, -0.5, 2.0, -2.0, -1.0, 0.5, -3.0])
IS_TARGET = np.arange(8) < 4


def test_curves_equal_a_count_by_hand():
    # Prior 1/2, threshold 0: of four targets -0.5 is missed, of four non-targets 0.5 is accepted,
    # so the error rate is 1/4, over min(p, 1 - p) = 1/2. The best threshold, just above 0.5 or
    # at -0.5, has one error of four on one side: 1/8 over 1/2.
    actual, minimum = metrics.bayes_error(LLR, IS_TARGET, [0.0])
    assert actual.tolist() == [0.5] and minimum.tolist() == [0.25]
    # Prior 1/5, log-odds -log(4), threshold log(4) = 1.39: targets 1.0 and -0.5 are missed, no
    # false alarm: 1/5 x 1/2 over 1/5. The best threshold, 1.0, misses one: 1/4.
    actual, minimum = metrics.bayes_error(LLR, IS_TARGET, [-np.log(4)])
    np.testing.assert_allclose([actual[0], minimum[0]], [0.5, 0.25], rtol=1e-12)
    # Prior 4/5, threshold -1.39: no miss; -1.0 and 0.5 are accepted: 1/5 x 2/4 over 1/5. The best
    # threshold, -0.5, accepts 0.5 alone.
    actual, minimum = metrics.bayes_error(LLR, IS_TARGET, [np.log(4)])
    np.testing.assert_allclose([actual[0], minimum[0]], [0.5, 0.25], rtol=1e-12)


def test_a_ratio_at_the_threshold_is_accepted():
    actual, _ = metrics.bayes_error([0.0, -1.0, 0.0], [True, False, False], [0.0])
    assert actual.tolist() == [0.5]  # the target is accepted and so is one of two non-targets


def test_ratios_that_say_nothing_cost_as_much_as_one_answer_to_all():
    actual, minimum = metrics.bayes_error(np.zeros(8), IS_TARGET, [-3.0, 3.0])
    np.testing.assert_allclose([actual, minimum], np.ones((2, 2)))


@pytest.mark.parametrize("prior", [0.01, 0.05, 0.5, 0.9])
def test_at_a_prior_they_are_actual_and_minimum_detection_cost(prior):
    rng = np.random.default_rng(0)
    is_target = np.arange(3000) < 500
    llr = np.round(rng.normal(size=3000) * 2 + 4 * is_target - 2, 1)  # with many ties
    actual, minimum = metrics.bayes_error(llr, is_target, [np.log(prior / (1 - prior))])
    assert actual[0] == pytest.approx(metrics.act_dcf(llr, is_target, prior), rel=1e-12)
    assert minimum[0] == pytest.approx(metrics.min_dcf(llr, is_target, prior), rel=1e-12)
