"""Transforms of embeddings before scoring: mean, LDA, whitening, length.

In: a development set to learn from, tables to transform. Out: tables of the same ids.
Letters: N utterances, M of the development set, S its speakers, D dimensions before and K after.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.pair_scores import unit_rows

Transform = Callable[[EmbeddingTable], EmbeddingTable]

SINGULAR = 1e-12  # a variance below this share of the largest is float32 rounding


@dataclass(frozen=True)
class Development:
    """Embeddings of speakers that occur in no trial."""

    table: EmbeddingTable  # M rows
    speaker_M: Sequence[str]  # in the order of table.ids

    def __post_init__(self) -> None:
        assert len(self.table.ids) == len(self.speaker_M), (len(self.table.ids), self.speaker_M)


@dataclass(frozen=True, eq=False)
class SpeakerMeans:
    """The mean embedding of each development speaker, and the scatter around these means."""

    names: list[str]  # sorted
    count_S: NDArray[np.int64]
    mean_SD: NDArray[np.float64]
    within_DD: NDArray[np.float64]  # sum over the M rows of (x - its speaker's mean) squared

    @classmethod
    def of(cls, development: Development) -> "SpeakerMeans":
        """Sum in float64."""
        emb_MD = development.table.emb_ND.astype(np.float64)
        names, code_M, count_S = np.unique(
            np.asarray(development.speaker_M), return_inverse=True, return_counts=True
        )
        first_S = np.cumsum(count_S) - count_S
        by_speaker_MD = emb_MD[np.argsort(code_M, kind="stable")]
        mean_SD = np.add.reduceat(by_speaker_MD, first_S, axis=0) / count_S[:, None]
        left_MD = emb_MD - mean_SD[code_M]
        return cls(names.tolist(), count_S, mean_SD, left_MD.T @ left_MD)

    def require_spread(self, step: str) -> None:
        """Raise ValueError if some dimension has no within-speaker variance."""
        num, num_speakers, dim = int(self.count_S.sum()), len(self.names), len(self.within_DD)
        variance_D = np.linalg.eigvalsh(self.within_DD)  # ascending
        if num_speakers < 2 or not variance_D[0] > SINGULAR * variance_D[-1]:
            raise ValueError(
                f"{step}: {num} utterances of {num_speakers} speakers are too few for {dim} "
                f"dimensions (at least 2 speakers, {dim + num_speakers} distinct ones); add some,"
                f" put lda with a smaller --lda-dim before it, or leave out {step}"
            )


@dataclass(frozen=True, eq=False)
class Affine:
    """x -> (x - offset) projection, applied to each row."""

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
    """Subtract the mean of the development utterances."""
    return Affine(development.table.emb_ND.mean(axis=0, dtype=np.float64))


def learn_lda(development: Development, *, dim: int | None = None) -> Affine:
    """Learn LDA: the `dim` directions v with the largest l in B v = l W v.

    W is the covariance within speakers, sum of (x - m_s)(x - m_s)' / M, and B that between them,
    sum of n_s (m_s - m)(m_s - m)' / M (Fukunaga, "Introduction to Statistical Pattern Recognition",
    1990, chapter 10). v' W v is 1. By default `dim` is the smaller of D and S - 1, all that B
    spans. Raises ValueError if `dim` is more, or W is singular (too few utterances).
    """
    means = SpeakerMeans.of(development)
    means.require_spread("lda")
    most = min(len(means.within_DD), len(means.names) - 1)
    if dim is not None and not 1 <= dim <= most:
        raise ValueError(
            f"lda: --lda-dim {dim} is not within 1 to {most}, the most that {len(means.names)} "
            f"speakers and {len(means.within_DD)} dimensions allow; correct it, or leave it out"
        )
    num = means.count_S.sum()
    apart_SD = means.mean_SD - means.count_S @ means.mean_SD / num
    between_DD = (apart_SD * means.count_S[:, None]).T @ apart_SD / num
    _, ascending_DD = eigh(between_DD, means.within_DD / num)
    return Affine(np.zeros(len(between_DD)), ascending_DD[:, ::-1][:, : dim or most])


def learn_whitening(development: Development) -> Affine:
    """Whiten with C^(-1/2), where C is the covariance of the development set.

    This is "ZCA" (Kessy, Lewin and Strimmer, The American Statistician 72, 2018). Raises ValueError
    if C is singular.
    """
    emb_MD = development.table.emb_ND.astype(np.float64)
    variance_D, direction_DD = eigh(np.atleast_2d(np.cov(emb_MD, rowvar=False, ddof=0)))
    if not variance_D[0] > SINGULAR * variance_D[-1]:
        raise ValueError(
            f"whiten: {len(emb_MD)} utterances are too few for {emb_MD.shape[1]} dimensions (more "
            f"distinct ones than dimensions); extract more training data, or score without whiten"
        )
    return Affine(np.zeros(emb_MD.shape[1]), (direction_DD / np.sqrt(variance_D)) @ direction_DD.T)
