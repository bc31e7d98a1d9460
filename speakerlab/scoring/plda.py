"""Two-covariance PLDA: a speaker's mean and a recording's deviation from it are both Gaussian.

In: embeddings of development speakers. Out: a model of the log-likelihood ratio of "same speaker"
against "different speakers" for an enrolled speaker and a test recording.
An embedding is x = m + y + e, y ~ N(0, B) the same in all recordings of a speaker and e ~ N(0, W)
independent in each (Brummer and de Villiers, "The speaker partitioning problem", Odyssey 2010;
Ioffe, "Probabilistic linear discriminant analysis", ECCV 2006, whose notation Kaldi's
src/ivector/plda.cc follows). The model is stored in Kaldi's form: u = A (x - m) has the
within-speaker covariance I and the between-speaker covariance diag(psi).
Letters: N trials or rows, M development utterances, S speakers, D dimensions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.scoring.transforms import Development, SpeakerMeans

NUM_ITERATIONS = 10  # Kaldi's default (PldaEstimationConfig)
# Kaldi's defaults (PldaUnsupervisedAdaptorConfig).
MEAN_DIFFERENCE_SCALE = 1.0
WITHIN_SCALE = 0.3
BETWEEN_SCALE = 0.7


@dataclass(frozen=True, eq=False)
class Plda:
    """PLDA model: the mean m, the matrix A and the diagonal psi, in descending order."""

    mean_D: NDArray[np.float64]
    transform_DD: NDArray[np.float64]
    psi_D: NDArray[np.float64]

    @classmethod
    def from_covariances(
        cls,
        mean_D: NDArray[np.float64],
        between_DD: np.ndarray,
        within_DD: np.ndarray,
    ) -> "Plda":
        """Build the model with covariances B, which may be singular, and W, positive definite."""
        from scipy.linalg import eigh  # here: it takes a fifth of a second to import

        # Columns v with v' W v = 1 and v' B v = psi, ascending.
        ascending_psi_D, ascending_DD = eigh(between_DD, within_DD)
        transform_DD = ascending_DD[:, ::-1].T
        # Rounding can make the psi of a singular B negative.
        psi_D = np.maximum(ascending_psi_D[::-1], 0.0)
        return cls(mean_D, transform_DD, psi_D)

    @property
    def within_DD(self) -> NDArray[np.float64]:
        """Return W, the covariance within speakers."""
        back_DD = np.linalg.inv(self.transform_DD)
        return back_DD @ back_DD.T

    @property
    def between_DD(self) -> NDArray[np.float64]:
        """Return B, the covariance between speakers."""
        back_DD = np.linalg.inv(self.transform_DD)
        return (back_DD * self.psi_D) @ back_DD.T

    def enrol_side(
        self, enrol_ED: np.ndarray, num_enrol_E: ArrayLike = 1
    ) -> np.ndarray:
        """Return (E, 2 D + 1); the inner product with a row of `test_side` is the ratio.

        For an enrolled u, the mean of n recordings, and a test v, both transformed by A, the ratio
        follows from Ioffe's predictive density (the unnumbered equation between 4 and 5; Kaldi's
        Plda::LogLikelihoodRatio):
        log N(v | g u, 1 + psi / (n psi + 1)) - log N(v | 0, 1 + psi), g = n psi / (n psi + 1),
        summed over the dimensions. The columns are the factors of the powers of v: 1, v, v squared.
        """
        enrol_ED = (enrol_ED - self.mean_D) @ self.transform_DD.T
        num_E = np.asarray(num_enrol_E, dtype=np.float64)
        num_E1 = np.broadcast_to(num_E, len(enrol_ED))[:, None]

        # Mean and variance of a test of the same speaker; variance of a test of any speaker.
        n_psi_ED = num_E1 * self.psi_D
        mean_ED = n_psi_ED / (n_psi_ED + 1.0) * enrol_ED
        variance_ED = 1.0 + self.psi_D / (n_psi_ED + 1.0)
        any_variance_D = 1.0 + self.psi_D

        # The factors of 1, v and v squared.
        constant_ED = np.log(any_variance_D / variance_ED) - mean_ED**2 / variance_ED
        constant_E1 = 0.5 * constant_ED.sum(axis=1, keepdims=True)
        linear_ED = mean_ED / variance_ED
        square_ED = 0.5 * (1.0 / any_variance_D - 1.0 / variance_ED)
        return np.hstack([constant_E1, linear_ED, square_ED])

    def test_side(self, test_TD: np.ndarray) -> np.ndarray:
        """Return (T, 2 D + 1): 1, v and v squared of every test recording."""
        test_TD = (test_TD - self.mean_D) @ self.transform_DD.T
        constant_T1 = np.ones((len(test_TD), 1))
        return np.hstack([constant_T1, test_TD, test_TD**2])

    def adapted(self, emb_ND: np.ndarray) -> "Plda":
        """Adapt the model to another domain, from embeddings (N, D) of unknown speakers.

        As in Kaldi's ivector-adapt-plda (PldaUnsupervisedAdaptor::UpdatePlda), the new mean is the
        mean of these embeddings. C is their covariance plus MEAN_DIFFERENCE_SCALE times the square
        of the shift of the mean. C and B + W are made diagonal together; in the directions in which
        C exceeds B + W, shares of the excess are added to W and to B. Other directions stay
        unchanged.
        """
        from scipy.linalg import eigh  # here: it takes a fifth of a second to import

        mean_D = emb_ND.mean(axis=0, dtype=np.float64)
        centred_ND = emb_ND - mean_D
        shift_D = mean_D - self.mean_D
        domain_DD = centred_ND.T @ centred_ND / len(emb_ND)
        domain_DD += MEAN_DIFFERENCE_SCALE * np.outer(shift_D, shift_D)

        # Columns v with v' (B + W) v = 1 and v' C v = r; r > 1 where C exceeds B + W.
        total_DD = self.between_DD + self.within_DD
        ratio_D, direction_DD = eigh(domain_DD, total_DD)
        excess_D = np.maximum(ratio_D - 1.0, 0.0)
        # (B + W) V is the inverse of V', the map back from these directions.
        back_DD = total_DD @ direction_DD
        excess_DD = (back_DD * excess_D) @ back_DD.T
        return Plda.from_covariances(
            mean_D,
            self.between_DD + BETWEEN_SCALE * excess_DD,
            self.within_DD + WITHIN_SCALE * excess_DD,
        )


def learn_plda(
    development: Development, *, num_iterations: int = NUM_ITERATIONS
) -> Plda:
    """Learn a model by EM (Kaldi, comment on PldaEstimator::GetStatsFromClassMeans).

    m is the mean of the speakers' means. EM starts from the scatter within speakers and the
    covariance of the speakers' means, so the result does not depend on the scale of the embeddings,
    unlike Kaldi's start from unit matrices. Each iteration works in coordinates with W = I and
    B = diag(psi). In these, the posterior of speaker s with n recordings of mean u has the mean
    w = n psi / (n psi + 1) u and the variance psi / (n psi + 1). Raises ValueError for too few
    utterances or speakers.
    """
    means = SpeakerMeans.of(development)
    means.require_spread("plda")
    num_utterances = int(means.count_S.sum())
    num_speakers = len(means.names)
    mean_D = means.mean_SD.mean(axis=0)
    centred_SD = means.mean_SD - mean_D
    plda = Plda.from_covariances(
        mean_D,
        centred_SD.T @ centred_SD / num_speakers,
        means.within_DD / (num_utterances - num_speakers),
    )
    n_S1 = means.count_S[:, None].astype(np.float64)
    for _ in range(num_iterations):
        # E step: the mean w and the variance of each speaker's posterior.
        u_SD = centred_SD @ plda.transform_DD.T
        variance_SD = plda.psi_D / (n_S1 * plda.psi_D + 1.0)
        w_SD = n_S1 * variance_SD * u_SD

        # M step: both covariances, first as sums over the speakers and over the utterances.
        variance_D = variance_SD.sum(axis=0)
        between_DD = w_SD.T @ w_SD + np.diag(variance_D)
        within_DD = plda.transform_DD @ means.within_DD @ plda.transform_DD.T
        residual_SD = u_SD - w_SD
        mean_scatter_DD = (n_S1 * residual_SD).T @ residual_SD
        mean_variance_D = (n_S1 * variance_SD).sum(axis=0)
        within_DD += mean_scatter_DD + np.diag(mean_variance_D)
        step = Plda.from_covariances(
            mean_D,
            between_DD / num_speakers,
            within_DD / num_utterances,
        )
        # `step` is in the coordinates of the last model, except for its mean.
        transform_DD = step.transform_DD @ plda.transform_DD
        plda = Plda(mean_D, transform_DD, step.psi_D)
    return plda
