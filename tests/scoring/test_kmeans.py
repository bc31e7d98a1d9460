"""k-means finds planted speakers, the same for any number of threads; purity and NMI by hand."""

import numpy as np
import pytest
import torch
from scipy.cluster.vq import kmeans2

from speakerlab.scoring.kmeans import agreement, kmeans


def planted(num_speakers, per_speaker, *, noise, dim=32, seed=0):
    """Return unit_ND, float32, around random directions, and speaker_N."""
    rng = np.random.default_rng(seed)
    speakers = np.arange(num_speakers)
    speaker_N = np.repeat(speakers, per_speaker)
    speaker_N = rng.permutation(speaker_N)
    voice_SD = rng.normal(size=(num_speakers, dim))
    length_S = np.linalg.norm(voice_SD, axis=1)
    voice_SD /= length_S[:, None]
    noise_ND = rng.normal(size=(len(speaker_N), dim))
    noise_ND = noise * noise_ND / np.sqrt(dim)
    emb_ND = voice_SD[speaker_N] + noise_ND
    length_N = np.linalg.norm(emb_ND, axis=1)
    unit_ND = emb_ND / length_N[:, None]
    return unit_ND.astype(np.float32), speaker_N


@pytest.mark.parametrize("seed", range(4))
def test_planted_speakers_are_recovered(seed):
    """At most two of 60 share a cluster with another, and none if there are more clusters."""
    unit_ND, speaker_N = planted(60, 40, noise=0.5, seed=seed)
    cluster_N = kmeans(unit_ND, 60, num_threads=2, seed=seed)
    purity, shared = agreement(cluster_N, speaker_N)
    assert purity >= 58 / 60
    assert shared > 0.99
    cluster_N = kmeans(unit_ND, 90, num_threads=2, seed=seed)
    purity, _ = agreement(cluster_N, speaker_N)
    assert purity == 1.0
    assert len(set(cluster_N)) == 90


def test_overlapping_speakers_are_clustered_as_well_as_by_full_batches():
    """By the mean cosine with the centres, which k-means maximises."""
    unit_ND, _ = planted(30, 40, noise=1.5)

    def mean_cosine(cluster_N):
        sums = []
        for k in range(30):
            of_cluster_ND = unit_ND[cluster_N == k]
            sums.append(of_cluster_ND.sum(axis=0))
        lengths = np.linalg.norm(sums, axis=1)
        return lengths.sum() / len(unit_ND)

    ours_N = kmeans(unit_ND, 30, num_threads=2)
    _, lloyd_N = kmeans2(
        unit_ND,
        30,
        minit="++",
        iter=30,
        seed=0,  # rng in SciPy 1.15, which takes both
    )
    assert mean_cosine(ours_N) > 0.995 * mean_cosine(lloyd_N)


def test_threads_do_not_change_a_bit_and_seeds_do(monkeypatch):
    # blocks of 40 rows
    monkeypatch.setattr("speakerlab.scoring.kmeans.VALUES_AT_ONCE", 1600)
    unit_ND, _ = planted(20, 50, noise=2.0)
    # kmeans sets another number for itself and must restore this one
    torch.set_num_threads(2)
    cluster_N = kmeans(unit_ND, 40, num_threads=1)
    labels = cluster_N.tolist()
    for num_threads in (2, 5):
        cluster_N = kmeans(unit_ND, 40, num_threads=num_threads)
        assert cluster_N.tolist() == labels
    assert torch.get_num_threads() == 2

    other_seed = kmeans(unit_ND, 40, num_threads=1, seed=1)
    assert other_seed.tolist() != labels


def test_equal_embeddings_leave_clusters_empty():
    three_ND = np.eye(3, dtype=np.float32)
    unit_ND = np.repeat(three_ND, 4, axis=0)
    cluster_N = kmeans(unit_ND, 5, num_threads=1)
    assert len(set(cluster_N)) == 3
    for equal_N in np.split(cluster_N, 3):
        assert len(set(equal_N)) == 1


def test_purity_and_mutual_information_by_hand():
    """Entropies of the first: ln 2 of the clusters, 1.5 ln 2 of the speakers and of both."""
    two_clusters_N = np.array([0, 0, 1, 1])
    three_speakers_N = np.array([5, 5, 2, 0])
    purity, shared = agreement(two_clusters_N, three_speakers_N)
    assert purity == 0.75
    assert shared == pytest.approx(0.8)

    independent_N = np.array([0, 1, 0, 1])
    purity, shared = agreement(two_clusters_N, independent_N)
    assert purity == 0.5
    assert shared == pytest.approx(0.0)

    # the same partition under other numbers
    cluster_N = np.array([3, 3, 0])
    speaker_N = np.array([0, 0, 1])
    purity, shared = agreement(cluster_N, speaker_N)
    assert purity == 1.0
    assert shared == pytest.approx(1.0)

    one_cluster_N = np.array([0, 0])
    assert agreement(one_cluster_N, one_cluster_N) == (1.0, 1.0)
