"""Intervals by the influence of speakers: bounds, p-values, and how often they hold the truth."""

from itertools import combinations

import choose_claims
import numpy as np
import pytest
from choose_claims import Synthetic
from choose_claims import test_claims as count_claims
from scipy.stats import poisson

from speakerlab.experiments.choosing import TrialPairs
from speakerlab.scoring.eer_intervals import EerEstimate, compare_eers, estimate_eer
from speakerlab.scoring.metrics import eer

SPREADS = {"a": 0.7, "b": 0.75, "c": 1.1}


@pytest.fixture(scope="module")
def population():
    return Synthetic(SPREADS, per_speaker=3, truth_speakers=300)


def corpus_of(population, num_speakers, seed=0):
    return population.draw(np.random.default_rng(seed), num_speakers)


def of_trials(scores, is_target, enrol, test) -> EerEstimate:
    return estimate_eer(
        np.array(scores), np.array(is_target), enrol, test, num_repeats=6
    )


def test_influences_are_changes_without_a_speaker(population):
    corpus = corpus_of(population, 100)
    pairs = corpus.pairs
    scores = corpus.scores("c")
    estimate = corpus.estimates()["c"]
    assert estimate.eer == eer(scores, pairs.is_target_N)
    assert abs(estimate.influence_S.sum()) < 1e-9

    changes = []
    for speaker in range(100):
        is_other = (pairs.enrol_speaker_N != speaker) & (
            pairs.test_speaker_N != speaker
        )
        without = eer(scores[is_other], pairs.is_target_N[is_other])
        changes.append(estimate.eer - without)
    assert np.corrcoef(changes, estimate.influence_S)[0, 1] > 0.9
    ratio = np.std(changes) / np.std(estimate.influence_S)
    assert 0.8 < ratio < 1.25


def test_without_errors_the_upper_bound_falls_with_the_speakers():
    highs = []
    for num_speakers in (5, 20, 80):
        speaker = np.arange(num_speakers).repeat(3)
        pairs = TrialPairs.of_speakers(speaker)
        rng = np.random.default_rng(0)
        scores = pairs.is_target_N + 0.1 * rng.random(len(pairs.is_target_N))
        low, high = pairs.estimate(scores).interval()
        assert low == 0
        highs.append(high)
    assert 0.5 > highs[0] > highs[1] > highs[2] > 0.005


def with_errors(num_errors, num_speakers=20):
    """Estimate of speakers with three utterances each, of whom so many have a missed target."""
    pairs = TrialPairs.of_speakers(np.arange(num_speakers).repeat(3))
    scores = np.random.default_rng(0).random(len(pairs.is_target_N))
    scores[pairs.is_target_N] += 2
    first_target_of_each = np.flatnonzero(pairs.is_target_N)[::3]
    scores[first_target_of_each[:num_errors]] = 0
    return pairs.estimate(scores)


def test_a_lower_bound_may_err_alone_where_samples_without_errors_are_likely():
    _, errorless_high = with_errors(0).interval()
    for num_errors in (1, 2):
        estimate = with_errors(num_errors)
        low, high = estimate.interval()
        equal_low, equal_high = estimate.equal_tails(0.05)
        one_sided_low, _ = estimate.equal_tails(0.10)
        assert equal_low < low == one_sided_low < errorless_high
        assert high == equal_high

    # Samples without errors do not occur with such EERs.
    estimate = with_errors(15)
    assert estimate.interval() == estimate.equal_tails(0.05)
    assert estimate.interval()[0] > errorless_high


def test_low_eers_are_held_as_often_as_promised():
    population = Synthetic({"a": 0.40, "b": 0.47}, truth_speakers=200)
    held, held_by_equal_tails = [], []
    for seed in range(500):
        for name, estimate in corpus_of(population, 6, seed).estimates().items():
            truth = population.truth[name]
            held.append(choose_claims.holds(estimate.interval(), truth))
            limits = estimate.equal_tails(0.05)
            held_by_equal_tails.append(choose_claims.holds(limits, truth))
    assert 0.95 < np.mean(held) < 0.98 < np.mean(held_by_equal_tails)


def test_few_counts_cannot_show_a_difference_between_equal_models():
    # Only counts of 4 : 0, 5 : 0 ... may be called a difference: 3 : 0 has 5.6 % at a mean of 3.
    chance = sum(poisson.pmf(n, 0.5) * 2 * 0.5**n for n in range(4, 7))
    assert choose_claims.most_wrong(0.5) == pytest.approx(chance, rel=0.01)
    assert 0.025 < choose_claims.most_wrong(3) < 0.035


