"""Error rates against hand counts and against brute force."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.scoring import metrics

TIED_SCORES = [0.9, 0.5, 0.5, 0.5, 0.2, 0.1]
TIED_IS_TARGET = [1, 1, 1, 0, 0, 0]


def brute_points(scores, is_target):
    """Rates at each threshold, counted one threshold at a time."""
    thresholds = np.unique(scores).tolist()
    for threshold in [*thresholds, np.inf]:
        accepted = scores >= threshold
        p_miss = (~accepted[is_target]).mean()
        p_fa = accepted[~is_target].mean()
        yield p_miss, p_fa


def brute_eer(scores, is_target):
    points = list(brute_points(scores, is_target))
    neighbours = zip(points, points[1:])
    for before, after in neighbours:
        miss_0, fa_0 = before
        miss_1, fa_1 = after
        if miss_0 < fa_0 and miss_1 >= fa_1:
            # where the line between the two points crosses P_miss = P_fa
            gap_0 = fa_0 - miss_0
            gap_1 = miss_1 - fa_1
            share = gap_0 / (gap_0 + gap_1)
            return miss_0 + share * (miss_1 - miss_0)
    raise AssertionError("no crossing")


def random_trials(seed, num_trials=60):
    """Scores with many ties, and both kinds of trials."""
    rng = np.random.default_rng(seed)
    num_target = rng.integers(1, num_trials)
    is_target = np.arange(num_trials) < num_target
    scores = rng.normal(size=num_trials) + is_target
    # with few decimals, many scores are equal
    num_decimals = rng.integers(0, 3)
    scores = np.round(scores, num_decimals)
    order = rng.permutation(num_trials)
    return scores[order], is_target[order]


def test_operating_points_by_hand():
    p_miss, p_fa, thresholds = metrics.operating_points(
        TIED_SCORES,
        TIED_IS_TARGET,
    )
    expected_thresholds = [0.1, 0.2, 0.5, 0.9, np.inf]
    np.testing.assert_allclose(thresholds, expected_thresholds)
    expected_miss = [0, 0, 0, 2 / 3, 1]
    np.testing.assert_allclose(p_miss, expected_miss)
    expected_fa = [1, 2 / 3, 1 / 3, 0, 0]
    np.testing.assert_allclose(p_fa, expected_fa, atol=1e-12)


@pytest.mark.parametrize(
    ("scores", "is_target", "expected"),
    [
        ([1.0, 0.9, 0.2, 0.1], [1, 1, 0, 0], 0.0),
        ([0.2, 0.1, 1.0, 0.9], [1, 1, 0, 0], 1.0),
        ([0.5, 0.5, 0.5, 0.5], [1, 1, 0, 0], 0.5),
        ([3.0, 1.0, 2.0, 0.0], [1, 1, 0, 0], 0.5),
        ([4, 3, 2, 0, 5, 1, -1, -2], [1, 1, 1, 1, 0, 0, 0, 0], 0.25),
        # one target, which one of two alarms beats
        ([0.9, 0.95, 0.1], [1, 0, 0], 0.5),
    ],
)
def test_eer_by_hand(scores, is_target, expected):
    eer = metrics.eer(scores, is_target)
    assert eer == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_eer_and_min_dcf_equal_brute_force(seed):
    scores, is_target = random_trials(seed)
    eer = metrics.eer(scores, is_target)
    expected = brute_eer(scores, is_target)
    assert eer == pytest.approx(expected, abs=1e-12)

    for p_target in (0.01, 0.05, 0.5, 0.9):
        p_nontarget = 1 - p_target
        costs = []
        for miss, fa in brute_points(scores, is_target):
            cost = p_target * miss + p_nontarget * fa
            # the cost of a system that accepts all trials or none
            default_cost = min(p_target, p_nontarget)
            costs.append(cost / default_cost)
        min_dcf = metrics.min_dcf(scores, is_target, p_target=p_target)
        assert min_dcf == pytest.approx(min(costs))


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
    functions = (
        metrics.eer,
        metrics.min_dcf,
        metrics.operating_points,
    )
    for function in functions:
        with refuses(subject, value) as error:
            function(scores, is_target)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("p_target", [0.0, 1.0, -0.1])
def test_prior_out_of_range_is_refused(p_target):
    with refuses("minDCF", p_target):
        metrics.min_dcf(TIED_SCORES, TIED_IS_TARGET, p_target=p_target)


def all_rising_maps(is_target):
    """Cllr of the best map, found by trying every way to cut the sorted trials into groups."""
    num_trials = len(is_target)
    num_target = sum(is_target)
    prior_odds = num_target / (num_trials - num_target)
    best = np.inf
    # a bit of `cuts` for each place between two trials
    num_places = num_trials - 1
    for cuts in range(2**num_places):
        bounds = [i + 1 for i in range(num_places) if cuts >> i & 1]
        groups = np.split(np.array(is_target), bounds)
        ratios = []
        for group in groups:
            num_group_target = group.sum()
            with np.errstate(divide="ignore"):
                odds = num_group_target / (len(group) - num_group_target)
                ratios.append(np.log(odds / prior_odds))
        neighbours = zip(ratios, ratios[1:])
        is_rising = all(a <= b for a, b in neighbours)
        if is_rising:
            sizes = [len(group) for group in groups]
            llr = np.repeat(ratios, sizes)
            cost = metrics.cllr(llr, is_target)
            best = min(best, cost)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_min_cllr_equals_brute_force(seed):
    targets = [1] * (3 + seed % 3)
    nontargets = [0] * 5
    rng = np.random.default_rng(seed)
    is_target = rng.permutation(targets + nontargets)
    scores = np.arange(len(is_target))
    cost = metrics.min_cllr(scores, is_target)
    expected = all_rising_maps(is_target)
    assert cost == pytest.approx(expected, abs=1e-12)


def test_min_cllr_by_hand():
    is_target = [0, 0, 1, 1]
    separated = [0.1, 0.2, 0.8, 0.9]
    assert metrics.min_cllr(separated, is_target) == 0.0
    reversed_scores = [0.9, 0.8, 0.2, 0.1]
    cost = metrics.min_cllr(reversed_scores, is_target)
    assert cost == pytest.approx(1.0)

    # equal scores have one ratio, here 2 to 1: (log2(1 + 1/2) + log2(1 + 2)) / 2 of both kinds is
    # paid by 2 of 3 targets and 1 of 3 non-targets, the others are separated
    target_cost = 2 / 3 * np.log2(1.5)
    nontarget_cost = 1 / 3 * np.log2(3)
    expected = (target_cost + nontarget_cost) / 2
    scores = [0, 0, 1, 1, 1, 2]
    is_target = [0, 0, 1, 1, 0, 1]
    cost = metrics.min_cllr(scores, is_target)
    assert cost == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        # one of three non-targets may pass: 0.4
        ({"far": 1 / 3}, 0.3),
        ({"far": 0.3}, 0.5),
        ({"far": 0.0}, 0.5),
        ({"frr": 0.0}, 0.3),
        ({"frr": 0.34}, 0.5),
        ({"frr": 1.0}, np.inf),
    ],
)
def test_threshold_at_a_requested_rate(rate, expected):
    scores = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    is_target = [0, 0, 1, 0, 1, 1]
    threshold = metrics.threshold_at(scores, is_target, **rate)
    assert threshold == expected


def test_no_threshold_rejects_a_highest_score_of_a_non_target():
    scores = [0.1, 0.2]
    is_target = [1, 0]
    threshold = metrics.threshold_at(scores, is_target, far=0.0)
    assert threshold == np.inf


@pytest.mark.parametrize("rate", [{}, {"far": 1.5}, {"frr": float("nan")}])
def test_a_rate_out_of_range_is_refused(rate):
    with refuses("threshold"):
        metrics.threshold_at(TIED_SCORES, TIED_IS_TARGET, **rate)


def test_a_ratio_at_the_threshold_is_accepted():
    llr = [0.0, -1.0, 0.0]
    is_target = [True, False, False]
    actual, _ = metrics.bayes_error(llr, is_target, [0.0])
    # the target is accepted and so is one of two non-targets
    assert actual.tolist() == [0.5]


@pytest.mark.parametrize("prior", [0.01, 0.05, 0.5, 0.9])
def test_at_a_prior_they_are_actual_and_minimum_detection_cost(prior):
    rng = np.random.default_rng(0)
    is_target = np.arange(3000) < 500
    llr = rng.normal(size=3000) * 2
    llr += 4 * is_target - 2
    # many ties
    llr = np.round(llr, 1)
    log_odds = np.log(prior / (1 - prior))
    actual, minimum = metrics.bayes_error(llr, is_target, [log_odds])

    act_dcf = metrics.act_dcf(llr, is_target, prior)
    assert actual[0] == pytest.approx(act_dcf, rel=1e-12)
    min_dcf = metrics.min_dcf(llr, is_target, prior)
    assert minimum[0] == pytest.approx(min_dcf, rel=1e-12)
