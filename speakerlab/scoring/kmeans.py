"""K-means clustering of millions of embeddings, and its agreement with known speakers.

Mini-batch k-means (Sculley, "Web-scale k-means clustering", WWW 2010) with the cosine: a centre is
the direction of the sum of its embeddings (Dhillon and Modha, "Concept decompositions for large
sparse text data using clustering", Machine Learning 42, 2001).
Letters: N embeddings, K clusters, D dimensions, B rows of a batch, M rows of the sample, T rows
tried as a centre.
"""

import math
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

# Rows per cluster, of a batch and of the sample for the first centres.
PER_CLUSTER = 10
MAX_EPOCHS = 20
SETTLED = 0.001  # stop when a smaller share of the rows changes cluster
VALUES_AT_ONCE = 8_000_000  # cosines per thread (32 MB)


def kmeans(
    unit_ND: NDArray[np.float32],
    num_clusters: int,
    *,
    num_threads: int,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Return cluster_N, 0 to `num_clusters` - 1, of unit vectors; clusters may be empty.

    The result depends on the seed, but not on the number of threads: each computes whole blocks of
    rows. Besides the embeddings, this needs the memory of a batch and 32 MB per thread.
    """
    num_rows = len(unit_ND)
    assert 1 <= num_clusters <= num_rows, (num_clusters, num_rows)
    cluster_N = np.full(num_rows, -1)  # no cluster: all change in the first epoch
    batch_size = min(num_rows, PER_CLUSTER * num_clusters)
    num_batches = math.ceil(num_rows / batch_size)
    rng = np.random.default_rng([seed, 0])
    sample_M = rng.choice(num_rows, batch_size, replace=False)
    sample_M = np.sort(sample_M)
    with one_thread_each(), ThreadPoolExecutor(num_threads) as pool:
        centre_KD = first_centres(unit_ND[sample_M], num_clusters, rng)
        for epoch in range(1, MAX_EPOCHS + 1):
            # Start from the old centres, so that a cluster without rows keeps its direction.
            sum_KD = centre_KD.astype(np.float64)
            num_changed = 0
            epoch_rng = np.random.default_rng([seed, epoch])
            order_N = epoch_rng.permutation(num_rows)
            for rows_B in np.array_split(order_N, num_batches):
                nearest_B = nearest(unit_ND, rows_B, centre_KD, pool)
                has_changed_B = nearest_B != cluster_N[rows_B]
                num_changed += np.count_nonzero(has_changed_B)
                cluster_N[rows_B] = nearest_B

                sum_KD += sums(unit_ND[rows_B], nearest_B, num_clusters)
                length_K1 = np.linalg.norm(sum_KD, axis=1, keepdims=True)
                direction_KD = sum_KD / np.maximum(length_K1, 1e-12)
                centre_KD = direction_KD.astype(np.float32)
            if num_changed <= SETTLED * num_rows:
                break
        # The centres have moved since the rows of the first batches were assigned.
        return nearest(unit_ND, np.arange(num_rows), centre_KD, pool)


def first_centres(
    unit_MD: NDArray[np.float32],
    num_clusters: int,
    rng: np.random.Generator,
) -> NDArray[np.float32]:
    """Draw rows that are far from each other, by greedy k-means++.

    For each centre, several rows are drawn, with probabilities in proportion to the squared
    distance from the nearest centre so far; the row that leaves the smallest sum of squared
    distances is taken (Arthur and Vassilvitskii, "k-means++: the advantages of careful seeding",
    SODA 2007).
    """
    num_tried = 2 + int(np.log(num_clusters))
    chosen = rng.integers(len(unit_MD), size=1).tolist()
    # Squared distance from each row to the nearest chosen row.
    distance_M = squared_distances(unit_MD, chosen)[0]
    while len(chosen) < num_clusters:
        # Each row has an interval as long as its distance, which ends at its cumulative sum.
        cumulative_M = np.cumsum(distance_M, dtype=np.float64)
        total = cumulative_M[-1]
        drawn_T = rng.random(num_tried) * total
        # Without the last bound, because rounding could put a draw beyond it.
        tried_T = np.searchsorted(cumulative_M[:-1], drawn_T)

        tried_distance_TM = squared_distances(unit_MD, tried_T)
        remaining_TM = np.minimum(tried_distance_TM, distance_M)
        total_T = remaining_TM.sum(axis=1, dtype=np.float64)
        best = int(total_T.argmin())
        chosen.append(int(tried_T[best]))
        distance_M = remaining_TM[best]
    return unit_MD[chosen]


def squared_distances(
    unit_MD: np.ndarray,
    rows_T: np.ndarray | list[int],
) -> NDArray[np.float32]:
    """Return the squared distances from some rows to all rows, (T, M)."""
    all_MD = torch.from_numpy(unit_MD)
    some_TD = torch.from_numpy(unit_MD[rows_T])
    cosine_TM = some_TD @ all_MD.T
    # For unit vectors. Rounding can make the distance of a row to itself negative.
    return np.maximum(2 - 2 * cosine_TM.numpy(), 0)


def nearest(
    unit_ND: NDArray[np.float32],
    rows_B: np.ndarray,
    centre_KD: NDArray[np.float32],
    pool: Executor,
) -> NDArray[np.int64]:
    """Return the index of the centre with the largest cosine to each row, (B)."""
    centre_DK = torch.from_numpy(centre_KD).T
    rows_at_once = max(1, VALUES_AT_ONCE // len(centre_KD))

    def nearest_of_block(start: int) -> NDArray[np.int64]:
        block_rows = rows_B[start : start + rows_at_once]
        unit_BD = torch.from_numpy(unit_ND[block_rows])
        cosine_BK = (unit_BD @ centre_DK).numpy()
        return cosine_BK.argmax(axis=1)

    starts = range(0, len(rows_B), rows_at_once)
    blocks = list(pool.map(nearest_of_block, starts))
    return np.concatenate(blocks)


def sums(
    unit_BD: np.ndarray,
    cluster_B: np.ndarray,
    num_clusters: int,
) -> NDArray[np.float64]:
    """Return the sum of the rows of each cluster, (K, D)."""
    # A sparse matrix with a single 1 in each row, at the column of the row's cluster.
    num_rows = len(cluster_B)
    row_starts = np.arange(num_rows + 1)
    is_member_BK = csr_array(
        (np.ones(num_rows), cluster_B, row_starts),
        shape=(num_rows, num_clusters),
    )
    return is_member_BK.T @ unit_BD


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Limit torch to one thread per product: with more threads, the bits would differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def agreement(cluster_N: np.ndarray, speaker_N: np.ndarray) -> tuple[float, float]:
    """Return (purity, normalised mutual information) of clusters and speakers, both from 0 to 1.

    cluster_N, speaker_N: the number of the cluster and of the speaker of each utterance.
    Purity is the share of utterances whose speaker is the most frequent one in their cluster; it
    rises with the number of clusters. The mutual information is divided by the mean of the two
    entropies (Vinh, Epps and Bailey, JMLR 11, 2010); it is 1 if the clusters equal the speakers.
    """
    from scipy.stats import entropy  # here: it takes a second to import

    # The P occurring pairs of a cluster and a speaker, each as one number.
    num_speakers = int(speaker_N.max()) + 1
    pair_N = cluster_N.astype(np.int64) * num_speakers + speaker_N
    pair_P, count_P = np.unique(pair_N, return_counts=True)

    num_clusters = int(cluster_N.max()) + 1
    largest_K = np.zeros(num_clusters, dtype=np.int64)
    np.maximum.at(largest_K, pair_P // num_speakers, count_P)
    purity = float(largest_K.sum() / len(cluster_N))

    count_K = np.bincount(cluster_N)
    count_S = np.bincount(speaker_N)
    cluster_entropy = float(entropy(count_K))
    speaker_entropy = float(entropy(count_S))
    joint_entropy = float(entropy(count_P))
    mutual_information = cluster_entropy + speaker_entropy - joint_entropy
    mean_entropy = (cluster_entropy + speaker_entropy) / 2
    # One cluster and one speaker agree perfectly.
    if mean_entropy == 0:
        return purity, 1.0
    return purity, mutual_information / mean_entropy
