"""A back end as a chain of steps, written `mean+lda+length+plda+asnorm`.

In: the steps' names and a development set to learn from. Out: a Chain, which scores any number of
trial lists.
Letters: N trials, E enrolment rows, T test rows, R rows of either, K numbers of a row that is ready
for the inner product.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.scoring.backend import dot_scores, row_lengths, unit_rows
from speakerlab.scoring.embeddings import EmbeddingTable, require_one_model
from speakerlab.scoring.norm import cohort_statistics, normalised
from speakerlab.scoring.plda import Plda, learn_plda
from speakerlab.scoring.spec import Spec
from speakerlab.scoring.transforms import (
    Affine,
    Development,
    SpeakerMeans,
    Transform,
    learn_lda,
    learn_mean,
    learn_whitening,
    to_unit_length,
)
from speakerlab.scoring.trials import Trials

__all__ = ["Chain", "Development", "Scored", "build_chain"]

# transform -> how it is learned from a development set; None where there is nothing to learn
LEARNERS: dict[str, Callable[..., Affine] | None] = {
    "mean": learn_mean,
    "lda": learn_lda,
    "whiten": learn_whitening,
    "length": None,
}
ENROL, TEST, LEARNED = "enrolment embeddings", "test embeddings", "development embeddings"


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores of trials and, for either side, what tells how far to trust them, each (N).

    "norm" is the length of the embedding as it was extracted; "cohort_mean", where scores were
    normalised, the mean of that side's scores against the cohort.
    """

    scores_N: NDArray[np.float32]
    enrol_quality: dict[str, np.ndarray]
    test_quality: dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Chain:
    """Built by `build_chain`; scores any number of trial lists."""

    name: str
    protocol: str  # one sentence, for the report
    transforms: tuple[Transform, ...]
    plda: Plda | None = None  # None: cosine
    cohort: EmbeddingTable | None = None  # transformed, a row a speaker; None: no normalisation
    top_n: int = 0  # of the cohort
    learned_from: EmbeddingTable | None = None

    def score(
        self,
        enrol: EmbeddingTable,
        test: EmbeddingTable,
        trials: Trials,
        *,
        num_enrol: Mapping[str, int] | None = None,
    ) -> Scored:
        """Score every trial, in bounded memory beside the tables.

        `num_enrol`: enrolment id -> of how many recordings its embedding is the mean, 1 where it is
        not named; PLDA alone makes use of it. Raises ValueError for utterances without embedding,
        for embeddings without direction, and for tables of different models.
        """
        require_one_model([enrol, test, *([self.learned_from] if self.learned_from else [])])
        enrol = enrol.select(trials.enrol_ids, where=ENROL)
        test = test.select(trials.test_ids, where=TEST)
        quality_E: dict[str, np.ndarray] = {
            "norm": row_lengths(enrol.emb_ND, enrol.ids, where=ENROL)
        }
        quality_T: dict[str, np.ndarray] = {"norm": row_lengths(test.emb_ND, test.ids, where=TEST)}
        num_E = [(num_enrol or {}).get(name, 1) for name in enrol.ids]
        enrol_EK = self._enrol_side(transformed(enrol, self.transforms), num_E)
        test_TK = self._test_side(transformed(test, self.transforms), where=TEST)
        scores_N = dot_scores(enrol_EK, test_TK, trials)
        if self.cohort is not None:
            by_enrol = cohort_statistics(
                enrol_EK, self._test_side(self.cohort), top_n=self.top_n, ids=enrol.ids, where=ENROL
            )
            by_test = cohort_statistics(
                test_TK, self._enrol_side(self.cohort), top_n=self.top_n, ids=test.ids, where=TEST
            )
            scores_N = normalised(scores_N, trials, by_enrol, by_test)
            quality_E["cohort_mean"], quality_T["cohort_mean"] = by_enrol.mean_R, by_test.mean_R
        return Scored(
            scores_N, _of_trials(quality_E, trials.enrol_N), _of_trials(quality_T, trials.test_N)
        )

    def _enrol_side(self, table: EmbeddingTable, num_E: ArrayLike = 1) -> np.ndarray:
        if self.plda is None:
            return unit_rows(table.emb_ND, table.ids, where=ENROL)
        return self.plda.enrol_side(table.emb_ND, num_E)

    def _test_side(self, table: EmbeddingTable, where: str = LEARNED) -> np.ndarray:
        if self.plda is None:
            return unit_rows(table.emb_ND, table.ids, where=where)
        return self.plda.test_side(table.emb_ND)


