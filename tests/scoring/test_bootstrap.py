"""Intervals by speaker against repeated trials and simulated truth."""

import numpy as np
import pytest
from scipy.stats import norm

from speakerlab.core import intervals
from speakerlab.scoring import bootstrap, metrics


def simulated(*, num_speakers, per_speaker, seed, spread=1.3, dim=8):
    """All pairs of noisy copies of random directions: scores, truth, and the two speakers."""
    rng = np.random.default_rng(seed)
    centre_shape = (num_speakers, 1, dim)
    centre = rng.normal(size=centre_shape)
    # speakers differ in how far their utterances scatter, so trials of one speaker go together
    deviation = rng.normal(size=(num_speakers, 1, 1))
    scatter = spread * np.exp(0.3 * deviation)
    noise_shape = (num_speakers, per_speaker, dim)
    noise = rng.normal(size=noise_shape)
    emb = centre + scatter * noise
    emb = emb.reshape(-1, dim)
    length = np.linalg.norm(emb, axis=1)
    emb = emb / length[:, None]

    rows, columns = np.triu_indices(len(emb), 1)
    cosine = emb @ emb.T
    speaker = np.arange(num_speakers).repeat(per_speaker)
    enrol = speaker[rows]
    test = speaker[columns]
    scores = cosine[rows, columns]
    return scores, enrol == test, enrol, test


def eer_interval(*trials, **options):
    replicates = bootstrap.bootstrap(*trials, p_targets=(), **options)
    return replicates.interval("eer")


def test_interval_is_reproducible_for_any_numbers_of_speakers_and_any_order_of_trials():
    trials = simulated(num_speakers=20, per_speaker=4, seed=3)
    scores, is_target, enrol, test = trials
    interval = eer_interval(*trials)
    low, high = interval
    assert low < metrics.eer(scores, is_target) < high
    assert eer_interval(*trials, seed=1) != interval

    renumbered = eer_interval(
        scores,
        is_target,
        7 * enrol + 3,
        7 * test + 3,
    )
    assert renumbered == interval

    rng = np.random.default_rng(1)
    order = rng.permutation(len(scores))
    permuted = [side[order] for side in trials]
    assert eer_interval(*permuted) == interval


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_speakers", "per_speaker"),
    [(7, 5), (20, 5), (100, 3)],
)
def test_interval_has_its_nominal_coverage(num_speakers, per_speaker):
    """Scores with effects of the speaker, the pair of speakers, the utterance and the trial."""
    speaker = np.arange(num_speakers).repeat(per_speaker)
    rows, columns = np.triu_indices(len(speaker), 1)
    enrol = speaker[rows]
    test = speaker[columns]
    is_target = enrol == test

    # two Gaussians, 3 apart: the EER follows from the sum of their deviations;
    # 1.18 is the variance of a trial, 1, and of two utterances, 2 x 0.3 ** 2
    target_deviation = np.sqrt(0.8**2 + 1.18)
    other_variance = 2 * 0.4**2 + 0.5**2 + 1.18
    other_deviation = np.sqrt(other_variance)
    sum_of_deviations = target_deviation + other_deviation
    true = norm.cdf(-3 / sum_of_deviations)

    num = 400
    hits = 0
    for seed in range(num):
        rng = np.random.default_rng(seed)
        deviations = [[0.8], [0.4]]
        as_target, as_other = rng.normal(
            scale=deviations,
            size=(2, num_speakers),
        )
        pair = rng.normal(scale=0.5, size=(num_speakers, num_speakers))
        of_pair = as_other + as_other[:, None] + pair
        target_scores = 3 + as_target[enrol]
        other_scores = of_pair[enrol, test]
        scores = np.where(is_target, target_scores, other_scores)
        utterance = rng.normal(scale=0.3, size=len(speaker))
        trial = rng.normal(size=len(rows))
        scores += utterance[rows] + utterance[columns] + trial

        low, high = eer_interval(
            scores,
            is_target,
            enrol,
            test,
            num_replicates=400,
            seed=seed,
        )
        hits += low <= true <= high
    standard_error = np.sqrt(0.95 * 0.05 / num)
    assert abs(hits / num - 0.95) < 2.6 * standard_error


