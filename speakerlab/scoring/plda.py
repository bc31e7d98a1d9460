"""Two-covariance PLDA: a speaker's mean and a recording's deviation from it are both Gaussian.

In: embeddings of development speakers. Out: a model of the log-likelihood ratio of "same speaker"
against "different speakers" for an enrolled speaker and a test recording.
An embedding is x = m + y + e, y ~ N(0, B) the same in all recordings of a speaker and e ~ N(0, W)
independent in each (Brummer and de Villiers, "The speaker partitioning problem", Odyssey 2010;
Ioffe, "Probabilistic linear discriminant analysis", ECCV 2006, whose notation Kaldi's
src/ivector/plda.cc follows). The model is kept as Kaldi keeps it: u = A (x - m) has the
within-speaker covariance I and the between-speaker covariance diag(psi).
Letters: N trials or rows, M development utterances, S speakers, D dimensions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh

from speakerlab.scoring.transforms import Development, SpeakerMeans

NUM_ITERATIONS = 10  # Kaldi's default (PldaEstimationConfig)
# Kaldi's defaults (PldaUnsupervisedAdaptorConfig)
MEAN_DIFFERENCE_SCALE, WITHIN_SCALE, BETWEEN_SCALE = 1.0, 0.3, 0.7


@dataclass(frozen=True, eq=False)
class Plda:
    """The mean m, the matrix A and the diagonal psi, in descending order."""

    mean_D: NDArray[np.float64]
    transform_DD: NDArray[np.float64]
    psi_D: NDArray[np.float64]

    @classmethod
    def from_covariances(
        cls, mean_D: NDArray[np.float64], between_DD: np.ndarray, within_DD: np.ndarray
    ) -> "Plda":
        """Build the model with covariances B, which may be singular, and W, positive definite."""
        psi_D, ascending_DD = eigh(between_DD, within_DD)  # columns v: v' W v = 1, v' B v = psi
        return cls(mean_D, ascending_DD[:, ::-1].T, np.maximum(psi_D[::-1], 0.0))

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

    def enrol_side(self, enrol_ED: np.ndarray, num_enrol_E: ArrayLike = 1) -> np.ndarray:
        """Return (E, 2 D + 1) whose inner product with rows of `test_side` is the ratio.

        For an enrolled u of n recordings and a test v, both after A, Ioffe's predictive density
        (the unnumbered equation between 4 and 5; Plda::LogLikelihoodRatio of Kaldi) makes it
        log N(v | g u, 1 + psi / (n psi + 1)) - log N(v | 0, 1 + psi), g = n psi / (n psi + 1),
        summed over the dimensions. Sorted by powers of v: a constant, v and v squared.
        """
        enrol_ED = (enrol_ED - self.mean_D) @ self.transform_DD.T
        num_E1 = np.broadcast_to(np.asarray(num_enrol_E, dtype=np.float64), len(enrol_ED))[:, None]
        mean_ED = num_E1 * self.psi_D / (num_E1 * self.psi_D + 1.0) * enrol_ED
        variance_ED = 1.0 + self.psi_D / (num_E1 * self.psi_D + 1.0)
        alone_D = 1.0 + self.psi_D
        constant_ED = np.log(alone_D / variance_ED) - mean_ED**2 / variance_ED
        constant_E1 = 0.5 * constant_ED.sum(axis=1, keepdims=True)
        square_ED = 0.5 * (1.0 / alone_D - 1.0 / variance_ED)
        return np.hstack([constant_E1, mean_ED / variance_ED, square_ED])

    def test_side(self, test_TD: np.ndarray) -> np.ndarray:
        """Return (T, 2 D + 1): 1, v and v squared of every test recording."""
        test_TD = (test_TD - self.mean_D) @ self.transform_DD.T
        return np.hstack([np.ones((len(test_TD), 1)), test_TD, test_TD**2])

    def adapted(self, emb_ND: np.ndarray) -> "Plda":
        """Adapt the model to another domain, from embeddings (N, D) of unknown speakers.

        Kaldi's ivector-adapt-plda (PldaUnsupervisedAdaptor::UpdatePlda): the mean becomes that of
        these embeddings. C is their covariance plus MEAN_DIFFERENCE_SCALE times the square of
        the shift of the mean. Where C exceeds B + W, in the directions that make both diagonal,
        shares of the excess are added to W and to B. Elsewhere nothing changes.
        """
        mean_D = emb_ND.mean(axis=0, dtype=np.float64)
        apart_ND, shift_D = emb_ND - mean_D, mean_D - self.mean_D
        seen_DD = apart_ND.T @ apart_ND / len(emb_ND)
        seen_DD += MEAN_DIFFERENCE_SCALE * np.outer(shift_D, shift_D)
        total_DD = self.between_DD + self.within_DD
        ratio_D, direction_DD = eigh(seen_DD, total_DD)  # columns v: v' (B + W) v = 1, v' C v = r
        out_DD = total_DD @ direction_DD  # inverse of the transposed: back from these directions
        excess_DD = (out_DD * np.maximum(ratio_D - 1.0, 0.0)) @ out_DD.T
        return Plda.from_covariances(
            mean_D,
            self.between_DD + BETWEEN_SCALE * excess_DD,
            self.within_DD + WITHIN_SCALE * excess_DD,
        )


def learn_plda(development: Development, *, num_iterations: int = NUM_ITERATIONS) -> Plda:
    """Learn a model by EM (Kaldi, comment on PldaEstimator::GetStatsFromClassMeans).

    The mean is that of the speakers' means. EM starts at the scatter within speakers and at the
    covariance of the speakers' means, and so does not depend on the scale of the embeddings, as
    Kaldi's start at unit matrices does. Each iteration works where W = I and B = diag(psi): there
    the posterior of speaker s with n recordings of mean u has the mean w = n psi / (n psi + 1) u
    and the variance psi / (n psi + 1). Raises ValueError for too few utterances or speakers.
    """
    means = SpeakerMeans.of(development)
    means.require_spread("plda")
    num, num_speakers = int(means.count_S.sum()), len(means.names)
    mean_D = means.mean_SD.mean(axis=0)
    apart_SD = means.mean_SD - mean_D
    plda = Plda.from_covariances(
        mean_D, apart_SD.T @ apart_SD / num_speakers, means.within_DD / (num - num_speakers)
    )
    n_S1 = means.count_S[:, None].astype(np.float64)
    for _ in range(num_iterations):
        u_SD = apart_SD @ plda.transform_DD.T
        variance_SD = plda.psi_D / (n_S1 * plda.psi_D + 1.0)
        w_SD = n_S1 * variance_SD * u_SD
        left_SD = u_SD - w_SD
        between_DD = w_SD.T @ w_SD + np.diag(variance_SD.sum(axis=0))
        within_DD = plda.transform_DD @ means.within_DD @ plda.transform_DD.T
        within_DD += (n_S1 * left_SD).T @ left_SD + np.diag((n_S1 * variance_SD).sum(axis=0))
        step = Plda.from_covariances(mean_D, between_DD / num_speakers, within_DD / num)
        plda = Plda(mean_D, step.transform_DD @ plda.transform_DD, step.psi_D)
    return plda
