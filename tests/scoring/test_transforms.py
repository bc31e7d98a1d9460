"""Mean, LDA, whitening and length: equal to their definitions, refused where they have none."""

import numpy as np
from gaussian_speakers import MODEL, draw
from refusals import refuses
from scipy.linalg import eigh

from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.transforms import (
    Development,
    learn_lda,
    learn_mean,
    learn_whitening,
    to_unit_length,
)


def test_the_mean_of_the_development_set_is_subtracted():
    table = EmbeddingTable(["a", "b"], np.array([[1, 2], [3, 6]], dtype=np.float32), MODEL)
    centred = learn_mean(Development(table, ["x", "y"]))(table)
    assert centred.ids == ["a", "b"] and centred.model_sha256 == MODEL
    np.testing.assert_array_equal(centred.emb_ND, [[-1, -2], [1, 2]])


def test_length_by_hand():
    table = EmbeddingTable(["a", "b"], np.array([[3, 4], [0, -2]], dtype=np.float32), MODEL)
    np.testing.assert_allclose(to_unit_length(table).emb_ND, [[0.6, 0.8], [0, -1]], atol=1e-7)


def test_lda_is_the_generalised_eigenvalue_problem():
    """Scatters by a plain loop over speakers of 3 to 9 utterances."""
    development = draw(12, np.arange(12) % 7 + 3, 5)
    emb, speakers = development.table.emb_ND.astype(float), np.array(development.speaker_M)
    within, between = np.zeros((5, 5)), np.zeros((5, 5))
    for speaker in set(speakers):
        own = emb[speakers == speaker]
        apart = own.mean(axis=0) - emb.mean(axis=0)
        within += (own - own.mean(axis=0)).T @ (own - own.mean(axis=0)) / len(emb)
        between += len(own) * np.outer(apart, apart) / len(emb)
    values, vectors = eigh(between, within)
    learned = learn_lda(development, dim=2)
    assert learned.projection_DK.shape == (5, 2)
    for k in range(2):
        expected = vectors[:, -1 - k]
        sign = np.sign(expected @ learned.projection_DK[:, k])
        np.testing.assert_allclose(sign * learned.projection_DK[:, k], expected, atol=1e-9)
    ratio = learned.projection_DK.T @ between @ learned.projection_DK
    np.testing.assert_allclose(ratio, np.diag(values[:-3:-1]), atol=1e-9)


def test_lda_has_no_more_directions_than_speakers_less_one():
    development = draw(4, 10, 6)
    assert learn_lda(development).projection_DK.shape == (6, 3)
    with refuses("lda", "--lda-dim 4", "1 to 3"):
        learn_lda(development, dim=4)


def test_too_few_utterances_are_refused():
    few = draw(5, 2, 6)  # 5 differences within speakers for 6 dimensions
    with refuses("lda", "10 utterances of 5 speakers"):
        learn_lda(few)
    with refuses("whiten", "6 utterances"):
        learn_whitening(Development(few.table.select(few.table.ids[:6]), few.speaker_M[:6]))


def test_whitened_embeddings_have_the_unit_covariance_and_keep_their_axes():
    development = draw(40, 10, 4, mean=2.0)
    learned = learn_whitening(development)
    np.testing.assert_allclose(learned.projection_DK, learned.projection_DK.T, atol=1e-12)
    white_MD = learned(development.table).emb_ND
    np.testing.assert_allclose(np.cov(white_MD.T, ddof=0), np.eye(4), atol=1e-5)
