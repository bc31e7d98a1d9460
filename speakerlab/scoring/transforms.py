"""Transforms of embeddings before scoring: mean, LDA, whitening, length.

In: a development set to learn from, tables to transform. Out: tables with the same ids.
Letters: N utterances, M utterances of the development set, S its speakers, D dimensions before and
K after the transform.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.counting import count_of
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.pair_scores import unit_rows

Transform = Callable[[EmbeddingTable], EmbeddingTable]

SINGULAR = 1e-12  # a variance below this share of the largest is rounding error


@dataclass(frozen=True)
class Development:
    """Embeddings of speakers outside all trials."""

    table: EmbeddingTable  # M rows
    speaker_M: Sequence[str]  # in the order of table.ids

    def __post_init__(self) -> None:
        num_rows = len(self.table.ids)
        assert num_rows == len(self.speaker_M), (num_rows, self.speaker_M)


@dataclass(frozen=True, eq=False)
class SpeakerMeans:
    """Mean embedding of each development speaker, and the scatter around these means."""

    names: list[str]  # sorted
    count_S: NDArray[np.int64]
    mean_SD: NDArray[np.float64]
    # Sum over the M rows of d d', where d is the row minus the mean of its speaker.
    within_DD: NDArray[np.float64]

    @classmethod
    def of(cls, development: Development) -> "SpeakerMeans":
        """Compute the means and the scatter in float64."""
        emb_MD = development.table.emb_ND.astype(np.float64)
        names, code_M, count_S = np.unique(
            np.asarray(development.speaker_M),
            return_inverse=True,
            return_counts=True,
        )
        # Sort by speaker, so that one `reduceat` sums all; a mask for each speaker would be slow.
        by_speaker_MD = emb_MD[np.argsort(code_M, kind="stable")]
        first_row_S = np.cumsum(count_S) - count_S
        sum_SD = np.add.reduceat(by_speaker_MD, first_row_S, axis=0)
        mean_SD = sum_SD / count_S[:, None]
        deviation_MD = emb_MD - mean_SD[code_M]
        within_DD = deviation_MD.T @ deviation_MD
        return cls(names.tolist(), count_S, mean_SD, within_DD)

    def require_spread(self, step: str) -> None:
        """Raise ValueError if some dimension has no within-speaker variance."""
        num_utterances = int(self.count_S.sum())
        num_speakers = len(self.names)
        dim = len(self.within_DD)
        variance_D = np.linalg.eigvalsh(self.within_DD)  # ascending
        # The comparison is also false for NaN.
        has_spread = variance_D[0] > SINGULAR * variance_D[-1]
        if num_speakers < 2 or not has_spread:
            raise ValueError(
                f"{step}: too few for {count_of(dim, 'dimension')}, got"
                f" {count_of(num_utterances, 'utterance')} of"
                f" {count_of(num_speakers, 'speaker')} (at least 2 speakers,"
                f" {dim + num_speakers} distinct ones); add some, put lda"
                f" with a smaller --lda-dim before it, or leave out {step}"
            )


@dataclass(frozen=True, eq=False)
class Affine:
    """Affine map of each row x to (x - offset) @ projection."""

    offset_D: NDArray[np.float64]
    projection_DK: NDArray[np.float64] | None = None  # None: unchanged

    def __call__(self, table: EmbeddingTable) -> EmbeddingTable:
        """Transform a table, float32."""
        emb_ND = table.emb_ND - self.offset_D
        if self.projection_DK is not None:
            emb_ND = emb_ND @ self.projection_DK
        return replace(table, emb_ND=emb_ND.astype(np.float32))


def to_unit_length(table: EmbeddingTable) -> EmbeddingTable:
    """Scale each embedding to length 1 (Garcia-Romero and Espy-Wilson, Interspeech 2011)."""
    return replace(table, emb_ND=unit_rows(table.emb_ND, table.ids))


def learn_mean(development: Development) -> Affine:
    """Learn to subtract the mean of the development utterances."""
    mean_D = development.table.emb_ND.mean(axis=0, dtype=np.float64)
    return Affine(mean_D)


def learn_lda(development: Development, *, dim: int | None = None) -> Affine:
    """Learn LDA: the `dim` directions v with the largest l in B v = l W v.

    W is the covariance within speakers, sum of (x - m_s)(x - m_s)' / M, and B is the covariance
    between speakers, sum of n_s (m_s - m)(m_s - m)' / M (Fukunaga, "Introduction to Statistical
    Pattern Recognition", 1990, chapter 10). v' W v is 1. By default `dim` is the smaller of D and
    S - 1, the largest possible rank of B. Raises ValueError if `dim` is larger, or if W is singular
    (too few utterances).
    """
    from scipy.linalg import eigh  # here: it takes a fifth of a second to import

    means = SpeakerMeans.of(development)
    means.require_spread("lda")
    num_speakers = len(means.names)
    num_dims = len(means.within_DD)
    max_dim = min(num_dims, num_speakers - 1)
    if dim is None:
        dim = max_dim
    if not 1 <= dim <= max_dim:
        raise ValueError(
            f"lda: --lda-dim {dim} is not within 1 to {max_dim}, the most that"
            f" {count_of(num_speakers, 'speaker')} and"
            f" {count_of(num_dims, 'dimension')} allow; correct it, or leave it out"
        )

    num_utterances = means.count_S.sum()
    mean_D = means.count_S @ means.mean_SD / num_utterances
    centred_SD = means.mean_SD - mean_D
    weighted_SD = centred_SD * means.count_S[:, None]
    between_DD = weighted_SD.T @ centred_SD / num_utterances
    # Directions as columns; the last columns have the largest l.
    _, ascending_DD = eigh(between_DD, means.within_DD / num_utterances)
    descending_DD = ascending_DD[:, ::-1]
    # The mean is not subtracted; the step `mean` does that.
    return Affine(np.zeros(num_dims), descending_DD[:, :dim])


def learn_whitening(development: Development) -> Affine:
    """Learn to whiten with C^(-1/2), where C is the covariance of the development set.

    This is "ZCA" (Kessy, Lewin and Strimmer, The American Statistician 72, 2018). Raises ValueError
    if C is singular.
    """
    from scipy.linalg import eigh  # here: it takes a fifth of a second to import

    emb_MD = development.table.emb_ND.astype(np.float64)
    num_utterances, num_dims = emb_MD.shape
    # `cov` returns a scalar for a single dimension.
    covariance_DD = np.atleast_2d(np.cov(emb_MD, rowvar=False, ddof=0))
    variance_D, direction_DD = eigh(covariance_DD)
    has_spread = variance_D[0] > SINGULAR * variance_D[-1]
    if not has_spread:
        raise ValueError(
            f"whiten: too few for {count_of(num_dims, 'dimension')}, got"
            f" {count_of(num_utterances, 'utterance')}"
            " (more distinct ones than dimensions); extract more training"
            " data, or score without whiten"
        )
    scaled_DD = direction_DD / np.sqrt(variance_D)
    # As in LDA, the mean is not subtracted.
    return Affine(np.zeros(num_dims), scaled_DD @ direction_DD.T)
