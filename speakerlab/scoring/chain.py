"""Back ends: chains of steps from two embeddings to a score, such as `mean+lda+length+plda+asnorm`.

In: the steps' names and a development set to learn from. Out: a Chain, which scores any number of
trial lists.
Letters: N trials, E enrolment rows, T test rows, R rows of either, K numbers of a row as the inner
product takes it, F features of a trial.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.scoring.embeddings import EmbeddingTable, require_one_model
from speakerlab.scoring.minima import require_development
from speakerlab.scoring.pair_scores import (
    cohort_statistics,
    dot_scores,
    normalised,
    row_lengths,
    unit_rows,
)
from speakerlab.scoring.plda import Plda, learn_plda
from speakerlab.scoring.transforms import (
    Development,
    SpeakerMeans,
    Transform,
    learn_lda,
    learn_mean,
    learn_whitening,
    to_unit_length,
)
from speakerlab.scoring.trials import Trials

TRANSFORMS: dict[str, tuple[Callable[..., Transform], str]] = {  # also in words, for the report
    "mean": (learn_mean, "centred on the development mean"),
    "lda": (learn_lda, "projected to {num_dims} dimensions by LDA"),
    "whiten": (learn_whitening, "whitened"),
    "length": (lambda _: to_unit_length, "scaled to unit length"),
}
SCORERS = {
    "cosine": "the cosine of the embeddings",
    "plda": "the log-likelihood ratio of a two-covariance PLDA",
}
NORMALISATIONS = {"snorm": "S-Norm", "asnorm": "AS-Norm"}
LEARNED = {"mean", "lda", "whiten", "plda", *NORMALISATIONS}
QMF = "+qmf"
QUALITY = "log durations, norms and cohort means are added by logistic regression"
LEARNED_FROM = "learned from {:,} utterances of {:,} speakers that occur in no trial"
USUAL_TOP_N = 300
ENROL, TEST, DEVELOPMENT = "enrolment embeddings", "test embeddings", "development embeddings"


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores of trials and, for `+qmf`, quality measures.

    "norm" is the length of the embedding as extracted; "cohort_mean", where scores were normalised,
    is the mean score of that side against the cohort.
    """

    scores_N: NDArray[np.float32]
    quality: dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (enrolment side, test side), (N)