def test_fewer_than_five_speakers_of_a_kind_have_no_interval():
    scores, is_target, enrol, test = simulated(
        num_speakers=6,
        per_speaker=3,
        seed=0,
    )
    # target trials of the first speakers are left out
    for num_speakers in (6, 5, 4):
        first_speaker = 6 - num_speakers
        is_chosen = ~is_target | (enrol >= first_speaker)
        drawn = bootstrap.bootstrap(
            scores[is_chosen],
            is_target[is_chosen],
            enrol[is_chosen],
            test[is_chosen],
        )
        assert drawn.num_speakers == num_speakers

        has_no_interval = num_speakers < 5
        interval = drawn.interval("eer")
        assert (interval is None) == has_no_interval
        paired = drawn.paired(drawn, "eer")
        assert (paired == (None, None)) == has_no_interval


def test_replicates_without_an_eer_are_drawn_again():
    # two speakers: half of the draws hold one speaker only, so no non-target trial
    scores = [0.9, 0.8, 0.1, 0.2]
    is_target = [1, 1, 0, 0]
    enrol = np.array([0, 1, 0, 1])
    test = np.array([0, 1, 1, 0])
    drawn = bootstrap.bootstrap(
        scores,
        is_target,
        enrol,
        test,
        num_replicates=20,
    )
    expected = [0.0] * 20
    assert drawn.values["eer"].tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_every_metric_of_a_replicate_is_that_of_repeated_trials(seed):
    scores, is_target, enrol, test = simulated(
        num_speakers=8,
        per_speaker=3,
        seed=seed,
    )
    num_decimals = 1 + seed % 2
    scores = np.round(scores, num_decimals)
    # the ratios are not in the order of the scores
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=len(scores))
    llr = 6 * scores + noise

    # a trial of one speaker is repeated as often as the speaker is drawn, a trial of two
    # speakers by the product of both numbers
    rng = np.random.default_rng(seed)
    draws = rng.integers(8, size=8)
    times = np.bincount(draws, minlength=8)
    is_same = enrol == test
    test_times = np.where(is_same, 1, times[test])
    trial_times = times[enrol] * test_times
    trials = np.arange(len(scores))
    rows = np.repeat(trials, trial_times)
    again = scores[rows]
    truth = is_target[rows]
    ratios = llr[rows]

    drawn = bootstrap.bootstrap(
        scores,
        is_target,
        enrol,
        test,
        llr=llr,
        p_targets=(0.01, 0.3),
        num_replicates=1,
        seed=seed,
    )
    expected = {
        "eer": metrics.eer(again, truth),
        "min_dcf_0.01": metrics.min_dcf(again, truth),
        "min_dcf_0.3": metrics.min_dcf(again, truth, p_target=0.3),
        "cllr": metrics.cllr(ratios, truth),
        "act_dcf_0.01": metrics.act_dcf(ratios, truth),
        "act_dcf_0.3": metrics.act_dcf(ratios, truth, p_target=0.3),
    }
    assert drawn.values.keys() == expected.keys()
    for name, value in expected.items():
        replicates = drawn.values[name].tolist()
        expected_replicates = [pytest.approx(value, abs=1e-12)]
        assert replicates == expected_replicates, name


def compared(noise):
    """Two systems on the same trials, the first with additional noise."""
    scores, is_target, enrol, test = simulated(
        num_speakers=30,
        per_speaker=5,
        seed=4,
        spread=0.9,
    )
    rng = np.random.default_rng(9)
    additional = rng.normal(size=len(scores))
    worse = scores + noise * additional
    ours = bootstrap.bootstrap(worse, is_target, enrol, test)
    theirs = bootstrap.bootstrap(scores, is_target, enrol, test)
    our_eer = metrics.eer(worse, is_target)
    their_eer = metrics.eer(scores, is_target)
    difference = our_eer - their_eer
    return difference, *ours.paired(theirs, "eer")