def build_chain(
    spec: str,
    development: Development | None,
    *,
    top_n: int = 300,
    lda_dim: int | None = None,
    adaptation: EmbeddingTable | None = None,
) -> Chain:
    """A chain from its steps joined by "+": transforms, one scorer, at most one normalisation.

    What is learned is learned from `development`, each step from what the steps before it make of
    it. The cohort is the mean embedding of each development speaker, put through the transforms
    (as WeSpeaker's local/score_norm.sh has it); `top_n` of AS-Norm is at most its size. `lda_dim`
    is for the step lda. `adaptation` (embeddings of the trials' domain, not of the trials, whose
    speakers need not be known) is what a PLDA is adapted to. Raises ValueError for a spec that
    cannot be read and for a development set that is missing or too small.
    """
    steps = Spec.read(spec)
    if development is None:
        if steps.learned:
            raise ValueError(
                f"backend: '{spec}' learns {', '.join(steps.learned)} from a development set, got "
                "none; extract the training set, or score by 'cosine'"
            )
        return Chain(spec, steps.protocol(), tuple(to_unit_length for _ in steps.transforms))
    row_lengths(development.table.emb_ND, development.table.ids, where=LEARNED)
    learned, transforms = _learned_transforms(steps.transforms, development, lda_dim)
    plda = learn_plda(learned) if steps.scorer == "plda" else None
    if plda and adaptation:
        require_one_model([development.table, adaptation])
        plda = plda.adapted(transformed(adaptation, transforms).emb_ND)
    cohort = transformed(_speaker_table(development), transforms) if steps.normalisation else None
    num_nearest = _num_nearest(steps.normalisation, cohort, top_n) if cohort else 0
    protocol = steps.protocol(
        num_dims=learned.table.emb_ND.shape[1],
        num_adapted=len(adaptation.ids) if adaptation else 0,
        num_nearest=num_nearest,
        asked_for=top_n,
        num_utterances=len(development.table.ids),
        num_speakers=len(set(development.speaker_M)),
    )
    return Chain(spec, protocol, transforms, plda, cohort, num_nearest, development.table)


def transformed(table: EmbeddingTable, transforms: Sequence[Transform]) -> EmbeddingTable:
    """The table after each transform in turn."""
    for transform in transforms:
        table = transform(table)
    return table


def _learned_transforms(
    steps: Sequence[str], development: Development, lda_dim: int | None
) -> tuple[Development, tuple[Transform, ...]]:
    """The development set after all transforms, and these."""
    transforms: list[Transform] = []
    for step in steps:
        learn = LEARNERS[step]
        options = {"dim": lda_dim} if step == "lda" else {}
        transforms.append(to_unit_length if learn is None else learn(development, **options))
        development = replace(development, table=transforms[-1](development.table))
    return development, tuple(transforms)


def _speaker_table(development: Development) -> EmbeddingTable:
    """The mean embedding of each speaker, under the speaker's name."""
    means = SpeakerMeans.of(development)
    return EmbeddingTable(
        means.names, means.mean_SD.astype(np.float32), development.table.model_sha256
    )


def _num_nearest(normalisation: str | None, cohort: EmbeddingTable, top_n: int) -> int:
    size = len(cohort.ids)
    if size < 2 or top_n < 2:
        raise ValueError(
            f"{normalisation}: takes the deviation of at least 2 scores, got a cohort of "
            f"{size} speakers and top_n {top_n}; use more speakers, or score without"
        )
    return min(top_n, size) if normalisation == "asnorm" else size


def _of_trials(
    quality: Mapping[str, np.ndarray], row_N: NDArray[np.int32]
) -> dict[str, np.ndarray]:
    """What is known of rows, for each trial."""
    return {name: values_R.astype(np.float32)[row_N] for name, values_R in quality.items()}
