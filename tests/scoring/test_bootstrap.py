"""Intervals by speaker against repeated trials and simulated truth."""

import numpy as np
import pytest
from scipy.stats import norm

from speakerlab.scoring import bootstrap, metrics


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


def eer_interval(*trials, **options):
    return bootstrap.bootstrap(*trials, p_targets=(), **options).interval("eer")


def test_interval_is_reproducible_for_any_numbers_of_speakers_and_any_order_of_trials():
    trials = simulated(num_speakers=20, per_speaker=4, seed=3)
    scores, is_target, enrol, test = trials
    interval = eer_interval(*trials)
    assert eer_interval(scores, is_target, 7 * enrol + 3, 7 * test + 3) == interval
    assert eer_interval(*trials, seed=1) != interval
    order = np.random.default_rng(1).permutation(len(scores))
    assert eer_interval(*(side[order] for side in trials)) == interval
    assert interval[0] < metrics.eer(scores, is_target) < interval[1]


@pytest.mark.slow
@pytest.mark.parametrize(("num_speakers", "per_speaker"), [(7, 5), (20, 5), (100, 3)])
def test_interval_has_its_nominal_coverage(num_speakers, per_speaker):
    """Scores with effects of the speaker, the pair of speakers, the utterance and the trial."""
    speaker = np.repeat(np.arange(num_speakers), per_speaker)
    i, j = np.triu_indices(len(speaker), 1)
    is_target = speaker[i] == speaker[j]
    true = norm.cdf(-3 / (np.sqrt(0.8**2 + 1.18) + np.sqrt(2 * 0.4**2 + 0.5**2 + 1.18)))
    num, hits = 400, 0
    for seed in range(num):
        rng = np.random.default_rng(seed)
        as_target, as_other = rng.normal(scale=[[0.8], [0.4]], size=(2, num_speakers))
        pair = rng.normal(scale=0.5, size=(num_speakers, num_speakers))
        of_other = (as_other + as_other[:, None] + pair)[speaker[i], speaker[j]]
        scores = np.where(is_target, 3 + as_target[speaker[i]], of_other)
        utterance = rng.normal(scale=0.3, size=len(speaker))
        scores += utterance[i] + utterance[j] + rng.normal(size=len(i))
        trials = scores, is_target, speaker[i], speaker[j]
        low, high = eer_interval(*trials, num_replicates=400, seed=seed)
        hits += low <= true <= high
    assert abs(hits / num - 0.95) < 2.6 * np.sqrt(0.95 * 0.05 / num)


def test_fewer_than_five_speakers_of_a_kind_have_no_interval():
    scores, is_target, enrol, test = simulated(num_speakers=6, per_speaker=3, seed=0)
    for least, kept in (
        (6, enrol >= 0),
        (5, ~is_target | (enrol > 0)),
        (4, ~is_target | (enrol > 1)),
    ):
        drawn = bootstrap.bootstrap(*(x[kept] for x in (scores, is_target, enrol, test)))
        assert drawn.num_speakers == least
        assert (drawn.interval("eer") is None) == (least < 5)
        assert (drawn.paired(drawn, "eer") == (None, None)) == (least < 5)


def test_replicates_without_an_eer_are_drawn_again():
    # two speakers: half of the draws hold one speaker only, so no non-target trial
    scores, is_target = [0.9, 0.8, 0.1, 0.2], [1, 1, 0, 0]
    enrol, test = np.array([0, 1, 0, 1]), np.array([0, 1, 1, 0])
    drawn = bootstrap.bootstrap(scores, is_target, enrol, test, num_replicates=20)
    assert drawn.values["eer"].tolist() == [0.0] * 20


@pytest.mark.parametrize("seed", range(5))
def test_every_metric_of_a_replicate_is_that_of_repeated_trials(seed):
    scores, is_target, enrol, test = simulated(num_speakers=8, per_speaker=3, seed=seed)
    scores = np.round(scores, 1 + seed % 2)
    llr = 6 * scores + np.random.default_rng(seed).normal(size=len(scores))  # not in their order
    draws = np.random.default_rng(seed).integers(8, size=8)
    times = np.bincount(draws, minlength=8)
    rows = np.repeat(np.arange(len(scores)), times[enrol] * np.where(enrol == test, 1, times[test]))
    again, truth, ratios = scores[rows], is_target[rows], llr[rows]
    drawn = bootstrap.bootstrap(
        scores, is_target, enrol, test, llr=llr, p_targets=(0.01, 0.3), num_replicates=1, seed=seed
    )
    assert {name: values.tolist() for name, values in drawn.values.items()} == {
        "eer": [pytest.approx(metrics.eer(again, truth), abs=1e-12)],
        "min_dcf_0.01": [pytest.approx(metrics.min_dcf(again, truth), abs=1e-12)],
        "min_dcf_0.3": [pytest.approx(metrics.min_dcf(again, truth, p_target=0.3), abs=1e-12)],
        "cllr": [pytest.approx(metrics.cllr(ratios, truth), abs=1e-12)],
        "act_dcf_0.01": [pytest.approx(metrics.act_dcf(ratios, truth), abs=1e-12)],
        "act_dcf_0.3": [pytest.approx(metrics.act_dcf(ratios, truth, p_target=0.3), abs=1e-12)],
    }


def compared(noise):
    """Two systems on the same trials, the first with additional noise."""
    scores, is_target, enrol, test = simulated(num_speakers=30, per_speaker=5, seed=4, spread=0.9)
    worse = scores + noise * np.random.default_rng(9).normal(size=len(scores))
    ours, theirs = (bootstrap.bootstrap(s, is_target, enrol, test) for s in (worse, scores))
    difference = metrics.eer(worse, is_target) - metrics.eer(scores, is_target)
    return difference, *ours.paired(theirs, "eer")


def test_a_system_is_no_better_than_itself():
    assert compared(0.0) == (0.0, [0.0, 0.0], 1.0)


def test_a_clear_difference_is_significant_although_the_intervals_meet():
    difference, ci95, p_value = compared(0.25)
    assert difference > 0 and ci95[0] > 0 and p_value < 0.05
    scores, is_target, enrol, test = simulated(num_speakers=30, per_speaker=5, seed=4, spread=0.9)
    low, high = eer_interval(scores, is_target, enrol, test)
    assert low < metrics.eer(scores, is_target) + difference < high


@pytest.mark.parametrize(("num_speakers", "expected"), [(10**9, 0.8), (5, 0.8319)])
def test_the_p_value_by_hand(num_speakers, expected):
    ours, theirs = (
        bootstrap.Replicates({"eer": np.array(values)}, num_speakers)
        for values in ([0.2, 0.3, 0.1, 0.4], [0.1, 0.1, 0.2, 0.1])
    )
    # 1 of 4 replicates is on the other side: 2 x (1 + 1) / (4 + 1); with 5 speakers, twice the
    # probability of Student's t below Phi^-1(2 / 5) / sqrt(5 / 4)
    assert ours.paired(theirs, "eer")[1] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("num_speakers", [6, 7, 12, 40])
def test_a_p_value_below_five_per_cent_is_an_interval_without_zero(num_speakers):
    below = bootstrap.Replicates({"eer": np.zeros(1000)}, num_speakers)
    significant = []
    for num_beyond in range(30):
        values = np.linspace(-num_beyond + 0.5, 999.5 - num_beyond, 1000)  # as many below zero
        (low, _), p_value = bootstrap.Replicates({"eer": values}, num_speakers).paired(below, "eer")
        assert (low > 0) == (p_value <= 0.05)
        significant.append(low > 0)
    assert any(significant) and not all(significant)
