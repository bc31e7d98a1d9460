"""Variational Bayesian clustering with a PLDA model: VBx as a mixture, without its HMM.

Landini, Profant, Diez and Burget, "Bayesian HMM clustering of x-vector sequences (VBx) in speaker
diarization" (Computer Speech & Language 71, 2022), equations 14 to 27, with P(loop) = 0, where the
HMM is a mixture. A speaker that explains no windows loses its weight, which determines the number
of speakers. Fa scales the likelihood of the windows, which are not independent, and Fb the prior of
the speakers.
Letters: N windows, K speakers, D dimensions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax

from speakerlab.core.tuning import FB
from speakerlab.diarization.clustering import centres, drop_tiny, unit_rows
from speakerlab.diarization.spectral import Spectral

# For a window every 0.75 s, with FB; for a window every 0.25 s, VBx uses 0.3 and 17.
FA = 0.2
# Windows per initial speaker, within the allowed number of speakers.
START_WINDOWS = 10
START_SHARPNESS = 7.0  # of the initial posteriors (init-smoothing of VBx)
NUM_ITERATIONS = 40
MIN_GAIN = 1e-4  # of the lower bound; stop at a smaller gain
MIN_WEIGHT = 1e-7  # remove speakers with a smaller weight


@dataclass(kw_only=True, eq=False)
class Vbx:
    """Clustering method `vbx` of `METHODS`, with a PLDA model of unit-length embeddings."""

    mean_D: np.ndarray  # m
    transform_DD: np.ndarray  # A: u = A (x - m) has the covariance I within speakers,
    psi_D: np.ndarray  # and diag(psi) between them
    fa: float = FA
    fb: float = FB

    def __call__(self, unit_ND: np.ndarray, least: int, most: int) -> NDArray[np.int64]:
        """Return group_N; from spectral clustering if VBx finds fewer than `least` speakers."""
        # Start from more speakers than expected: VBx removes speakers, but adds none.
        spectral = Spectral()
        num_starts = min(most, len(unit_ND) // START_WINDOWS)
        num_starts = max(num_starts, least)
        group_N = spectral(unit_ND, num_starts, num_starts)
        group_N = drop_tiny(group_N, num_starts)
        direction_KD = unit_rows(centres(unit_ND, group_N))
        cosine_NK = unit_ND @ direction_KD.T
        nearest_N = cosine_NK.argmax(axis=1)
        one_hot_NK = np.eye(len(direction_KD))[nearest_N]
        start_NK = softmax(START_SHARPNESS * one_hot_NK, axis=1)

        u_ND = (unit_ND - self.mean_D) @ self.transform_DD.T
        post_NK = self.posteriors(u_ND, start_NK)
        speaker_N = post_NK.argmax(axis=1)
        if len(np.unique(speaker_N)) < least:
            return spectral(unit_ND, least, most)
        return speaker_N

    def posteriors(self, u_ND: np.ndarray, post_NK: np.ndarray) -> NDArray[np.float64]:
        """Return the posterior of each remaining speaker for each window, (N, K').

        u_ND: covariance I within speakers, diag(psi) between them. post_NK: the initial posteriors.
        Numbers in parentheses are equations of the paper.
        """
        ratio = self.fa / self.fb
        rho_ND = u_ND * np.sqrt(self.psi_D)  # (18)
        # The part of (23) that does not depend on the speaker.
        constant_ND = np.log(2.0 * np.pi) + np.square(u_ND)
        constant_N = -0.5 * constant_ND.sum(axis=1)
        num_speakers = post_NK.shape[1]
        weight_K = np.full(num_speakers, 1.0 / num_speakers)

        last_bound = -np.inf
        for _ in range(NUM_ITERATIONS):
            # Posterior of each speaker's mean, a Gaussian: (17) and (16).
            count_K1 = post_NK.sum(axis=0)[:, None]
            variance_KD = 1.0 / (1.0 + ratio * count_K1 * self.psi_D)
            mean_KD = ratio * variance_KD * (post_NK.T @ rho_ND)

            # Log-likelihood of each window for each speaker (23), then the posteriors.
            square_KD = variance_KD + mean_KD**2
            spread_K = (square_KD * self.psi_D).sum(axis=1)
            match_NK = rho_ND @ mean_KD.T
            log_likelihood_NK = match_NK - 0.5 * spread_K + constant_N[:, None]
            log_NK = self.fa * log_likelihood_NK + np.log(weight_K)
            total_N = np.asarray(logsumexp(log_NK, axis=1))
            post_NK = np.exp(log_NK - total_N[:, None])

            # The lower bound (25): the likelihood minus the distance from the prior.
            prior_KD = 1.0 + np.log(variance_KD) - variance_KD - mean_KD**2
            prior = 0.5 * self.fb * prior_KD.sum()
            bound = float(total_N.sum() + prior)

            # Remove speakers that explain no windows before the check, so that the result has none.
            weight_K = post_NK.mean(axis=0)
            remaining_K = weight_K > MIN_WEIGHT
            weight_K = weight_K[remaining_K]
            weight_K = weight_K / weight_K.sum()
            post_NK = post_NK[:, remaining_K]
            if bound - last_bound < MIN_GAIN:
                break
            last_bound = bound
        return post_NK
