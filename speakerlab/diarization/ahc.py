"""Agglomerative hierarchical clustering: average linkage of cosines, up to a threshold.

Letters: N windows, M windows of the sample, C cuts of the tree.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import cut_tree, linkage

from speakerlab.diarization.clustering import MIN_WINDOWS, THRESHOLD, sample_rows


@dataclass(kw_only=True)
class Ahc:
    """Method of `METHODS`."""

    threshold: float = THRESHOLD  # mean cosine from which two groups are one speaker

    def __call__(self, unit_ND: np.ndarray, least: int, most: int) -> NDArray[np.int64]:
        """Return group_N, -1 for windows outside the sample.

        The tree is cut at the threshold or, if that gives fewer than `least` or more than `most`
        groups of MIN_WINDOWS windows (fewer if windows are few), at the nearest height that does
        not.
        """
        rows_M = sample_rows(len(unit_ND))
        group_N = np.full(len(unit_ND), -1)
        if len(rows_M) == 1:
            group_N[rows_M] = 0
            return group_N
        distance_MM = np.maximum(1.0 - unit_ND[rows_M] @ unit_ND[rows_M].T, 0.0)
        tree = linkage(distance_MM[np.triu_indices(len(rows_M), k=1)], method="average")
        wanted = 1 + int((tree[:, 2] > 1.0 - self.threshold).sum())
        cut_MC = cut_tree(tree)  # column c has M - c groups
        size_CM = np.apply_along_axis(np.bincount, 0, cut_MC, minlength=len(rows_M)).T
        enough = max(min(MIN_WINDOWS, len(rows_M) // (2 * least)), 1)
        num_large_C = (size_CM >= enough).sum(axis=1)
        outside_C = np.maximum(least - num_large_C, 0) + np.maximum(num_large_C - most, 0)
        steps_C = np.abs(len(rows_M) - np.arange(len(rows_M)) - wanted)
        group_N[rows_M] = cut_MC[:, np.lexsort((steps_C, outside_C))[0]]
        return group_N
