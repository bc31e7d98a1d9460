"""Error rates against hand counts and against brute force."""

import time

import numpy as np
import pytest

from speakerlab.scoring import metrics

TIED_SCORES = [0.9, 0.5, 0.5, 0.5, 0.2, 0.1]
TIED_IS_TARGET = [1, 1, 1, 0, 0, 0]


def brute_points(scores, is_target, weights):
    """Rates at each threshold, counted one threshold at a time."""
    points = []
    for threshold in [*sorted(set(scores.tolist())), np.inf]:
        accepted = scores >= threshold
        miss = weights[is_target & ~accepted].sum() / weights[is_target].sum()
        fa = weights[~is_target & accepted].sum() / weights[~is_target].sum()
        points.append((miss, fa))
    return points


def brute_eer(scores, is_target, weights=None):
    points = brute_points(scores, is_target, np.ones(len(scores)) if weights is None else weights)
    for (miss_0, fa_0), (miss_1, fa_1) in zip(points, points[1:]):
        if miss_0 < fa_0 and miss_1 >= fa_1:
            share = (fa_0 - miss_0) / ((fa_0 - miss_0) + (miss_1 - fa_1))
            return miss_0 + share * (miss_1 - miss_0)
    raise AssertionError("no crossing")


def simulated(*, num_speakers, per_speaker, seed, spread=1.3, dim=8):
    """All pairs of noisy copies of random directions: scores, truth, and the two speakers."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=(num_speakers, 1, dim))
    # speakers differ in how far their utterances scatter, so trials of one speaker go together
    scatter = spread * np.exp(0.3 * rng.normal(size=(num_speakers, 1, 1)))
    emb = centre + scatter * rng.normal(size=(num_speakers, per_speaker, dim))
    emb = emb.reshape(-1, dim) / np.linalg.norm(emb.reshape(-1, dim), axis=1, keepdims=True)
    i, j = np.triu_indices(len(emb), 1)
    speaker = np.arange(num_speakers).repeat(per_speaker)
    return (emb @ emb.T)[i, j], speaker[i] == speaker[j], speaker[i], speaker[j]


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


@pytest.mark.parametrize("seed", range(10))
def test_weights_equal_repetition(seed):
    scores, is_target = random_trials(seed)
    weights = np.random.default_rng(seed).integers(0, 4, size=len(scores))
    weights[[np.argmax(is_target), np.argmin(is_target)]] += 1
    weighted = metrics.operating_points(scores, is_target, weights)
    repeated = metrics.operating_points(scores.repeat(weights), is_target.repeat(weights))
    assert metrics.eer_of_points(*weighted[:2]) == pytest.approx(
        metrics.eer_of_points(*repeated[:2]), abs=1e-12
    )
    for p in (0.01, 0.3):
        assert metrics.min_dcf_of_points(*weighted[:2], p_target=p) == pytest.approx(
            metrics.min_dcf_of_points(*repeated[:2], p_target=p)
        )


def test_order_of_trials_does_not_matter():
    scores, is_target, enrol, test = simulated(num_speakers=10, per_speaker=5, seed=0)
    scores = np.round(scores, 2)
    order = np.random.default_rng(1).permutation(len(scores))
    for function in (metrics.eer, metrics.min_dcf):
        assert function(scores[order], is_target[order]) == function(scores, is_target)
    assert metrics.eer_interval(
        scores[order], is_target[order], enrol[order], test[order], num_replicates=50
    ) == metrics.eer_interval(scores, is_target, enrol, test, num_replicates=50)


@pytest.mark.parametrize("seed", range(10))
def test_a_replicate_is_the_eer_with_products_of_draws_as_weights(seed):
    scores, is_target, enrol, test = simulated(num_speakers=12, per_speaker=4, seed=seed)
    scores = np.round(scores, 1 + seed % 2)  # ties within and between the kinds
    draws = np.random.default_rng(seed).integers(12, size=12)
    times = np.bincount(draws, minlength=12)
    expected = brute_eer(scores, is_target, times[enrol] * times[test])
    low, high = metrics.eer_interval(scores, is_target, enrol, test, num_replicates=1, seed=seed)
    assert low == high == pytest.approx(expected, abs=1e-12)


def test_interval_is_reproducible_and_takes_names():
    trials = simulated(num_speakers=20, per_speaker=4, seed=3)
    scores, is_target, enrol, test = trials
    names = np.array([f"speaker{i:02d}" for i in range(20)])
    interval = metrics.eer_interval(*trials)
    assert metrics.eer_interval(scores, is_target, names[enrol], names[test]) == interval
    assert metrics.eer_interval(*trials, seed=1) != interval
    assert interval[0] < metrics.eer(scores, is_target) < interval[1]


def test_interval_is_wider_with_fewer_speakers():
    def width(num_speakers):
        low, high = metrics.eer_interval(
            *simulated(num_speakers=num_speakers, per_speaker=4, seed=5), num_replicates=300
        )
        return high - low

    assert width(10) > 1.5 * width(80)


def test_interval_covers_the_true_eer():
    shape = {"per_speaker": 4}
    true = metrics.eer(*simulated(num_speakers=600, seed=99, **shape)[:2])
    hits = 0
    for seed in range(60):
        low, high = metrics.eer_interval(
            *simulated(num_speakers=20, seed=seed, **shape), num_replicates=200
        )
        hits += low <= true <= high
        assert high - low < 0.3
    assert hits >= 53  # 95 % of 60 is 57; fewer than 53 is no accident


def test_replicates_without_an_eer_are_drawn_again():
    # two speakers: half of the draws hold one speaker only, so no non-target trial
    scores, is_target = [0.9, 0.8, 0.1, 0.2], [1, 1, 0, 0]
    enrol, test = ["a", "b", "a", "b"], ["a", "b", "b", "a"]
    assert metrics.eer_interval(scores, is_target, enrol, test) == (0.0, 0.0)


def test_summary_agrees_with_its_parts():
    trials = simulated(num_speakers=10, per_speaker=4, seed=7)
    scores, is_target = trials[:2]
    assert metrics.summary(*trials) == {
        "eer": metrics.eer(scores, is_target),
        "eer_ci95": list(metrics.eer_interval(*trials)),
        "min_dcf": {
            "0.01": metrics.min_dcf(scores, is_target),
            "0.05": metrics.min_dcf(scores, is_target, p_target=0.05),
        },
        "num_target": 60,  # 10 speakers x 6 pairs of 4
        "num_nontarget": 720,  # 780 pairs of 40 less those
    }


@pytest.mark.parametrize(
    ("scores", "is_target", "line"),
    [
        ([0.1, 0.2], [0, 0], "an error rate needs target trials, got none of 2"),
        ([0.1, 0.2], [1, 1], "an error rate needs non-target trials, got none of 2"),
        ([0.1, np.nan, 0.3], [1, 0, 1], "1 of 3 are not a number, the first at trial 1"),
        ([0.1, 0.2], [1, 0, 1], r"got shapes \(2,\) for scores and \(3,\) for is_target"),
        ([0.1, 0.2], [1, 2], "only true and false"),
    ],
)
def test_bad_trials_are_one_line(scores, is_target, line):
    for function in (metrics.eer, metrics.min_dcf, metrics.operating_points):
        with pytest.raises(ValueError, match=line) as error:
            function(scores, is_target)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("weights", [[1, -1], [1, np.nan], [1, 1, 1], [0, 1]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weight"):
        metrics.operating_points([0.1, 0.2], [1, 0], weights)


def test_a_target_trial_of_two_speakers_is_refused():
    with pytest.raises(ValueError, match="1 target trials join two speakers, got a and b at trial"):
        metrics.eer_interval([0.1, 0.2], [1, 0], ["a", "a"], ["b", "b"])


@pytest.mark.parametrize("p_target", [0.0, 1.0, -0.1])
def test_prior_out_of_range_is_refused(p_target):
    with pytest.raises(ValueError, match="p_target is not between 0 and 1"):
        metrics.min_dcf([0.1, 0.2], [1, 0], p_target=p_target)


def test_half_a_million_trials_take_a_fraction_of_a_second():
    rng = np.random.default_rng(0)
    is_target = rng.random(581_480) < 0.5
    scores = rng.normal(size=581_480) + 4 * is_target
    start = time.process_time()
    assert metrics.eer(scores, is_target) == pytest.approx(0.02275, abs=0.001)  # Phi(-2)
    assert time.process_time() - start < 1.0  # 0.1 s on an idle core
