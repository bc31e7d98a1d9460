"""Logistic regression: the ratios that are true, and cross-validation that does not leak."""

import numpy as np
import pytest
from refusals import refuses
from scipy.optimize import minimize

from speakerlab.scoring import linear
from speakerlab.scoring.linear import cross_validated, fit_linear
from speakerlab.scoring.metrics import cllr

# of the two features of gaussian_features
NAMES = ["a", "b"]


def gaussian_features(num=60_000, seed=0):
    """Two independent features, mean +1 or -1: the log-likelihood ratio is 2 a + 2 b."""
    rng = np.random.default_rng(seed)
    target_N = np.arange(num) % 4 == 0
    mean_N = np.where(target_N, 1.0, -1.0)
    noise_NF = rng.normal(size=(num, 2))
    features_NF = mean_N[:, None] + noise_NF
    return features_NF, target_N


def speakers_trials(num_speakers=60, per_speaker=6, seed=0):
    """Cosine-like scores of all pairs of utterances, with an offset of each speaker's own."""
    rng = np.random.default_rng(seed)
    speakers = np.arange(num_speakers)
    speaker_U = np.repeat(speakers, per_speaker)
    rows, columns = np.triu_indices(len(speaker_U), k=1)
    enrol_N = speaker_U[rows]
    test_N = speaker_U[columns]
    target_N = enrol_N == test_N

    offset_S = 0.02 * rng.normal(size=num_speakers)
    num_trials = len(rows)
    noise_N = 0.13 * rng.normal(size=num_trials)
    mean_N = np.where(target_N, 0.6, 0.1)
    scores_N = mean_N + noise_N
    scores_N = scores_N + offset_S[enrol_N] + offset_S[test_N]
    return scores_N, target_N, enrol_N, test_N


def test_the_weights_are_where_another_optimizer_ends():
    """The loss written out plainly, handed to BFGS without derivatives."""
    features_NF, target_N = gaussian_features(500, seed=1)

    def loss(wb):
        logit_N = features_NF @ wb[:2] + wb[2]
        total = 0.0
        kinds = [(target_N, 1.0), (~target_N, -1.0)]
        for kind, sign in kinds:
            # Platt's smoothed labels: (n + 1) / (n + 2) instead of 1
            num = kind.sum()
            smoothed = (num + 1) / (num + 2)
            signed_n = sign * logit_N[kind]
            loss_right = np.logaddexp(0, -signed_n)
            loss_wrong = np.logaddexp(0, signed_n)
            loss_n = smoothed * loss_right + (1 - smoothed) * loss_wrong
            total += np.mean(loss_n)
        return total / 2

    start = np.zeros(3)
    expected = minimize(loss, start, options={"gtol": 1e-7}).x
    learned = fit_linear(features_NF, target_N, names=NAMES)
    parameters = [*learned.weights_F, learned.bias]
    np.testing.assert_allclose(parameters, expected, atol=1e-4)


def test_scale_and_shift_of_a_feature_do_not_change_the_ratios():
    features_NF, target_N = gaussian_features(2_000)
    scale_F = [1e-3, 500.0]
    shift_F = [7.0, -1e4]
    other_NF = features_NF * scale_F + shift_F
    fitted = fit_linear(features_NF, target_N, names=NAMES)
    other = fit_linear(other_NF, target_N, names=NAMES)
    llr_N = fitted.llr(features_NF)
    other_llr_N = other.llr(other_NF)
    np.testing.assert_allclose(other_llr_N, llr_N, atol=1e-5)


def test_features_that_say_nothing_are_harmless():
    """One that never varies, and one twice."""
    features_NF, target_N = gaussian_features(2_000)
    constant_N = np.full(2_000, 3.3)
    repeated_N = features_NF[:, 0]
    columns = [features_NF, constant_N, repeated_N]
    wide_NF = np.column_stack(columns)

    fitted = fit_linear(features_NF, target_N, names=NAMES)
    wide_names = ["a", "b", "same", "a again"]
    wide = fit_linear(wide_NF, target_N, names=wide_names)
    llr_N = fitted.llr(features_NF)
    wide_llr_N = wide.llr(wide_NF)
    np.testing.assert_allclose(wide_llr_N, llr_N, atol=1e-5)
    assert wide.weights_F[2] == 0.0


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
    subject = "trials" if value.endswith("trials") else "calibration"
    with refuses(subject, value):
        fit_linear(features, is_target, names=["score"])


def test_no_trial_is_scored_by_what_was_learned_from_its_speakers():
    """Spoiling every other trial of a trial's two speakers leaves its ratio as it was, to the bit.

    Spoiling as many trials of others does not.
    """
    scores_N, target_N, enrol_N, test_N = speakers_trials(
        num_speakers=15, per_speaker=3
    )

    def ratios(features_N):
        return cross_validated(
            features_N[:, None],
            target_N,
            enrol_N,
            test_N,
            names=["s"],
        )

    before_N = ratios(scores_N)
    distorted_N = -5 * scores_N + 3
    for trial in range(0, len(scores_N), 97):
        trial_speakers = [enrol_N[trial], test_N[trial]]
        enrol_touched_N = np.isin(enrol_N, trial_speakers)
        test_touched_N = np.isin(test_N, trial_speakers)
        touched_N = enrol_touched_N | test_touched_N
        touched_N[trial] = False
        spoilt_N = np.where(touched_N, distorted_N, scores_N)
        assert ratios(spoilt_N)[trial] == before_N[trial]

        others_N = ~touched_N
        others_N[trial] = False
        spoilt_N = np.where(others_N, distorted_N, scores_N)
        assert ratios(spoilt_N)[trial] != before_N[trial]


def test_many_trials_are_thinned_with_little_harm(monkeypatch):
    scores_N, target_N, enrol_N, test_N = speakers_trials()
    arguments = scores_N[:, None], target_N, enrol_N, test_N
    whole_N = cross_validated(*arguments, names=["score"])
    monkeypatch.setattr(linear, "MAX_OF_A_KIND", 5_000)
    thinned_N = cross_validated(*arguments, names=["score"])
    assert (thinned_N != whole_N).any()
    whole_cllr = cllr(whole_N, target_N)
    thinned_cllr = cllr(thinned_N, target_N)
    assert thinned_cllr == pytest.approx(whole_cllr, rel=0.02)


def test_too_few_speakers_are_refused():
    scores_N, target_N, enrol_N, test_N = speakers_trials(4, 3)
    features_NF = scores_N[:, None]
    with refuses("calibration", "10 speakers", "got 4"):
        cross_validated(
            features_NF,
            target_N,
            enrol_N,
            test_N,
            names=["s"],
        )

    scores_N, target_N, enrol_N, test_N = speakers_trials(24, 3)
    features_NF = np.tile(scores_N[:, None], 5)
    with refuses("calibration", "25 speakers", "got 24"):
        cross_validated(
            features_NF,
            target_N,
            enrol_N,
            test_N,
            names="abcde",
        )

    # all non-target trials are of the first speaker
    few = (test_N == enrol_N) | (enrol_N == 0)
    with refuses("calibration", "5 folds"):
        cross_validated(
            scores_N[few, None],
            target_N[few],
            enrol_N[few],
            test_N[few],
            names=["s"],
        )
