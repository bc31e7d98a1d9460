"""Variational Bayesian clustering with a PLDA model: VBx as a mixture, without its HMM.

Landini, Profant, Diez and Burget, "Bayesian HMM clustering of x-vector sequences (VBx) in speaker
diarization" (Computer Speech & Language 71, 2022), equations 14 to 27, with P(loop) = 0, where the
HMM is a mixture. A speaker that explains no windows loses its weight, so that the number of
speakers is found. Fa weighs the windows, which are not independent, and Fb the speakers' prior.
Letters: N windows, K speakers, D dimensions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax

from speakerlab.diarization.clustering import centres, drop_tiny, unit_rows
from speakerlab.diarization.spectral import Spectral

FA, FB = 0.2, 1.0  # for a window every 0.75 s; for one every 0.25 s, VBx has 0.3 and 17
START_WINDOWS = 10  # of each speaker that iteration starts from, if there are not too many
START_SHARPNESS = 7.0  # of the posteriors that it starts from (init-smoothing of VBx)
NUM_ITERATIONS = 40
MIN_GAIN = 1e-4  # of the lower bound; less ends the iteration
MIN_WEIGHT = 1e-7  # of a speaker that is left


@dataclass(kw_only=True, eq=False)
class Vbx:
    """Method of `METHODS`, from a PLDA model of embeddings of unit length."""

    mean_D: np.ndarray  # m
    transform_DD: np.ndarray  # A: u = A (x - m) has the covariance I within speakers,
    psi_D: np.ndarray  # and diag(psi) between them
    fa: float = FA
    fb: float = FB

    def __call__(self, unit_ND: np.ndarray, least: int, most: int) -> NDArray[np.int64]:
        """Return group_N; of spectral clustering if VBx leaves less than `least` speakers."""
        num_starts = max(min(most, len(unit_ND) // START_WINDOWS), least)
        group_N = drop_tiny(Spectral()(unit_ND, num_starts, num_starts), num_starts)
        direction_KD = unit_rows(centres(unit_ND, group_N))
        start_NK = np.eye(len(direction_KD))[(unit_ND @ direction_KD.T).argmax(axis=1)]
        u_ND = (unit_ND - self.mean_D) @ self.transform_DD.T
        post_NK = self.posteriors(u_ND, softmax(START_SHARPNESS * start_NK, axis=1))
        found_N = post_NK.argmax(axis=1)
        if len(np.unique(found_N)) < least:
            return Spectral()(unit_ND, least, most)
        return found_N

    def posteriors(self, u_ND: np.ndarray, post_NK: np.ndarray) -> NDArray[np.float64]:
        """Return the posterior of each speaker that is left for each window, (N, K').

        u_ND: covariance I within speakers, diag(psi) between them. post_NK: where to start.
        """
        psi_D, fa, fb = self.psi_D, self.fa, self.fb
        rho_ND = u_ND * np.sqrt(psi_D)
        own_N = -0.5 * (np.log(2.0 * np.pi) + np.square(u_ND)).sum(axis=1)
        weight_K = np.full(post_NK.shape[1], 1.0 / post_NK.shape[1])
        last = -np.inf
        for _ in range(NUM_ITERATIONS):
            variance_KD = 1.0 / (1.0 + fa / fb * post_NK.sum(axis=0)[:, None] * psi_D)
            mean_KD = fa / fb * variance_KD * (post_NK.T @ rho_ND)
            spread_K = ((variance_KD + mean_KD**2) * psi_D).sum(axis=1)
            log_NK = fa * (rho_ND @ mean_KD.T - 0.5 * spread_K + own_N[:, None]) + np.log(weight_K)
            total_N = np.asarray(logsumexp(log_NK, axis=1))
            post_NK = np.exp(log_NK - total_N[:, None])
            prior = (1.0 + np.log(variance_KD) - variance_KD - mean_KD**2).sum()
            bound = float(total_N.sum() + 0.5 * fb * prior)
            weight_K = post_NK.mean(axis=0)
            left_K = weight_K > MIN_WEIGHT
            weight_K, post_NK = weight_K[left_K] / weight_K[left_K].sum(), post_NK[:, left_K]
            if bound - last < MIN_GAIN:
                break
            last = bound
        return post_NK