def test_a_system_is_no_better_than_itself():
    difference, ci95, p_value = compared(0.0)
    assert difference == 0.0
    assert ci95 == [0.0, 0.0]
    assert p_value == 1.0


def test_a_clear_difference_is_significant_although_the_intervals_meet():
    difference, ci95, p_value = compared(0.25)
    assert difference > 0
    assert ci95[0] > 0
    assert p_value < 0.05

    scores, is_target, enrol, test = simulated(
        num_speakers=30,
        per_speaker=5,
        seed=4,
        spread=0.9,
    )
    low, high = eer_interval(scores, is_target, enrol, test)
    worse_eer = metrics.eer(scores, is_target) + difference
    assert low < worse_eer < high


@pytest.mark.parametrize(("num_speakers", "expected"), [(10**9, 0.8), (5, 0.8319)])
def test_the_p_value_by_hand(num_speakers, expected):
    our_values = np.array([0.2, 0.3, 0.1, 0.4])
    their_values = np.array([0.1, 0.1, 0.2, 0.1])
    ours = bootstrap.Replicates({"eer": our_values}, num_speakers)
    theirs = bootstrap.Replicates({"eer": their_values}, num_speakers)

    # 1 of 4 replicates is on the other side: 2 x (1 + 1) / (4 + 1); with 5 speakers, twice the
    # probability of Student's t below Phi^-1(2 / 5) / sqrt(5 / 4)
    _, p_value = ours.paired(theirs, "eer")
    assert p_value == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("num_speakers", [6, 7, 12, 40])
def test_a_p_value_below_five_per_cent_is_an_interval_without_zero(num_speakers):
    zeros = np.zeros(1000)
    below = bootstrap.Replicates({"eer": zeros}, num_speakers)
    significant = []
    for num_beyond in range(30):
        # num_beyond of the values are below zero
        lowest = 0.5 - num_beyond
        highest = 999.5 - num_beyond
        values = np.linspace(lowest, highest, 1000)
        above = bootstrap.Replicates({"eer": values}, num_speakers)
        interval, p_value = above.paired(below, "eer")
        low = interval[0]
        assert (low > 0) == (p_value <= 0.05)
        significant.append(low > 0)
    assert any(significant)
    assert not all(significant)


def test_the_band_of_a_curve_is_that_of_repeated_trials():
    scores, is_target, enrol, test = simulated(num_speakers=8, per_speaker=3, seed=5)
    p_fa_T = np.array([0.01, 0.1, 0.3])
    band = bootstrap.miss_band(
        scores, is_target, enrol, test, p_fa_T, num_replicates=40, seed=2
    )
    assert band is not None
    low_T, high_T = band

    rng = np.random.default_rng(2)
    rates = []
    while len(rates) < 40:
        count = np.bincount(rng.integers(8, size=8), minlength=8)
        times = np.where(is_target, count[enrol], count[enrol] * count[test])
        repeated = is_target.repeat(times)
        if repeated.all() or not repeated.any():
            continue
        p_miss, p_fa, _ = metrics.operating_points(scores.repeat(times), repeated)
        rates.append(np.interp(p_fa_T, p_fa[::-1], p_miss[::-1]))
    for number, expected in enumerate(np.array(rates).T):
        bounds = intervals.interval(expected, 8)
        assert [low_T[number], high_T[number]] == pytest.approx(bounds)
    assert (low_T < high_T).all()
    # With fewer than five speakers there is none.
    few = simulated(num_speakers=4, per_speaker=3, seed=5)
    assert bootstrap.miss_band(*few, p_fa_T, num_replicates=40) is None