def test_fewer_than_five_speakers_have_no_interval():
    scores = [0.9, 0.8, 0.7, 0.1, 0.2, 0.3]
    is_target = [True, True, True, False, False, False]
    enrol = np.array([0, 1, 2, 0, 0, 1])
    test = np.array([0, 1, 2, 1, 2, 2])
    estimate = of_trials(scores, is_target, enrol, test)
    assert estimate.num_speakers == 3
    assert estimate.interval() is None
    result = compare_eers(estimate, estimate)
    assert (result.difference, result.ci95, result.p_value) == (0.0, None, None)


def test_order_and_numbers_of_speakers_do_not_matter(population):
    corpus = corpus_of(population, 12)
    pairs = corpus.pairs
    scores = corpus.scores("a")
    expected = pairs.estimate(scores)
    order = np.random.default_rng(1).permutation(len(scores))
    other = estimate_eer(
        scores[order],
        pairs.is_target_N[order],
        7 * pairs.enrol_speaker_N[order] + 3,
        7 * pairs.test_speaker_N[order] + 3,
        num_repeats=pairs.num_repeats,
    )
    assert other.interval() == pytest.approx(expected.interval(), abs=1e-9)


def test_p_values_agree_with_intervals(population):
    significant = []
    for seed in range(20):
        found = corpus_of(population, 30, seed).estimates()
        for first, second in combinations(found.values(), 2):
            result = compare_eers(first, second)
            reversed_result = compare_eers(second, first)
            low, high = result.ci95
            assert low <= result.difference <= high
            assert reversed_result.difference == -result.difference
            assert reversed_result.p_value == result.p_value
            excludes_zero = low > 0 or high < 0
            assert excludes_zero == (result.p_value < 0.05)
            significant.append(excludes_zero)
    assert any(significant)
    assert not all(significant)


def test_a_system_is_no_better_than_itself(population):
    estimate = corpus_of(population, 30).estimates()["a"]
    result = compare_eers(estimate, estimate)
    assert result.difference == 0
    assert result.standard_error == 0
    assert result.p_value > 0.99


def test_the_claims_hold_and_narrower_intervals_would_not(population, monkeypatch):
    claims = count_claims(population, 20, num_corpora=60)
    assert np.mean(list(claims.intervals.values())) > 0.88
    assert np.mean(list(claims.differences.values())) > 0.88
    assert np.mean(claims.wrong) <= 0.05
    assert 0 < np.mean(claims.decided) < 1
    assert np.mean(claims.regrets) < np.mean(claims.regrets_of_chance) / 4

    whole = EerEstimate.equal_tails

    def half(self, level):
        low, high = whole(self, level)
        return [(self.eer + low) / 2, (self.eer + high) / 2]

    monkeypatch.setattr(EerEstimate, "equal_tails", half)
    claims = count_claims(population, 20, num_corpora=60)
    assert np.mean(list(claims.intervals.values())) < 0.88
    assert np.mean(list(claims.differences.values())) < 0.88


def test_a_pool_has_the_eer_of_its_trials_and_no_trials_between_copies():
    rng = np.random.default_rng(0)
    emb = {"a": rng.standard_normal((40, 8))}
    speakers = np.arange(10).repeat(4)
    pool = choose_claims.Pool(emb, speakers)
    unit = choose_claims.unit(emb["a"])
    rows, columns = np.triu_indices(40, 1)
    cosine = (unit @ unit.T)[rows, columns]
    assert pool.truth["a"] == eer(cosine, speakers[rows] == speakers[columns])

    # Speaker 3 is drawn twice: 3 x 6 target trials, and 16 trials of both copies with speaker 5.
    pairs = pool.corpus_of(np.array([3, 5, 3])).pairs
    assert pairs.is_target_N.sum() == 18
    assert (~pairs.is_target_N).sum() == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    "spreads",
    [choose_claims.SPREADS, {"a": 0.40, "b": 0.43, "c": 0.47}],
    ids=["EER of 8 to 19 %", "EER of 2 to 3 %"],
)
@pytest.mark.parametrize("num_speakers", [20, 60])
def test_intervals_have_their_nominal_coverage(spreads, num_speakers):
    population = Synthetic(spreads)
    claims = count_claims(population, num_speakers, num_corpora=400)
    assert 0.925 < np.mean(list(claims.intervals.values())) < 0.975
    assert 0.925 < np.mean(list(claims.differences.values())) < 0.975
    assert np.mean(claims.wrong) < 0.05 + 2 * np.sqrt(0.05 * 0.95 / 400)
