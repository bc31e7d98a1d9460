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
    emb_ND = np.array([[1, 2], [3, 6]], dtype=np.float32)
    table = EmbeddingTable(["a", "b"], emb_ND, MODEL)
    development = Development(table, ["x", "y"])
    centred = learn_mean(development)(table)
    assert centred.ids == ["a", "b"]
    assert centred.model_sha256 == MODEL
    np.testing.assert_array_equal(centred.emb_ND, [[-1, -2], [1, 2]])


def test_length_by_hand():
    emb_ND = np.array([[3, 4], [0, -2]], dtype=np.float32)
    table = EmbeddingTable(["a", "b"], emb_ND, MODEL)
    unit_table = to_unit_length(table)
    expected_ND = [[0.6, 0.8], [0, -1]]
    np.testing.assert_allclose(unit_table.emb_ND, expected_ND, atol=1e-7)


def test_lda_is_the_generalised_eigenvalue_problem():
    """Scatters by a plain loop over speakers of 3 to 9 utterances."""
    per_speaker = np.arange(12) % 7 + 3
    development = draw(12, per_speaker, 5)
    emb = development.table.emb_ND.astype(float)
    speakers = np.array(development.speaker_M)
    within = np.zeros((5, 5))
    between = np.zeros((5, 5))
    for speaker in set(speakers):
        of_speaker = emb[speakers == speaker]
        speaker_mean = of_speaker.mean(axis=0)
        centred = of_speaker - speaker_mean
        within += centred.T @ centred / len(emb)
        offset = speaker_mean - emb.mean(axis=0)
        # A speaker has the weight of its utterances.
        scatter = np.outer(offset, offset)
        between += len(of_speaker) * scatter / len(emb)

    values, vectors = eigh(between, within)
    learned = learn_lda(development, dim=2)
    assert learned.projection_DK.shape == (5, 2)
    for k in range(2):
        expected = vectors[:, -1 - k]
        direction = learned.projection_DK[:, k]
        # the sign of an eigenvector is arbitrary
        sign = np.sign(expected @ direction)
        np.testing.assert_allclose(sign * direction, expected, atol=1e-9)

    projection = learned.projection_DK
    ratio = projection.T @ between @ projection
    largest = values[:-3:-1]
    np.testing.assert_allclose(ratio, np.diag(largest), atol=1e-9)


def test_lda_has_no_more_directions_than_speakers_less_one():
    development = draw(4, 10, 6)
    learned = learn_lda(development)
    assert learned.projection_DK.shape == (6, 3)
    with refuses("lda", "--lda-dim 4", "1 to 3"):
        learn_lda(development, dim=4)


def test_too_few_utterances_are_refused():
    # 5 differences within speakers for 6 dimensions
    few = draw(5, 2, 6)
    with refuses("lda", "10 utterances of 5 speakers"):
        learn_lda(few)
    six = few.table.select(few.table.ids[:6])
    with refuses("whiten", "6 utterances"):
        six_of_few = Development(six, few.speaker_M[:6])
        learn_whitening(six_of_few)


def test_whitened_embeddings_have_the_unit_covariance_and_keep_their_axes():
    development = draw(40, 10, 4, mean=2.0)
    learned = learn_whitening(development)
    np.testing.assert_allclose(
        learned.projection_DK, learned.projection_DK.T, atol=1e-12
    )
    white_MD = learned(development.table).emb_ND
    covariance = np.cov(white_MD.T, ddof=0)
    np.testing.assert_allclose(covariance, np.eye(4), atol=1e-5)
