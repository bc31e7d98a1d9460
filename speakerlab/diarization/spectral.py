"""Spectral clustering that chooses the number of neighbours and of clusters by itself (NME-SC).

Park, Han, Kumar and Narayanan, "Auto-tuning spectral clustering for speaker diarization using
normalized maximum eigengap" (IEEE Signal Processing Letters 27, 2020). In a graph that joins each
window to its p most similar ones, k groups that are not joined make the k smallest eigenvalues of
the Laplacian 0, and a gap follows. The p with the largest gap, relative to the root of p, is used.

Two things differ from the paper. A gap is divided by the eigenvalue above it, plus a share of the
mean degree, instead of the largest eigenvalue: where eigenvalues grow slowly, a later gap is wider
without meaning more, and too many speakers were found. Edges weigh the squared cosine: a speaker of
few windows, whose p nearest include other voices, is then found more often, above all in short
recordings. The constants are good on conversations of training speakers and of synthetic voices;
docs/diarization.md has the results on others.

Windows are divided by the pivots of a QR decomposition of the eigenvectors (Damle, Minden and Ying,
"Simple, direct and efficient multi-way spectral clustering", Information and Inference 8, 2019):
unlike k-means it draws nothing. Letters: M windows of the sample, P neighbours, K clusters.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh, qr, svd

from speakerlab.diarization.clustering import sample_rows

MIN_NEIGHBOURS, MAX_NEIGHBOURS, NUM_TRIED = 6, 0.2, 6  # MAX: share of the windows
WINDOWS_PER_GROUP = 4  # at least, on average: the gaps after more groups than that are chance
SEARCHED = 3  # times the allowed range of groups: a gap after more still says many, not one
GAP_FLOOR = 0.1  # of the mean degree, added to the eigenvalue that a gap is divided by


class Spectral:
    """Method of `METHODS`."""

    def __call__(self, unit_ND: np.ndarray, least: int, most: int) -> NDArray[np.int64]:
        """Return group_N, -1 for windows outside the sample; the groups are `least` to `most`."""
        rows_M = sample_rows(len(unit_ND))
        group_N = np.full(len(unit_ND), -1)
        if len(rows_M) <= max(least, 2):
            group_N[rows_M] = np.arange(len(rows_M)) if least > 1 else 0
            return group_N
        widest = min(least + SEARCHED * (most - least), len(rows_M) // WINDOWS_PER_GROUP)
        graph = Graph(unit_ND[rows_M])
        highest = max(round(MAX_NEIGHBOURS * len(rows_M)), MIN_NEIGHBOURS)
        tried = np.geomspace(MIN_NEIGHBOURS, highest, NUM_TRIED).round().astype(int)
        tried = np.unique(np.minimum(tried, len(rows_M) - 1)).tolist()
        _, num_groups, p = min(graph.eigengap(p, least, max(widest, least)) for p in tried)
        group_N[rows_M] = divide(graph.laplacian(p), min(num_groups, most))
        return group_N


class Graph:
    """Windows joined to their nearest ones by edges that weigh the squared cosine, if above 0."""

    def __init__(self, unit_MD: np.ndarray) -> None:
        self.weight_MM = np.maximum(unit_MD @ unit_MD.T, 0.0) ** 2
        np.fill_diagonal(self.weight_MM, -1.0)
        self.nearest_MM = np.argsort(-self.weight_MM, axis=1, kind="stable")  # itself last

    def laplacian(self, p: int) -> NDArray[np.float64]:
        """Return the unnormalised Laplacian of the graph of p neighbours."""
        rows_MP = self.nearest_MM[:, :p]
        edge_MM = np.zeros_like(self.weight_MM)
        nearest_MP = np.take_along_axis(self.weight_MM, rows_MP, axis=1)
        np.put_along_axis(edge_MM, rows_MP, nearest_MP, axis=1)
        edge_MM = 0.5 * (edge_MM + edge_MM.T)
        return np.diag(edge_MM.sum(axis=1)) - edge_MM

    def eigengap(self, p: int, least: int, most: int) -> tuple[float, int, int]:
        """Return (root of p / the relative gap: the lower the better, number of groups, p)."""
        laplacian_MM = self.laplacian(p)
        last = min(most, len(laplacian_MM) - 1)
        value_K = eigh(laplacian_MM, eigvals_only=True, subset_by_index=[0, last])
        floor = max(GAP_FLOOR * float(laplacian_MM.diagonal().mean()), 1e-12)
        gap_K = np.diff(value_K)[least - 1 :] / (value_K[least:] + floor)
        return p**0.5 / max(float(gap_K.max()), 1e-12), least + int(gap_K.argmax()), p


def divide(laplacian_MM: np.ndarray, num_groups: int) -> NDArray[np.int64]:
    """Return group_M: the rows of the eigenvectors, by the nearest of `num_groups` pivots."""
    vector_MK = eigh(laplacian_MM, subset_by_index=[0, num_groups - 1])[1]
    pivot_M = qr(vector_MK.T, mode="economic", pivoting=True)[-1]
    left_KK, _, right_KK = svd(vector_MK[pivot_M[:num_groups]].T)
    return np.abs(vector_MK @ (left_KK @ right_KK)).argmax(axis=1)