@dataclass(frozen=True, eq=False)
class Chain:
    """A back end made by `build_chain`."""

    name: str  # the steps, and the options that differ from the usual, as in "lda-dim=50"
    protocol: str  # one sentence, for the report
    transforms: tuple[Transform, ...]
    plda: Plda | None = None  # None: cosine
    cohort: EmbeddingTable | None = None  # transformed, a row per speaker; None: no normalisation
    top_n: int = 0  # of the cohort
    with_quality: bool = False  # calibration also takes quality measures
    learned_from: EmbeddingTable | None = None

    def score(
        self,
        enrol: EmbeddingTable,
        test: EmbeddingTable,
        trials: Trials,
        *,
        num_enrol: Mapping[str, int] | None = None,
    ) -> Scored:
        """Score every trial; memory beside the tables is bounded.

        `num_enrol`: enrolment id -> number of recordings that its embedding is the mean of
        (default 1); only PLDA uses it. Raises ValueError for utterances without embedding, for
        embeddings of length 0, and for tables of different models.
        """
        require_one_model([enrol, test, *([self.learned_from] if self.learned_from else [])])
        enrol = enrol.select(trials.enrol_ids, where=ENROL)
        test = test.select(trials.test_ids, where=TEST)
        norm_E = row_lengths(enrol.emb_ND, enrol.ids, where=ENROL)
        norm_T = row_lengths(test.emb_ND, test.ids, where=TEST)
        quality = {"norm": (norm_E, norm_T)}
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
            quality["cohort_mean"] = by_enrol[0].astype(np.float32), by_test[0].astype(np.float32)
        if not self.with_quality:
            return Scored(scores_N, {})
        e_N, t_N = trials.enrol_N, trials.test_N
        return Scored(scores_N, {name: (e[e_N], t[t_N]) for name, (e, t) in quality.items()})

    def features(
        self, scored: Scored, seconds: tuple[np.ndarray, np.ndarray] | None
    ) -> tuple[NDArray[np.float32], tuple[str, ...]]:
        """Return what calibration learns from: (features (N, F), their names).

        That is the score and, for `+qmf`, the lower and the higher of both sides' quality measures
        and log durations (`seconds`, (N) each; None: unknown). These are the measures of
        Thienpondt, Desplanques and Demuynck, "The IDLAB VoxSRC-20 submission" (ICASSP 2021), sorted
        so that swapping enrolment and test changes nothing.
        """
        if not self.with_quality:
            return scored.scores_N[:, None], ("score",)
        pairs = dict(scored.quality)
        if seconds is not None:
            pairs["log_seconds"] = (np.log(seconds[0]), np.log(seconds[1]))
        names, columns = ["score"], [scored.scores_N]
        for name, sides in pairs.items():
            names += [f"lower_{name}", f"higher_{name}"]
            columns += [np.minimum(*sides), np.maximum(*sides)]
        return np.stack(columns, axis=1).astype(np.float32), tuple(names)

    def _enrol_side(self, table: EmbeddingTable, num_E: ArrayLike = 1) -> np.ndarray:
        if self.plda is None:
            return unit_rows(table.emb_ND, table.ids, where=ENROL)
        return self.plda.enrol_side(table.emb_ND, num_E)

    def _test_side(self, table: EmbeddingTable, where: str = DEVELOPMENT) -> np.ndarray:
        if self.plda is None:
            return unit_rows(table.emb_ND, table.ids, where=where)
        return self.plda.test_side(table.emb_ND)


def build_chain(
    spec: str,
    development: Development | None,
    *,
    top_n: int = USUAL_TOP_N,
    lda_dim: int | None = None,
    adapt: tuple[str, EmbeddingTable] | None = None,
) -> Chain:
    """Build a back end from steps joined by "+": transforms, a scorer, a normalisation, qmf.

    Each step is learned from the `development` set as the steps before it transform it. The cohort
    is the transformed mean embedding of each development speaker (as in WeSpeaker's
    local/score_norm.sh); AS-Norm takes the `top_n` nearest. `lda_dim` is for lda. `adapt` (name and
    embeddings of the trials' domain, not of the trials; speakers need not be known) is what PLDA is
    adapted to. Raises ValueError for a spec that cannot be read and for a missing development set,
    TooFewError if the development set is too small.
    """
    steps = spec.removesuffix(QMF).split("+")
    transform_steps, scorer, normalisation = _parse(steps, spec)
    learned = [step for step in steps if step in LEARNED]
    is_qmf = spec.endswith(QMF)
    qmf = QUALITY if is_qmf else ""
    if development is None:
        if learned:
            raise ValueError(
                f"backend: '{spec}' needs a development set to learn {', '.join(learned)}; make "
                "one with `speakerlab extract --per-speaker 10`, or score with cosine"
            )
        protocol = _protocol(transform_steps, 0, SCORERS[scorer], qmf)
        to_length = tuple(to_unit_length for _ in transform_steps)
        return Chain(spec, protocol, to_length, with_quality=is_qmf)
    row_lengths(development.table.emb_ND, development.table.ids, where=DEVELOPMENT)
    done, transforms = _learn_transforms(transform_steps, development, lda_dim)
    plda, adapted, options = None, "", [f"lda-dim={lda_dim}"] if lda_dim and "lda" in steps else []
    if scorer == "plda":
        _require("plda", done)
        plda = learn_plda(done)
        if adapt is not None:
            require_one_model([development.table, adapt[1]])
            plda = plda.adapted(transformed(adapt[1], transforms).emb_ND)
            adapted = f", adapted to {len(adapt[1].ids):,} utterances without speaker labels"
            options.append(f"adapt={adapt[0]}")
    cohort, num_nearest, normalised_by = None, 0, ""
    if normalisation is not None:
        _require(normalisation, done)
        means = SpeakerMeans.of(development)
        mean_SD = means.mean_SD.astype(np.float32)
        cohort = EmbeddingTable(means.names, mean_SD, development.table.model_sha256)
        cohort = transformed(cohort, transforms)
        num_nearest, normalised_by = _nearest(normalisation, len(cohort.ids), top_n)
        if normalisation == "asnorm" and top_n != USUAL_TOP_N:
            options.append(f"top-n={top_n}")
    table = development.table
    sizes = len(table.ids), len(set(development.speaker_M))
    source = LEARNED_FROM.format(*sizes) if learned else ""
    num_dims, scored = done.table.emb_ND.shape[1], SCORERS[scorer] + adapted
    protocol = _protocol(transform_steps, num_dims, scored, normalised_by, source, qmf)
    name = ",".join([spec, *options])
    return Chain(name, protocol, transforms, plda, cohort, num_nearest, is_qmf, table)


