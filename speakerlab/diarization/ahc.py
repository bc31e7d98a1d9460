"""Agglomerative hierarchical clustering: average linkage of cosines, up to a threshold.

Letters: N windows, M windows of the sample, C cuts of the tree; in `merge_weighted`, N items.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import cut_tree, linkage

from speakerlab.core.tuning import THRESHOLD
from speakerlab.diarization.clustering import MIN_WINDOWS, sample_rows


@dataclass(kw_only=True)
class Ahc:
    """Clustering method `ahc` of `METHODS`."""

    threshold: float = THRESHOLD  # mean cosine from which two groups are one speaker

    def __call__(self, unit_ND: np.ndarray, least: int, most: int) -> NDArray[np.int64]:
        """Return group_N, -1 for windows outside the sample.

        The tree is cut at the threshold. If this gives fewer than `least` or more than `most`
        groups of MIN_WINDOWS windows (fewer windows in a short recording), it is cut at the nearest
        height with an allowed number of groups.
        """
        rows_M = sample_rows(len(unit_ND))
        num_windows = len(rows_M)
        group_N = np.full(len(unit_ND), -1)
        if num_windows == 1:
            group_N[rows_M] = 0
            return group_N

        # Two copies of the rows: for an array and its own transpose, NumPy calls another BLAS
        # routine, whose last digits differ.
        cosine_MM = unit_ND[rows_M] @ unit_ND[rows_M].T
        # Rounding can make the distance of equal windows negative.
        distance_MM = np.maximum(1.0 - cosine_MM, 0.0)
        # `linkage` takes each pair once: the triangle above the diagonal.
        above_diagonal = np.triu_indices(num_windows, k=1)
        tree = linkage(distance_MM[above_diagonal], method="average")
        cut_MC = cut_tree(tree)  # column c has M - c groups
        num_groups_C = num_windows - np.arange(num_windows)

        # The tree of M windows has M - 1 merges; each one above the threshold, which is left out,
        # adds one group.
        merge_heights = tree[:, 2]
        is_left_out = merge_heights > 1.0 - self.threshold
        num_groups_at_threshold = 1 + int(is_left_out.sum())
        merges_from_threshold_C = np.abs(num_groups_C - num_groups_at_threshold)

        # The number of windows of each group in each cut; 0 for unused group numbers.
        size_MC = np.apply_along_axis(np.bincount, 0, cut_MC, minlength=num_windows)
        # With few windows, there cannot be `least` groups of MIN_WINDOWS.
        half_of_a_group = num_windows // (2 * least)
        min_size = max(min(MIN_WINDOWS, half_of_a_group), 1)
        num_large_C = (size_MC >= min_size).sum(axis=0)
        num_missing_C = np.maximum(least - num_large_C, 0)
        num_surplus_C = np.maximum(num_large_C - most, 0)
        num_wrong_C = num_missing_C + num_surplus_C

        # `lexsort` sorts by its last key first: an allowed number of groups, then the threshold.
        order_C = np.lexsort((merges_from_threshold_C, num_wrong_C))
        best_cut = order_C[0]
        group_N[rows_M] = cut_MC[:, best_cut]
        return group_N


def merge_weighted(
    cosine_NN: np.ndarray,
    weight_N: np.ndarray,
    *,
    threshold: float,
    least: int = 1,
) -> NDArray[np.int64]:
    """Return group_N, from 0: average linkage with weights, and with pairs that stay apart.

    The similarity of two groups is the mean of the cosines of their pairs, each weighted by the
    product of the two weights. The two most similar groups are merged while the similarity reaches
    the threshold and more than `least` groups remain. SciPy's `linkage` has neither weights nor
    pairs that stay apart. The time grows with N^2; a copy of cosine_NN is made.

    cosine_NN: symmetric; -inf for two items that must never be in one group.
    weight_N: positive.
    """
    similarity_NN = cosine_NN.copy()
    np.fill_diagonal(similarity_NN, -np.inf)
    weight_N = weight_N.astype(np.float64)
    num_items = len(weight_N)
    group_N = np.arange(num_items)
    # The most similar group of each, and its similarity.
    nearest_N = similarity_NN.argmax(axis=1)
    highest_N = similarity_NN[np.arange(num_items), nearest_N]
    max_merges = num_items - max(least, 1)
    for _ in range(max_merges):
        first = int(highest_N.argmax())
        second = int(nearest_N[first])
        if highest_N[first] < threshold or highest_N[first] == -np.inf:
            break
        # The group `first` becomes the merged one: its similarities are weighted means. A group
        # that must stay apart from one of the two, at -inf, stays apart from the mean.
        share = weight_N[second] / (weight_N[first] + weight_N[second])
        merged_N = (1 - share) * similarity_NN[first] + share * similarity_NN[second]
        merged_N[[first, second]] = -np.inf
        similarity_NN[first] = merged_N
        similarity_NN[:, first] = merged_N
        weight_N[first] += weight_N[second]
        group_N[group_N == group_N[second]] = group_N[first]
        # The group `second` is merged with nothing any more.
        similarity_NN[second] = -np.inf
        similarity_NN[:, second] = -np.inf
        highest_N[second] = -np.inf

        # A mean is never above the larger of its two terms, so other groups keep their nearest.
        is_changed_N = (nearest_N == first) | (nearest_N == second)
        is_changed_N[first] = True
        is_changed_N[second] = False
        changed = np.flatnonzero(is_changed_N)
        nearest_N[changed] = similarity_NN[changed].argmax(axis=1)
        highest_N[changed] = similarity_NN[changed, nearest_N[changed]]
    _, number_N = np.unique(group_N, return_inverse=True)
    return number_N
