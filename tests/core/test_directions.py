"""What embeddings have in common, and directions without it."""

import numpy as np
import torch

from speakerlab.core.directions import common_directions, direction_without


def embeddings_of_two_corpora(distance: float) -> np.ndarray:
    """Return emb_ND around two means, which are so far apart along axis 1."""
    generator = np.random.default_rng(0)
    emb_ND = generator.standard_normal((400, 6))
    emb_ND[:, 0] += 3.0
    emb_ND[::2, 1] += distance
    emb_ND[1::2, 1] -= distance
    return emb_ND


def test_mean_and_corpora_are_common():
    common_KD = common_directions(embeddings_of_two_corpora(distance=2.0))
    np.testing.assert_allclose(common_KD @ common_KD.T, np.eye(2), atol=1e-6)
    assert abs(common_KD[0, 0]) > 0.95
    assert abs(common_KD[1, 1]) > 0.95


def test_the_axes_of_one_corpus_are_not_common():
    """They tell its speakers apart."""
    common_KD = common_directions(embeddings_of_two_corpora(distance=0.0))
    assert abs(common_KD[0, 0]) > 0.95
    np.testing.assert_array_equal(common_KD[1], 0)


def test_one_embedding_has_only_a_mean():
    common_KD = common_directions(np.array([[3.0, 4.0, 0.0]]))
    np.testing.assert_allclose(common_KD, [[0.6, 0.8, 0.0], [0.0, 0.0, 0.0]], atol=1e-7)


def test_a_direction_has_nothing_of_what_is_common():
    emb_ND = embeddings_of_two_corpora(distance=2.0)
    common_KD = torch.from_numpy(common_directions(emb_ND)).double()
    direction_ND = direction_without(torch.from_numpy(emb_ND), common_KD)
    torch.testing.assert_close(
        direction_ND @ common_KD.T,
        torch.zeros(400, 2, dtype=torch.float64),
        atol=1e-6,
        rtol=0,
    )
    torch.testing.assert_close(
        direction_ND.norm(dim=1), torch.ones(400, dtype=torch.float64)
    )