def transformed(table: EmbeddingTable, transforms: Sequence[Transform]) -> EmbeddingTable:
    """Apply each transform in turn to a table."""
    for transform in transforms:
        table = transform(table)
    return table


def _parse(steps: Sequence[str], spec: str) -> tuple[list[str], str, str | None]:
    """Return (transforms, scorer, normalisation); raise ValueError for a wrong step or order."""
    known = [*TRANSFORMS, *SCORERS, *NORMALISATIONS]
    for step in steps:
        if step not in known:
            raise ValueError(
                f"backend: unknown step '{step}' in '{spec}'; known: {', '.join(known)}, and qmf "
                "at the end; join steps with +, separate back ends with blanks"
            )
    left = list(steps)
    normalisation = left.pop() if left[-1] in NORMALISATIONS else None
    scorer = left.pop() if left else ""
    if scorer not in SCORERS or not TRANSFORMS.keys() >= set(left) or len(set(left)) < len(left):
        raise ValueError(
            f"backend: steps out of order in '{spec}'; use any of {', '.join(TRANSFORMS)}, then "
            f"{' or '.join(SCORERS)}, then optionally {' or '.join(NORMALISATIONS)}, then "
            "optionally qmf, each once"
        )
    return left, scorer, normalisation


def _protocol(steps: Sequence[str], num_dims: int, scored: str, *others: str) -> str:
    """Describe the steps and what they were learned from, in one sentence."""
    done = [TRANSFORMS[step][1].format(num_dims=num_dims) for step in steps]
    first = f"embeddings are first {', then '.join(done)}" if done else ""
    return "; ".join(filter(None, [f"scored with {scored}", first, *others]))


def _learn_transforms(
    steps: Sequence[str], development: Development, lda_dim: int | None
) -> tuple[Development, tuple[Transform, ...]]:
    """Return the development set after all transforms, and these."""
    transforms: list[Transform] = []
    for step in steps:
        _require(step, development)
        options = {"dim": lda_dim} if step == "lda" else {}
        transforms.append(TRANSFORMS[step][0](development, **options))
        development = replace(development, table=transforms[-1](development.table))
    return development, tuple(transforms)


def _require(step: str, development: Development) -> None:
    num, num_dims = development.table.emb_ND.shape
    require_development(step, num, len(set(development.speaker_M)), num_dims)


def _nearest(normalisation: str, size: int, top_n: int) -> tuple[int, str]:
    """Return (number of cohort speakers that a row is compared with, the step in words)."""
    if top_n < 2:
        raise ValueError(f"--top-n: {top_n} scores have no deviation; use e.g. {USUAL_TOP_N}")
    num = min(top_n, size) if normalisation == "asnorm" else size
    capped = f" ({top_n:,} requested)" if num < top_n else ""
    nearest = f"the {num:,}{capped} nearest of " if normalisation == "asnorm" else ""
    cohort = f"a cohort of the mean embeddings of {size:,} speakers"
    return num, f"{NORMALISATIONS[normalisation]} with {nearest}{cohort}"
