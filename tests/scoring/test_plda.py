"""PLDA equals its definition, finds covariances that are known, equals SpeechBrain's scores."""

from pathlib import Path

import numpy as np
import pytest
from gaussian_speakers import covariances, draw
from numpy.typing import ArrayLike
from refusals import refuses
from scipy.stats import multivariate_normal

from speakerlab.scoring.plda import Plda, learn_plda


def model(dim=4, seed=3):
    between, within = covariances(dim, seed)
    mean_D = np.arange(dim, dtype=float)
    plda = Plda.from_covariances(mean_D, between, within)
    return plda, between, within


def ratios(plda, enrol_ED, test_TD, num_enrol_E: ArrayLike = 1):
    """Of every enrolled speaker with every test recording, (E, T)."""
    enrol_EK = plda.enrol_side(enrol_ED, num_enrol_E)
    test_TK = plda.test_side(test_TD)
    return enrol_EK @ test_TK.T


def joint_density(x_nD, mean_D, between_DD, within_DD):
    """log p of n recordings of one speaker: one Gaussian of n D dimensions."""
    num = len(x_nD)
    # all recordings share the speaker; each has its own variation within the speaker
    ones = np.ones((num, num))
    shared = np.kron(ones, between_DD)
    separate = np.kron(np.eye(num), within_DD)
    mean = np.tile(mean_D, num)
    joint = multivariate_normal(mean, shared + separate)
    return joint.logpdf(x_nD.ravel())


def test_the_ratio_is_that_of_joint_gaussian_densities():
    """Enrolled with one recording or more, of which the mean and the number matter."""
    plda, between, within = model()
    rng = np.random.default_rng(1)
    num_recordings = np.array([1, 2, 5])
    recordings = []
    means = []
    for num in num_recordings:
        enrol_nD = rng.normal(size=(num, 4)) * 2
        recordings.append(enrol_nD)
        means.append(enrol_nD.mean(axis=0))
    test = rng.normal(size=(1, 4))
    ratio_ET = ratios(plda, np.stack(means), test, num_recordings)

    def density(x_nD):
        return joint_density(x_nD, plda.mean_D, between, within)

    ratios_E = ratio_ET[:, 0]
    for enrol_nD, ratio in zip(recordings, ratios_E):
        both_nD = np.concatenate([enrol_nD, test])
        together = density(both_nD)
        apart = density(enrol_nD) + density(test)
        expected = together - apart
        assert ratio == pytest.approx(expected, abs=1e-9)


def test_scores_of_speechbrain():
    """The scores that SpeechBrain keeps for its integration test of PLDA.

    Its model (512 dimensions, 100 eigenvoices; tests/integration/PLDA, tests/samples/PLDA) was
    trained by its code. Kept here are the 100 directions that its ratio depends on: the variance
    between speakers in each, and the 3 enrolled and 5 tested x-vectors in float32. A linear map
    puts them back into coordinates where neither covariance is diagonal.
    """
    path = Path(__file__).with_name("speechbrain_plda.npz")
    stored = np.load(path)
    rng = np.random.default_rng(0)
    noise_DD = rng.normal(size=(100, 100))
    map_DD = np.eye(100) + noise_DD / 30
    mean_D = rng.normal(size=100)
    scaled_DD = map_DD * stored["psi"]
    between_DD = scaled_DD @ map_DD.T
    within_DD = map_DD @ map_DD.T
    plda = Plda.from_covariances(mean_D, between_DD, within_DD)
    enrol_ED = stored["enrol"] @ map_DD.T + mean_D
    test_TD = stored["test"] @ map_DD.T + mean_D
    ratio_ET = ratios(plda, enrol_ED, test_TD)
    np.testing.assert_allclose(ratio_ET, stored["scores"], atol=1e-4)

    first_row = [103.0967, -334.0057, -336.5656, -238.0039, -177.6676]
    assert ratio_ET[0] == pytest.approx(first_row)


def test_em_finds_the_covariances_that_the_data_were_drawn_with():
    between, within = covariances(3)
    per_speaker = np.arange(4000) % 5 + 2
    development = draw(4000, per_speaker, 3, mean=2.0)
    learned = learn_plda(development, num_iterations=30)
    np.testing.assert_allclose(learned.mean_D, 2.0, atol=0.1)
    between_error = 0.08 * between.max()
    np.testing.assert_allclose(
        learned.between_DD,
        between,
        atol=between_error,
    )
    within_error = 0.04 * within.max()
    np.testing.assert_allclose(
        learned.within_DD,
        within,
        atol=within_error,
    )


def test_em_never_lowers_the_likelihood_and_ends_where_it_is_flat():
    per_speaker = np.arange(20) % 4 + 1
    development = draw(20, per_speaker, 3)
    emb = development.table.emb_ND.astype(float)
    speakers = np.array(development.speaker_M)

    def likelihood_after(num_iterations):
        plda = learn_plda(development, num_iterations=num_iterations)
        total = 0
        for name in set(speakers):
            total += joint_density(
                emb[speakers == name],
                plda.mean_D,
                plda.between_DD,
                plda.within_DD,
            )
        return total

    iterations = (0, 1, 2, 5, 20, 300)
    likelihoods = [likelihood_after(num) for num in iterations]
    increases = np.diff(likelihoods)
    assert (increases > 0).all()
    assert likelihood_after(301) - likelihoods[-1] < 1e-3


def test_em_does_not_depend_on_the_scale_of_embeddings():
    development = draw(30, 4, 3)
    other = draw(30, 4, 3)
    other.table.emb_ND[:] *= 1000
    first = learn_plda(development)
    two = learn_plda(other)
    np.testing.assert_allclose(two.psi_D, first.psi_D, rtol=1e-4)


def test_adaptation_follows_kaldi_step_by_step():
    """Kaldi's PldaUnsupervisedAdaptor::UpdatePlda, direction by direction."""
    plda, between, within = model()
    rng = np.random.default_rng(5)
    noise_ND = rng.normal(size=(200, 4))
    spread_D = [0.2, 3.0, 1.0, 5.0]
    emb_ND = noise_ND * spread_D + 1.0
    adapted = plda.adapted(emb_ND)

    new_mean_D = emb_ND.mean(axis=0)
    shift_D = new_mean_D - plda.mean_D
    variance = np.cov(emb_ND.T, ddof=0)
    variance = variance + np.outer(shift_D, shift_D)
    # the total covariance becomes I
    total_D = 1 + plda.psi_D
    deviation_D = np.sqrt(total_D)
    to_unit = plda.transform_DD / deviation_D[:, None]
    unit_variance = to_unit @ variance @ to_unit.T
    ratio, axes = np.linalg.eigh(unit_variance)
    back = np.linalg.inv(axes.T @ to_unit)
    for i in range(4):
        if ratio[i] > 1:
            excess = ratio[i] - 1
            column = back[:, i]
            direction = np.outer(column, column)
            within = within + 0.3 * excess * direction
            between = between + 0.7 * excess * direction
    assert (ratio > 1).sum() == 2
    assert (ratio < 1).sum() == 2
    np.testing.assert_allclose(adapted.mean_D, new_mean_D)
    np.testing.assert_allclose(adapted.within_DD, within, atol=1e-9)
    np.testing.assert_allclose(adapted.between_DD, between, atol=1e-9)


def test_too_few_utterances_are_refused():
    with refuses("plda", "10 utterances of 5 speakers"):
        learn_plda(draw(5, 2, 6))
    with refuses("plda", "of 1 speaker"):
        learn_plda(draw(1, 20, 3))
