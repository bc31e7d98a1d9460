"""Clusters of very many embeddings by k-means, and their agreement with known speakers.

Mini-batch k-means (Sculley, "Web-scale k-means clustering", WWW 2010) with the cosine: a centre is
the direction of the sum of its embeddings (Dhillon and Modha, "Concept decompositions for large
sparse text data using clustering", Machine Learning 42, 2001).
Letters: N embeddings, K clusters, D dimensions, B rows of a batch, M of the sample, T tried.
"""

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

PER_CLUSTER = 10  # rows of a batch, and of the sample that the first centres are drawn from
MAX_EPOCHS = 20
SETTLED = 0.001  # share of the rows that change their cluster in the last epoch
VALUES_AT_ONCE = 8_000_000  # cosines of a thread (32 MB)


def kmeans(
    unit_ND: NDArray[np.float32], num_clusters: int, *, num_threads: int, seed: int = 0
) -> NDArray[np.int64]:
    """Return cluster_N, of 0 to `num_clusters` - 1, of embeddings of length 1; some may be empty.

    The result depends on the seed, but not on the number of threads: each computes whole blocks of
    rows. Beside the embeddings this needs 32 MB a thread, and a batch.
    """
    assert 1 <= num_clusters <= len(unit_ND), (num_clusters, len(unit_ND))
    num, cluster_N = len(unit_ND), np.full(len(unit_ND), -1)
    num_sampled = min(num, PER_CLUSTER * num_clusters)
    rng = np.random.default_rng([seed, 0])
    sample_M = np.sort(rng.choice(num, num_sampled, replace=False))
    with one_thread_each(), ThreadPoolExecutor(num_threads) as pool:
        centre_KD = first_centres(unit_ND[sample_M], num_clusters, rng)
        for epoch in range(1, MAX_EPOCHS + 1):
            sum_KD, num_changed = centre_KD.astype(np.float64), 0
            order_N = np.random.default_rng([seed, epoch]).permutation(num)
            for rows_B in np.array_split(order_N, -(-num // num_sampled)):
                found_B = nearest(unit_ND, rows_B, centre_KD, pool)
                num_changed += np.count_nonzero(found_B != cluster_N[rows_B])
                cluster_N[rows_B] = found_B
                sum_KD += sums(unit_ND[rows_B], found_B, num_clusters)
                length_K1 = np.linalg.norm(sum_KD, axis=1, keepdims=True)
                centre_KD = (sum_KD / np.maximum(length_K1, 1e-12)).astype(np.float32)
            if num_changed <= SETTLED * num:
                break
        return nearest(unit_ND, np.arange(num), centre_KD, pool)


def first_centres(
    unit_MD: NDArray[np.float32], num_clusters: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Draw rows that are far from each other: the greedy k-means++ of Arthur and Vassilvitskii.

    "k-means++: the advantages of careful seeding" (SODA 2007): of several rows, drawn in proportion
    to the squared distance from the nearest centre, the one that leaves the least of it is taken.
    """
    num_tried = 2 + int(np.log(num_clusters))
    chosen = rng.integers(len(unit_MD), size=1).tolist()
    left_M = squared_distances(unit_MD, chosen)[0]
    while len(chosen) < num_clusters:
        total_M = np.cumsum(left_M, dtype=np.float64)
        tried_T = np.searchsorted(total_M[:-1], rng.random(num_tried) * total_M[-1])
        left_TM = np.minimum(squared_distances(unit_MD, tried_T), left_M)
        best = int(left_TM.sum(axis=1, dtype=np.float64).argmin())
        chosen.append(int(tried_T[best]))
        left_M = left_TM[best]
    return unit_MD[chosen]


def squared_distances(unit_MD: np.ndarray, rows_T: np.ndarray | list[int]) -> NDArray[np.float32]:
    """Return those of some rows and all rows, (T, M)."""
    cosine_TM = torch.from_numpy(unit_MD[rows_T]) @ torch.from_numpy(unit_MD).T
    return np.maximum(2 - 2 * cosine_TM.numpy(), 0)


def nearest(
    unit_ND: NDArray[np.float32], rows_B: np.ndarray, centre_KD: NDArray[np.float32], pool: Executor
) -> NDArray[np.int64]:
    """Return the centre with the largest cosine of each of the rows, (B)."""
    centre_DK = torch.from_numpy(centre_KD).T
    step = max(1, VALUES_AT_ONCE // len(centre_KD))

    def of_block(first: int) -> NDArray[np.int64]:
        unit_BD = torch.from_numpy(unit_ND[rows_B[first : first + step]])
        return (unit_BD @ centre_DK).numpy().argmax(axis=1)

    return np.concatenate(list(pool.map(of_block, range(0, len(rows_B), step))))


def sums(unit_BD: np.ndarray, cluster_B: np.ndarray, num_clusters: int) -> NDArray[np.float64]:
    """Return the sum of the rows of each cluster, (K, D)."""
    num = len(cluster_B)
    member_BK = csr_array((np.ones(num), cluster_B, np.arange(num + 1)), (num, num_clusters))
    return member_BK.T @ unit_BD


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Let torch compute every product with one thread: with more, the bits would differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def agreement(cluster_N: np.ndarray, speaker_N: np.ndarray) -> tuple[float, float]:
    """Return (purity, normalised mutual information) of clusters and speakers, numbers from 0.

    Purity is the share of utterances whose speaker is the most frequent one of their cluster; it
    rises with the number of clusters. The mutual information is divided by the mean of the two
    entropies (Vinh, Epps and Bailey, JMLR 11, 2010); it is 1 if clusters are the speakers.
    """
    from scipy.stats import entropy  # here: it takes a second to import

    num_speakers = int(speaker_N.max()) + 1
    pair_N = cluster_N.astype(np.int64) * num_speakers + speaker_N
    pairs, count_P = np.unique(pair_N, return_counts=True)
    largest_K = np.zeros(int(cluster_N.max()) + 1, dtype=np.int64)
    np.maximum.at(largest_K, pairs // num_speakers, count_P)
    counts = np.bincount(cluster_N), np.bincount(speaker_N), count_P
    of_clusters, of_speakers, of_both = (float(entropy(count)) for count in counts)
    mean = (of_clusters + of_speakers) / 2
    shared = of_clusters + of_speakers - of_both
    return float(largest_K.sum() / len(cluster_N)), shared / mean if mean else 1.0
