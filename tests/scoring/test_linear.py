"""Logistic regression: the ratios that are true, and cross-validation that does not leak."""

import numpy as np
import pytest
from refusals import refuses
from scipy.optimize import minimize

from speakerlab.scoring import linear
from speakerlab.scoring.linear import cross_validated, fit_linear
from speakerlab.scoring.metrics import cllr


def gaussian_features(num=60_000, seed=0):
    """Two independent features, mean +1 or -1: the log-likelihood ratio is 2 a + 2 b."""
    rng = np.random.default_rng(seed)
    target_N = np.arange(num) % 4 == 0
    return np.where(target_N, 1.0, -1.0)[:, None] + rng.normal(size=(num, 2)), target_N


def speakers_trials(num_speakers=60, per_speaker=6, seed=0):
    """Cosine-like scores of all pairs of utterances, with an offset of each speaker's own."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(num_speakers), per_speaker)
    left, right = np.triu_indices(len(who), k=1)
    enrol_N, test_N = who[left], who[right]
    target_N = enrol_N == test_N
    offset_S = 0.02 * rng.normal(size=num_speakers)
    scores_N = np.where(target_N, 0.6, 0.1) + 0.13 * rng.normal(size=len(left))
    return scores_N + offset_S[enrol_N] + offset_S[test_N], target_N, enrol_N, test_N


def test_the_weights_are_where_another_optimizer_ends():
    """The loss written out plainly, handed to BFGS without derivatives."""
    features_NF, target_N = gaussian_features(500, seed=1)

    def loss(wb):
        logit = features_NF @ wb[:2] + wb[2]
        total = 0.0
        for kind, sign in ((target_N, 1.0), (~target_N, -1.0)):
            right = (kind.sum() + 1) / (kind.sum() + 2)
            total += np.mean(
                right * np.logaddexp(0, -sign * logit[kind])
                + (1 - right) * np.logaddexp(0, sign * logit[kind])
            )
        return total / 2

    expected = minimize(loss, np.zeros(3), options={"gtol": 1e-7}).x
    learned = fit_linear(features_NF, target_N, names=["a", "b"])
    np.testing.assert_allclose([*learned.weights_F, learned.bias], expected, atol=1e-4)


def test_scale_and_shift_of_a_feature_do_not_change_the_ratios():
    features_NF, target_N = gaussian_features(2_000)
    other_NF = features_NF * [1e-3, 500.0] + [7.0, -1e4]
    one, two = (fit_linear(f, target_N, names=["a", "b"]) for f in (features_NF, other_NF))
    np.testing.assert_allclose(two.llr(other_NF), one.llr(features_NF), atol=1e-5)


def test_features_that_say_nothing_are_harmless():
    """One that never varies, and one twice."""
    features_NF, target_N = gaussian_features(2_000)
    more_NF = np.column_stack([features_NF, np.full(2_000, 3.3), features_NF[:, 0]])
    one = fit_linear(features_NF, target_N, names=["a", "b"])
    two = fit_linear(more_NF, target_N, names=["a", "b", "same", "a again"])
    np.testing.assert_allclose(two.llr(more_NF), one.llr(features_NF), atol=1e-5)
    assert two.weights_F[2] == 0.0


@pytest.mark.parametrize(
    ("features", "is_target", "value"),
    [
        ([[0.1], [np.nan]], [0, 1], "nan at trial 1"),
        ([[0.1], [np.inf]], [0, 1], "inf at trial 1"),
        ([[0.1], [0.2]], [1, 1], "non-target trials"),
        ([[0.1], [0.2]], [0, 0], "target trials"),
        ([[0.1], [0.1]], [0, 1], "equal, 0.1"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(features, is_target, value):
    with refuses("trials" if value.endswith("trials") else "calibration", value):
        fit_linear(features, is_target, names=["score"])


def test_no_trial_is_scored_by_what_was_learned_from_its_speakers():
    """Spoiling every other trial of a trial's two speakers leaves its ratio as it was, to the bit.

    Spoiling as many trials of others does not.
    """
    scores_N, target_N, enrol_N, test_N = speakers_trials(num_speakers=15, per_speaker=3)

    def ratios(features_N):
        return cross_validated(features_N[:, None], target_N, enrol_N, test_N, names=["s"])

    before_N = ratios(scores_N)
    for trial in range(0, len(scores_N), 97):
        own = [enrol_N[trial], test_N[trial]]
        touched_N = np.isin(enrol_N, own) | np.isin(test_N, own)
        touched_N[trial] = False
        spoilt_N = np.where(touched_N, -5 * scores_N + 3, scores_N)
        assert ratios(spoilt_N)[trial] == before_N[trial]
        others_N = ~touched_N & (np.arange(len(scores_N)) != trial)
        assert ratios(np.where(others_N, -5 * scores_N + 3, scores_N))[trial] != before_N[trial]


def test_many_trials_are_thinned_with_little_harm(monkeypatch):
    scores_N, target_N, enrol_N, test_N = speakers_trials()
    arguments = scores_N[:, None], target_N, enrol_N, test_N
    whole_N = cross_validated(*arguments, names=["score"])
    monkeypatch.setattr(linear, "MAX_OF_A_KIND", 5_000)
    thinned_N = cross_validated(*arguments, names=["score"])
    assert (thinned_N != whole_N).any()
    assert cllr(thinned_N, target_N) == pytest.approx(cllr(whole_N, target_N), rel=0.02)


def test_too_few_speakers_are_refused():
    scores_N, target_N, enrol_N, test_N = speakers_trials(4, 3)
    with refuses("calibration", "10 speakers", "got 4"):
        cross_validated(scores_N[:, None], target_N, enrol_N, test_N, names=["s"])
    scores_N, target_N, enrol_N, test_N = speakers_trials(24, 3)
    with refuses("calibration", "25 speakers", "got 24"):
        cross_validated(np.tile(scores_N[:, None], 5), target_N, enrol_N, test_N, names="abcde")
    with refuses("calibration", "5 folds"):
        few = (test_N == enrol_N) | (enrol_N == 0)
        cross_validated(scores_N[few, None], target_N[few], enrol_N[few], test_N[few], names=["s"])
