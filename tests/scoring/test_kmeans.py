"""k-means finds planted speakers, the same for any number of threads; purity and NMI by hand."""

import numpy as np
import pytest
import torch
from scipy.cluster.vq import kmeans2

from speakerlab.scoring.kmeans import agreement, kmeans


def planted(num_speakers, per_speaker, *, noise, dim=32, seed=0):
    """Return unit_ND, float32, around random directions, and speaker_N."""
    rng = np.random.default_rng(seed)
    speaker_N = rng.permutation(np.repeat(np.arange(num_speakers), per_speaker))
    voice_SD = rng.normal(size=(num_speakers, dim))
    voice_SD /= np.linalg.norm(voice_SD, axis=1, keepdims=True)
    emb_ND = voice_SD[speaker_N] + noise * rng.normal(size=(len(speaker_N), dim)) / np.sqrt(dim)
    unit_ND = emb_ND / np.linalg.norm(emb_ND, axis=1, keepdims=True)
    return unit_ND.astype(np.float32), speaker_N


@pytest.mark.parametrize("seed", range(4))
def test_planted_speakers_are_recovered(seed):
    """At most two of 60 share a cluster with another, and none if there are more clusters."""
    unit_ND, speaker_N = planted(60, 40, noise=0.5, seed=seed)
    purity, shared = agreement(kmeans(unit_ND, 60, num_threads=2, seed=seed), speaker_N)
    assert purity >= 58 / 60 and shared > 0.99
    cluster_N = kmeans(unit_ND, 90, num_threads=2, seed=seed)
    assert agreement(cluster_N, speaker_N)[0] == 1.0 and len(set(cluster_N)) == 90


def test_overlapping_speakers_are_clustered_as_well_as_by_full_batches():
    """By the mean cosine with the centres, which k-means maximises."""
    unit_ND, _ = planted(30, 40, noise=1.5)

    def mean_cosine(cluster_N):
        sums = [unit_ND[cluster_N == k].sum(axis=0) for k in range(30)]
        return np.linalg.norm(sums, axis=1).sum() / len(unit_ND)

    ours = mean_cosine(kmeans(unit_ND, 30, num_threads=2))
    lloyd = mean_cosine(kmeans2(unit_ND, 30, minit="++", iter=30, rng=0)[1])
    assert ours > 0.995 * lloyd


def test_threads_do_not_change_a_bit_and_seeds_do(monkeypatch):
    monkeypatch.setattr("speakerlab.scoring.kmeans.VALUES_AT_ONCE", 1600)  # blocks of 40 rows
    unit_ND, _ = planted(20, 50, noise=2.0)
    torch.set_num_threads(2)
    found = [kmeans(unit_ND, 40, num_threads=threads).tolist() for threads in (1, 2, 5)]
    assert found[0] == found[1] == found[2] and torch.get_num_threads() == 2
    assert kmeans(unit_ND, 40, num_threads=1, seed=1).tolist() != found[0]


def test_equal_embeddings_leave_clusters_empty():
    unit_ND = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0)
    cluster_N = kmeans(unit_ND, 5, num_threads=1)
    assert len(set(cluster_N.tolist())) == 3
    assert all(len(set(cluster_N[rows : rows + 4])) == 1 for rows in (0, 4, 8))


def test_purity_and_mutual_information_by_hand():
    """Entropies of the first: ln 2 of the clusters, 1.5 ln 2 of the speakers and of both."""
    assert agreement(np.array([0, 0, 1, 1]), np.array([5, 5, 2, 0])) == (
        0.75,
        pytest.approx(0.8),
    )
    assert agreement(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])) == (0.5, pytest.approx(0.0))
    assert agreement(np.array([3, 3, 0]), np.array([0, 0, 1])) == (1.0, pytest.approx(1.0))
    assert agreement(np.array([0, 0]), np.array([0, 0])) == (1.0, 1.0)
