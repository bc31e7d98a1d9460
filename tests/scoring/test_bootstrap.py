"""Intervals by speaker against repeated trials and simulated truth."""

import numpy as np
import pytest

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
    return bootstrap.interval(bootstrap.bootstrap(*trials, p_targets=(), **options)["eer"])


def test_interval_is_reproducible_for_any_numbers_of_speakers_and_any_order_of_trials():
    trials = simulated(num_speakers=20, per_speaker=4, seed=3)
    scores, is_target, enrol, test = trials
    interval = eer_interval(*trials)
    assert eer_interval(scores, is_target, 7 * enrol + 3, 7 * test + 3) == interval
    assert eer_interval(*trials, seed=1) != interval
    order = np.random.default_rng(1).permutation(len(scores))
    assert eer_interval(*(side[order] for side in trials)) == interval
    assert interval[0] < metrics.eer(scores, is_target) < interval[1]


def test_interval_covers_the_true_eer():
    shape = {"per_speaker": 4}
    true = metrics.eer(*simulated(num_speakers=600, seed=99, **shape)[:2])
    hits = 0
    for seed in range(60):
        low, high = eer_interval(
            *simulated(num_speakers=20, seed=seed, **shape), num_replicates=200
        )
        hits += low <= true <= high
        assert high - low < 0.3
    assert hits >= 53  # 95 % of 60 is 57; fewer than 53 is no accident


def test_replicates_without_an_eer_are_drawn_again():
    # two speakers: half of the draws hold one speaker only, so no non-target trial
    scores, is_target = [0.9, 0.8, 0.1, 0.2], [1, 1, 0, 0]
    enrol, test = np.array([0, 1, 0, 1]), np.array([0, 1, 1, 0])
    assert eer_interval(scores, is_target, enrol, test) == [0.0, 0.0]


@pytest.mark.parametrize("seed", range(5))
def test_every_metric_of_a_replicate_is_that_of_repeated_trials(seed):
    scores, is_target, enrol, test = simulated(num_speakers=8, per_speaker=3, seed=seed)
    scores = np.round(scores, 1 + seed % 2)
    llr = 6 * scores + np.random.default_rng(seed).normal(size=len(scores))  # not in their order
    draws = np.random.default_rng(seed).integers(8, size=8)
    times = np.bincount(draws, minlength=8)
    rows = np.repeat(np.arange(len(scores)), times[enrol] * times[test])
    again, truth, ratios = scores[rows], is_target[rows], llr[rows]
    drawn = bootstrap.bootstrap(
        scores, is_target, enrol, test, llr=llr, p_targets=(0.01, 0.3), num_replicates=1, seed=seed
    )
    assert {name: values.tolist() for name, values in drawn.items()} == {
        "eer": [pytest.approx(metrics.eer(again, truth), abs=1e-12)],
        "min_dcf_0.01": [pytest.approx(metrics.min_dcf(again, truth), abs=1e-12)],
        "min_dcf_0.3": [pytest.approx(metrics.min_dcf(again, truth, p_target=0.3), abs=1e-12)],
        "cllr": [pytest.approx(metrics.cllr(ratios, truth), abs=1e-12)],
        "act_dcf_0.01": [pytest.approx(metrics.act_dcf(ratios, truth), abs=1e-12)],
        "act_dcf_0.3": [pytest.approx(metrics.act_dcf(ratios, truth, p_target=0.3), abs=1e-12)],
    }


@pytest.mark.parametrize("spread", [0.35, 0.6, 1.3])
def test_what_is_skipped_below_changes_nothing(spread, monkeypatch):
    trials = simulated(num_speakers=25, per_speaker=6, seed=1, spread=spread)
    assert metrics.eer(*trials[:2]) < 0.4
    found = []
    for spare in (1e9, 4.0, 0.5):  # nothing skipped, the usual, so much that it is often needed
        monkeypatch.setattr(bootstrap, "SPARE", spare)
        found.append(bootstrap.bootstrap(*trials, num_replicates=60))
    for name, values in found[0].items():
        assert values.tolist() == found[1][name].tolist() == found[2][name].tolist()


def test_less_is_looked_at_where_the_eer_is_low():
    scores, is_target, enrol, test = simulated(num_speakers=25, per_speaker=6, seed=1, spread=0.35)
    pairs = bootstrap.SpeakerPairs.of(enrol, test)
    ranked = bootstrap.RankedTrials.of(scores, is_target, pairs.pair_N, (0.01,))
    assert ranked.nontarget_starts_K[ranked.first] > 0.6 * np.count_nonzero(~is_target)


def compared(noise):
    """Two systems on the same trials, the first with additional noise."""
    scores, is_target, enrol, test = simulated(num_speakers=30, per_speaker=5, seed=4, spread=0.9)
    worse = scores + noise * np.random.default_rng(9).normal(size=len(scores))
    drawn = [bootstrap.bootstrap(s, is_target, enrol, test)["eer"] for s in (worse, scores)]
    difference = metrics.eer(worse, is_target) - metrics.eer(scores, is_target)
    return difference, *bootstrap.paired(*drawn)


def test_a_system_is_no_better_than_itself():
    assert compared(0.0) == (0.0, [0.0, 0.0], 1.0)


def test_a_clear_difference_is_significant_although_the_intervals_meet():
    difference, ci95, p_value = compared(0.3)
    assert difference > 0 and ci95[0] > 0 and p_value < 0.05
    scores, is_target, enrol, test = simulated(num_speakers=30, per_speaker=5, seed=4, spread=0.9)
    low, high = eer_interval(scores, is_target, enrol, test)
    assert low < metrics.eer(scores, is_target) + difference < high


def test_the_p_value_by_hand():
    ours, theirs = np.array([0.2, 0.3, 0.1, 0.4]), np.array([0.1, 0.1, 0.2, 0.1])
    # 1 of 4 replicates is on the other side: 2 x (1 + 1) / (4 + 1)
    assert bootstrap.paired(ours, theirs)[1] == pytest.approx(0.8)
