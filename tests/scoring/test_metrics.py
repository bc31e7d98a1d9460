"""Error rates against hand counts and against brute force."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.scoring import metrics

TIED_SCORES = [0.9, 0.5, 0.5, 0.5, 0.2, 0.1]
TIED_IS_TARGET = [1, 1, 1, 0, 0, 0]


def brute_points(scores, is_target):
    """Rates at each threshold, counted one threshold at a time."""
    for threshold in [*sorted(set(scores.tolist())), np.inf]:
        accepted = scores >= threshold
        yield (~accepted[is_target]).mean(), accepted[~is_target].mean()


def brute_eer(scores, is_target):
    points = list(brute_points(scores, is_target))
    for (miss_0, fa_0), (miss_1, fa_1) in zip(points, points[1:]):
        if miss_0 < fa_0 and miss_1 >= fa_1:
            share = (fa_0 - miss_0) / ((fa_0 - miss_0) + (miss_1 - fa_1))
            return miss_0 + share * (miss_1 - miss_0)
    raise AssertionError("no crossing")


def random_trials(seed, num_trials=60):
    """Scores with many ties, and both kinds of trials."""
    rng = np.random.default_rng(seed)
    is_target = np.arange(num_trials) < rng.integers(1, num_trials)
    scores = np.round(rng.normal(size=num_trials) + is_target, rng.integers(0, 3))
    order = rng.permutation(num_trials)
    return scores[order], is_target[order]


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
            for miss, fa in brute_points(scores, is_target)
        ]
        assert metrics.min_dcf(scores, is_target, p_target=p) == pytest.approx(min(costs))


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
    # paid by 2 of 3 targets and 1 of 3 non-targets, the others are separated
    paid = (2 / 3 * np.log2(1.5) + 1 / 3 * np.log2(3)) / 2
    assert metrics.min_cllr([0, 0, 1, 1, 1, 2], [0, 0, 1, 1, 0, 1]) == pytest.approx(paid)


def test_threshold_at_a_requested_rate():
    scores, is_target = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0, 0, 1, 0, 1, 1]
    assert metrics.threshold_at(scores, is_target, far=1 / 3) == 0.3  # lets in the 0.4 alone
    assert metrics.threshold_at(scores, is_target, far=0.3) == 0.5
    assert metrics.threshold_at(scores, is_target, far=0.0) == 0.5
    assert metrics.threshold_at([0.1, 0.2], [1, 0], far=0.0) == np.inf
    assert metrics.threshold_at(scores, is_target, frr=0.0) == 0.3
    assert metrics.threshold_at(scores, is_target, frr=0.34) == 0.5
    assert metrics.threshold_at(scores, is_target, frr=1.0) == np.inf
    for wrong in ({}, {"far": 1.5}, {"frr": float("nan")}):
        with refuses("threshold"):
            metrics.threshold_at(scores, is_target, **wrong)


def test_a_ratio_at_the_threshold_is_accepted():
    actual, _ = metrics.bayes_error([0.0, -1.0, 0.0], [True, False, False], [0.0])
    assert actual.tolist() == [0.5]  # the target is accepted and so is one of two non-targets


@pytest.mark.parametrize("prior", [0.01, 0.05, 0.5, 0.9])
def test_at_a_prior_they_are_actual_and_minimum_detection_cost(prior):
    rng = np.random.default_rng(0)
    is_target = np.arange(3000) < 500
    llr = np.round(rng.normal(size=3000) * 2 + 4 * is_target - 2, 1)  # with many ties
    actual, minimum = metrics.bayes_error(llr, is_target, [np.log(prior / (1 - prior))])
    assert actual[0] == pytest.approx(metrics.act_dcf(llr, is_target, prior), rel=1e-12)
    assert minimum[0] == pytest.approx(metrics.min_dcf(llr, is_target, prior), rel=1e-12)
