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
    return Plda.from_covariances(np.arange(dim, dtype=float), between, within), between, within


def ratios(plda, enrol_ED, test_TD, num_enrol_E: ArrayLike = 1):
    """Of every enrolled speaker with every test recording, (E, T)."""
    return plda.enrol_side(enrol_ED, num_enrol_E) @ plda.test_side(test_TD).T


def joint_density(x_nD, mean_D, between_DD, within_DD):
    """log p of n recordings of one speaker: one Gaussian of n D dimensions."""
    num = len(x_nD)
    covariance = np.kron(np.ones((num, num)), between_DD) + np.kron(np.eye(num), within_DD)
    return multivariate_normal(np.tile(mean_D, num), covariance).logpdf(x_nD.ravel())


def test_the_ratio_is_that_of_joint_gaussian_densities():
    """Enrolled with one recording or more, of which the mean and the number matter."""
    plda, *covariance = model()
    rng = np.random.default_rng(1)
    recordings = [rng.normal(size=(num, 4)) * 2 for num in (1, 2, 5)]
    test = rng.normal(size=(1, 4))
    means_ED = np.stack([own.mean(axis=0) for own in recordings])
    found_E = ratios(plda, means_ED, test, np.array([1, 2, 5]))[:, 0]
    for own, found in zip(recordings, found_E):
        together = joint_density(np.concatenate([own, test]), plda.mean_D, *covariance)
        apart = sum(joint_density(x, plda.mean_D, *covariance) for x in (own, test))
        assert found == pytest.approx(together - apart, abs=1e-9)


def test_scores_of_speechbrain():
    """The scores that SpeechBrain keeps for its integration test of PLDA.

    Its model (512 dimensions, 100 eigenvoices; tests/integration/PLDA, tests/samples/PLDA) was
    trained by its code. Kept here are the 100 directions that its ratio depends on: the variance
    between speakers in each, and the 3 enrolled and 5 tested x-vectors in float32. A linear map
    puts them back into coordinates where neither covariance is diagonal.
    """
    kept = np.load(Path(__file__).with_name("speechbrain_plda.npz"))
    rng = np.random.default_rng(0)
    map_DD, mean_D = np.eye(100) + rng.normal(size=(100, 100)) / 30, rng.normal(size=100)
    between_DD, within_DD = (map_DD * kept["psi"]) @ map_DD.T, map_DD @ map_DD.T
    plda = Plda.from_covariances(mean_D, between_DD, within_DD)
    enrol_ED, test_TD = (kept[name] @ map_DD.T + mean_D for name in ("enrol", "test"))
    found_ET = ratios(plda, enrol_ED, test_TD)
    np.testing.assert_allclose(found_ET, kept["scores"], atol=1e-4)
    assert found_ET[0] == pytest.approx([103.0967, -334.0057, -336.5656, -238.0039, -177.6676])


def test_em_finds_the_covariances_that_the_data_were_drawn_with():
    between, within = covariances(3)
    learned = learn_plda(draw(4000, np.arange(4000) % 5 + 2, 3, mean=2.0), num_iterations=30)
    np.testing.assert_allclose(learned.mean_D, 2.0, atol=0.1)
    np.testing.assert_allclose(learned.between_DD, between, atol=0.08 * between.max())
    np.testing.assert_allclose(learned.within_DD, within, atol=0.04 * within.max())


def test_em_never_lowers_the_likelihood_and_ends_where_it_is_flat():
    development = draw(20, np.arange(20) % 4 + 1, 3)
    emb, speakers = development.table.emb_ND.astype(float), np.array(development.speaker_M)

    def likelihood(plda):
        covariance = plda.between_DD, plda.within_DD
        groups = (emb[speakers == name] for name in set(speakers))
        return sum(joint_density(own, plda.mean_D, *covariance) for own in groups)

    found = [likelihood(learn_plda(development, num_iterations=n)) for n in (0, 1, 2, 5, 20, 300)]
    assert (np.diff(found) > 0).all()
    assert likelihood(learn_plda(development, num_iterations=301)) - found[-1] < 1e-3


def test_em_does_not_depend_on_the_scale_of_embeddings():
    development = draw(30, 4, 3)
    other = draw(30, 4, 3)
    other.table.emb_ND[:] *= 1000
    one, two = learn_plda(development), learn_plda(other)
    np.testing.assert_allclose(two.psi_D, one.psi_D, rtol=1e-4)


def test_adaptation_follows_kaldi_step_by_step():
    """Kaldi's PldaUnsupervisedAdaptor::UpdatePlda, direction by direction."""
    plda, between, within = model()
    emb_ND = np.random.default_rng(5).normal(size=(200, 4)) * [0.2, 3.0, 1.0, 5.0] + 1.0
    adapted = plda.adapted(emb_ND)
    shift_D = emb_ND.mean(axis=0) - plda.mean_D
    variance = np.cov(emb_ND.T, ddof=0) + np.outer(shift_D, shift_D)
    to_unit = plda.transform_DD / np.sqrt(1 + plda.psi_D)[:, None]  # total covariance becomes I
    ratio, axes = np.linalg.eigh(to_unit @ variance @ to_unit.T)
    back = np.linalg.inv(axes.T @ to_unit)
    for i in range(4):
        if ratio[i] > 1:
            within = within + 0.3 * (ratio[i] - 1) * np.outer(back[:, i], back[:, i])
            between = between + 0.7 * (ratio[i] - 1) * np.outer(back[:, i], back[:, i])
    assert (ratio > 1).sum() == 2 and (ratio < 1).sum() == 2
    np.testing.assert_allclose(adapted.mean_D, emb_ND.mean(axis=0))
    np.testing.assert_allclose(adapted.within_DD, within, atol=1e-9)
    np.testing.assert_allclose(adapted.between_DD, between, atol=1e-9)


def test_too_few_utterances_are_refused():
    with refuses("plda", "10 utterances of 5 speakers"):
        learn_plda(draw(5, 2, 6))
    with refuses("plda", "of 1 speakers"):
        learn_plda(draw(1, 20, 3))
