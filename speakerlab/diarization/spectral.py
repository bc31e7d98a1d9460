"""Spectral clustering that chooses the number of neighbours and of clusters by itself (NME-SC).

Park, Han, Kumar and Narayanan, "Auto-tuning spectral clustering for speaker diarization using
normalized maximum eigengap" (IEEE Signal Processing Letters 27, 2020). The graph joins each window
to its p most similar windows. If it has k unconnected groups, the k smallest eigenvalues of its
Laplacian are 0, and a gap follows. The p with the largest gap, relative to the root of p, is used.

There are two differences from the paper. First, a gap is divided by the eigenvalue above it, plus a
share of the mean degree, instead of the largest eigenvalue: where eigenvalues grow slowly, later
gaps are wider without being more significant, and too many speakers were found. Second, edges have
the squared cosine as weight: a speaker with few windows, whose p nearest windows include other
voices, is then found more often, above all in short recordings. The constants were chosen on
conversations of training speakers and of synthetic voices; docs/diarization.md has results on other
data.

Windows are divided by the pivots of a QR decomposition of the eigenvectors (Damle, Minden and Ying,
"Simple, direct and efficient multi-way spectral clustering", Information and Inference 8, 2019).
Unlike k-means, it needs no random numbers. Letters: M windows of the sample, P neighbours, K
clusters.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh, qr, svd

from speakerlab.diarization.clustering import sample_rows

MIN_NEIGHBOURS = 6
MAX_NEIGHBOUR_SHARE = 0.2  # of the windows
NUM_TRIED = 6  # numbers of neighbours to try
# Minimum average size of a group: gaps after more groups are random.
WINDOWS_PER_GROUP = 4
# Gaps are searched after up to so many times the allowed number of groups: a gap after too many
# groups is still evidence for many groups rather than one.
SEARCH_FACTOR = 3
GAP_FLOOR = 0.1  # share of the mean degree, added to the divisor of a gap


class Spectral:
    """Clustering method `spectral` of `METHODS`."""

    def __call__(self, unit_ND: np.ndarray, least: int, most: int) -> NDArray[np.int64]:
        """Return group_N, `least` to `most` groups; -1 for windows outside the sample."""
        rows_M = sample_rows(len(unit_ND))
        num_windows = len(rows_M)
        group_N = np.full(len(unit_ND), -1)
        # Too few windows for a graph: one group, or one group per window if `least` is above 1.
        if num_windows <= max(least, 2):
            group_N[rows_M] = 0
            if least > 1:
                group_N[rows_M] = np.arange(num_windows)
            return group_N

        # With 1 to 20 groups allowed, gaps after up to 1 + 3 * 19 = 58 groups; with 5 to 5, only
        # after 5.
        max_groups = least + SEARCH_FACTOR * (most - least)
        max_groups = min(max_groups, num_windows // WINDOWS_PER_GROUP)
        max_groups = max(max_groups, least)
        graph = Graph(unit_ND[rows_M])
        gaps: list[Eigengap] = []
        for num_neighbours in neighbours_to_try(num_windows):
            gap = graph.eigengap(num_neighbours, least, max_groups)
            gaps.append(gap)
        best = min(gaps)
        laplacian_MM = graph.laplacian(best.num_neighbours)
        num_groups = min(best.num_groups, most)
        group_N[rows_M] = divide(laplacian_MM, num_groups)
        return group_N


def neighbours_to_try(num_windows: int) -> list[int]:
    """Return the numbers of neighbours to try, ascending in about equal ratios."""
    max_neighbours = round(MAX_NEIGHBOUR_SHARE * num_windows)
    max_neighbours = max(max_neighbours, MIN_NEIGHBOURS)
    numbers = np.geomspace(MIN_NEIGHBOURS, max_neighbours, NUM_TRIED)
    numbers = numbers.round().astype(int)
    # Only the other windows can be neighbours.
    numbers = np.minimum(numbers, num_windows - 1)
    return np.unique(numbers).tolist()


class Eigengap(NamedTuple):
    """Largest relative gap between the eigenvalues of a graph; the best sorts first."""

    cost: float  # root of the number of neighbours / gap: the lower the better
    num_groups: int  # before the gap
    num_neighbours: int


class Graph:
    """Graph of windows and their nearest neighbours; weights: squared positive cosines."""

    def __init__(self, unit_MD: np.ndarray) -> None:
        cosine_MM = unit_MD @ unit_MD.T
        weight_MM = np.maximum(cosine_MM, 0.0) ** 2
        # A window is not its own neighbour: -1 sorts it last.
        np.fill_diagonal(weight_MM, -1.0)
        self.weight_MM = weight_MM
        # The rows of all windows, the most similar first.
        self.nearest_MM = np.argsort(-weight_MM, axis=1, kind="stable")

    def laplacian(self, num_neighbours: int) -> NDArray[np.float64]:
        """Return the unnormalised Laplacian of the graph for a number of neighbours, (M, M)."""
        rows_MP = self.nearest_MM[:, :num_neighbours]
        weight_MP = np.take_along_axis(self.weight_MM, rows_MP, axis=1)
        edge_MM = np.zeros_like(self.weight_MM)
        np.put_along_axis(edge_MM, rows_MP, weight_MP, axis=1)
        # An edge in one direction only counts half, as in the paper.
        edge_MM = 0.5 * (edge_MM + edge_MM.T)
        degree_M = edge_MM.sum(axis=1)
        return np.diag(degree_M) - edge_MM

    def eigengap(self, num_neighbours: int, least: int, most: int) -> Eigengap:
        """Return the largest relative gap after `least` to `most` of the smallest eigenvalues."""
        laplacian_MM = self.laplacian(num_neighbours)
        last = min(most, len(laplacian_MM) - 1)
        value_K = eigh(laplacian_MM, eigvals_only=True, subset_by_index=[0, last])

        mean_degree = float(laplacian_MM.diagonal().mean())
        floor = max(GAP_FLOOR * mean_degree, 1e-12)
        # The gap after k groups is below eigenvalue k, counted from 0. Eigenvalues 0, 0.1, 2 and
        # 2.2 have the gaps 0.1, 1.9 and 0.2 after 1, 2 and 3 groups.
        gaps = np.diff(value_K)
        value_above = value_K[1:]
        relative_gaps = gaps / (value_above + floor)
        # Those after `least` groups or more.
        allowed_gaps = relative_gaps[least - 1 :]
        best = int(allowed_gaps.argmax())
        largest_gap = max(float(allowed_gaps[best]), 1e-12)
        return Eigengap(
            cost=num_neighbours**0.5 / largest_gap,
            num_groups=least + best,
            num_neighbours=num_neighbours,
        )


def divide(laplacian_MM: np.ndarray, num_groups: int) -> NDArray[np.int64]:
    """Divide windows by the eigenvectors of the `num_groups` smallest eigenvalues; return group_M.

    A window's row of the eigenvectors is its position in K dimensions. The rows of one group point
    in one direction, nearly orthogonal to those of other groups.
    """
    _, vector_MK = eigh(laplacian_MM, subset_by_index=[0, num_groups - 1])
    # QR with pivoting always takes the row farthest from the span of the previous rows, so the
    # first pivots are one window of each group.
    decomposition = qr(vector_MK.T, mode="economic", pivoting=True)
    order_M = decomposition[-1]
    pivot_rows = order_M[:num_groups]
    pivot_KK = vector_MK[pivot_rows]
    # The nearest orthogonal matrix (polar decomposition) rotates each pivot, and with it the rows
    # of its group, towards a separate axis. `abs`: the sign of an eigenvector is arbitrary.
    left_KK, _, right_KK = svd(pivot_KK.T)
    rotation_KK = left_KK @ right_KK
    rotated_MK = vector_MK @ rotation_KK
    return np.abs(rotated_MK).argmax(axis=1)
