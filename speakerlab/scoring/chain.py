"""Back ends: chains of steps from two embeddings to a score, such as `mean+lda+length+plda+asnorm`.

In: the steps' names and a development set to learn from. Out: a Chain, which scores any number of
trial lists.
Letters: N trials (in `emb_ND`: rows of a table), E enrolment rows, T test rows, M development
utterances, S development speakers, D dimensions of an embedding, K length of the vectors whose
inner product is the score, F features of a trial.
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

Sides = tuple[np.ndarray, np.ndarray]  # a value of the enrolment and of the test side

# Step -> the function that learns it, and its wording in the report.
TRANSFORMS: dict[str, tuple[Callable[..., Transform], str]] = {
    "mean": (learn_mean, "centred on the development mean"),
    "lda": (learn_lda, "projected to {num_dims} dimensions by LDA"),
    "whiten": (learn_whitening, "whitened"),
    # Learns nothing from the development set that it is given.
    "length": (lambda _: to_unit_length, "scaled to unit length"),
}
SCORERS = {
    "cosine": "the cosine of the embeddings",
    "plda": "the log-likelihood ratio of a two-covariance PLDA",
}
NORMALISATIONS = {"snorm": "S-Norm", "asnorm": "AS-Norm"}
# Steps that need a development set.
LEARNED_STEPS = {"mean", "lda", "whiten", "plda", *NORMALISATIONS}
# Quality measure functions: properties of a trial's two sides, which calibration weighs besides
# the score. They are not a step: `_read_spec` removes this suffix before it splits a spec.
QMF = "+qmf"
# Parts of the protocol.
QUALITY_TEXT = "log durations, norms and cohort means are added by logistic regression"
# `evaluate` refuses development speakers that occur in a trial.
SOURCE_TEXT = "learned from {:,} utterances of {:,} speakers that occur in no trial"
USUAL_TOP_N = 300
# Names of tables in error messages.
ENROL = "enrolment embeddings"
TEST = "test embeddings"
DEVELOPMENT = "development embeddings"


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores of trials and, for `+qmf`, quality measures.

    Keys of `quality`: "norm" is the length of the embedding as extracted; "cohort_mean", where
    scores were normalised, is the mean score of that side against the cohort.
    """

    scores_N: NDArray[np.float32]
    # Name -> the measure of both sides of each trial, (N) each.
    quality: dict[str, Sides]


@dataclass(frozen=True, eq=False)
class Chain:
    """A back end made by `build_chain`."""

    # The steps, and the options that differ from the usual, as in "lda-dim=50".
    name: str
    protocol: str  # one sentence, for the report
    transforms: tuple[Transform, ...]
    plda: Plda | None = None  # None: cosine
    # Transformed, a row per development speaker. None: scores are not normalised.
    cohort: EmbeddingTable | None = None
    # Number of cohort speakers that an embedding is compared with: all, or the nearest ones.
    num_compared: int = 0
    with_quality: bool = False  # calibration also takes quality measures
    # The development set before all transforms: trials must be of the same model.
    learned_from: EmbeddingTable | None = None
    # Its speakers, if a step was learned from them: they may be in no trial.
    learned_speakers: frozenset[str] = frozenset()

    def score(
        self,
        enrol: EmbeddingTable,
        test: EmbeddingTable,
        trials: Trials,
        *,
        num_enrol: Mapping[str, int] | None = None,
    ) -> Scored:
        """Score every trial. The memory does not grow with enrolments x tests.

        num_enrol: enrolment id -> number of recordings that its embedding is the mean of (default
        1); only PLDA uses it. Raises ValueError for utterances without embedding, for
        embeddings of length 0, and for tables of different models.
        """
        tables = [enrol, test]
        if self.learned_from is not None:
            tables.append(self.learned_from)
        require_one_model(tables)

        # Rows in the order of the trials' ids, so that enrol_N and test_N index them.
        enrol = enrol.select(trials.enrol_ids, where=ENROL)
        test = test.select(trials.test_ids, where=TEST)
        # Before the transforms: `length` would make all norms equal.
        norm_E = row_lengths(enrol.emb_ND, enrol.ids, where=ENROL)
        norm_T = row_lengths(test.emb_ND, test.ids, where=TEST)
        quality: dict[str, Sides] = {"norm": (norm_E, norm_T)}

        recordings_of = num_enrol or {}
        num_E = [recordings_of.get(name, 1) for name in enrol.ids]
        transformed_enrol = transformed(enrol, self.transforms)
        enrol_EK = self._enrol_side(transformed_enrol, num_E, where=ENROL)
        transformed_test = transformed(test, self.transforms)
        test_TK = self._test_side(transformed_test, where=TEST)
        scores_N = dot_scores(enrol_EK, test_TK, trials)

        if self.cohort is not None:
            # PLDA scores an enrolment side against a test side only, so the cohort takes the side
            # that is opposite to the rows.
            enrol_statistics = cohort_statistics(
                enrol_EK,
                self._test_side(self.cohort),
                top_n=self.num_compared,
                ids=enrol.ids,
                where=ENROL,
            )
            test_statistics = cohort_statistics(
                test_TK,
                self._enrol_side(self.cohort),
                top_n=self.num_compared,
                ids=test.ids,
                where=TEST,
            )
            scores_N = normalised(scores_N, trials, enrol_statistics, test_statistics)
            mean_E, _ = enrol_statistics
            mean_T, _ = test_statistics
            quality["cohort_mean"] = (
                mean_E.astype(np.float32),
                mean_T.astype(np.float32),
            )

        if not self.with_quality:
            return Scored(scores_N, {})
        quality_of_trials: dict[str, Sides] = {}
        for name, (value_E, value_T) in quality.items():
            enrol_value_N = value_E[trials.enrol_N]
            test_value_N = value_T[trials.test_N]
            quality_of_trials[name] = (enrol_value_N, test_value_N)
        return Scored(scores_N, quality_of_trials)

    def features(
        self, scored: Scored, seconds: Sides | None
    ) -> tuple[NDArray[np.float32], tuple[str, ...]]:
        """Return what calibration learns from: (features (N, F), their names).

        That is the score and, for `+qmf`, the lower and the higher of both sides' quality measures
        and log durations (`seconds`, (N) each; None: unknown). These are the measures of
        Thienpondt, Desplanques and Demuynck, "The IDLAB VoxSRC-20 submission" (ICASSP 2021), sorted
        so that swapping enrolment and test changes nothing.
        """
        if not self.with_quality:
            return scored.scores_N[:, None], ("score",)
        quality = dict(scored.quality)
        if seconds is not None:
            enrol_seconds_N, test_seconds_N = seconds
            log_seconds = np.log(enrol_seconds_N), np.log(test_seconds_N)
            quality["log_seconds"] = log_seconds

        names = ["score"]
        columns = [scored.scores_N]
        for name, (enrol_value_N, test_value_N) in quality.items():
            names += [f"lower_{name}", f"higher_{name}"]
            columns.append(np.minimum(enrol_value_N, test_value_N))
            columns.append(np.maximum(enrol_value_N, test_value_N))
        features_NF = np.stack(columns, axis=1)
        return features_NF.astype(np.float32), tuple(names)

    def _enrol_side(
        self,
        table: EmbeddingTable,
        num_E: ArrayLike = 1,
        where: str = DEVELOPMENT,
    ) -> np.ndarray:
        """Return enrolment vectors (E, K): their inner products with test vectors are the scores.

        table: transformed embeddings. num_E: the number of recordings that each embedding is the
        mean of. where: the name of the table, for the error if a length is 0; PLDA needs no length.
        The defaults fit the cohort, whose speaker means count as single recordings.
        """
        if self.plda is None:
            return unit_rows(table.emb_ND, table.ids, where=where)
        return self.plda.enrol_side(table.emb_ND, num_E)

    def _test_side(self, table: EmbeddingTable, where: str = DEVELOPMENT) -> np.ndarray:
        """Return test vectors (T, K); `table` and `where` are those of `_enrol_side`."""
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
    local/score_norm.sh); AS-Norm takes the `top_n` nearest.

    lda_dim: dimensions that LDA keeps. adapt: name, for the report, and embeddings of other
    utterances from the trials' domain, to which PLDA is adapted; their speakers need not be known.
    A back end without PLDA ignores it: `speakerlab score --adapt` has several back ends.

    Raises ValueError for a spec that cannot be read and for a missing development set, TooFewError
    if the development set is too small.
    """
    steps = _read_spec(spec)
    if development is None:
        return _unlearned_chain(steps)

    table = development.table
    # Raises for embeddings of length 0: the transforms could hide them.
    row_lengths(table.emb_ND, table.ids, where=DEVELOPMENT)
    transformed_development, transforms = _learn_transforms(
        steps.transforms, development, lda_dim
    )
    options = _unusual_options(steps, lda_dim=lda_dim, adapt=adapt, top_n=top_n)

    plda = None
    adaptation = ""
    if steps.scorer == "plda":
        _require("plda", transformed_development)
        plda = learn_plda(transformed_development)
        if adapt is not None:
            _, adapt_table = adapt
            require_one_model([table, adapt_table])
            plda = plda.adapted(transformed(adapt_table, transforms).emb_ND)
            num_adapt = len(adapt_table.ids)
            adaptation = f", adapted to {num_adapt:,} utterances without speaker labels"

    cohort = None
    num_compared = 0
    normalisation = ""
    if steps.normalisation is not None:
        _require(steps.normalisation, transformed_development)
        # The untransformed set: first the means are taken, then they are transformed.
        cohort = _speaker_means(development, transforms)
        num_speakers = len(cohort.ids)
        num_compared = _num_compared(steps.normalisation, num_speakers, top_n)
        normalisation = _describe_normalisation(
            steps.normalisation,
            num_compared=num_compared,
            num_speakers=num_speakers,
            top_n=top_n,
        )

    source = ""
    learned_speakers = frozenset[str]()
    if steps.learned():
        learned_speakers = frozenset(development.speaker_M)
        source = SOURCE_TEXT.format(len(table.ids), len(learned_speakers))
    protocol = _protocol(
        steps,
        num_dims=transformed_development.table.emb_ND.shape[1],
        adaptation=adaptation,
        normalisation=normalisation,
        source=source,
    )
    return Chain(
        name=",".join([spec, *options]),
        protocol=protocol,
        transforms=transforms,
        plda=plda,
        cohort=cohort,
        num_compared=num_compared,
        with_quality=steps.with_quality,
        # Even if no step was learned, a development set of another model is a mistake.
        learned_from=table,
        learned_speakers=learned_speakers,
    )


def _unusual_options(
    steps: "_Steps",
    *,
    lda_dim: int | None,
    adapt: tuple[str, EmbeddingTable] | None,
    top_n: int,
) -> list[str]:
    """Return the options that differ from the usual and have an effect, for the chain's name."""
    options: list[str] = []
    if lda_dim and "lda" in steps.transforms:
        options.append(f"lda-dim={lda_dim}")
    if adapt is not None and steps.scorer == "plda":
        adapt_name, _ = adapt
        options.append(f"adapt={adapt_name}")
    if steps.normalisation == "asnorm" and top_n != USUAL_TOP_N:
        options.append(f"top-n={top_n}")
    return options


def transformed(
    table: EmbeddingTable, transforms: Sequence[Transform]
) -> EmbeddingTable:
    """Apply each transform in turn to a table."""
    for transform in transforms:
        table = transform(table)
    return table


@dataclass(frozen=True)
class _Steps:
    """The steps that a spec names."""

    spec: str
    transforms: list[str]
    scorer: str
    normalisation: str | None
    with_quality: bool

    def learned(self) -> list[str]:
        """Return the steps that need a development set, in their order."""
        steps = [*self.transforms, self.scorer, self.normalisation]
        return [step for step in steps if step in LEARNED_STEPS]


def _read_spec(spec: str) -> _Steps:
    """Split a spec into its steps; raise ValueError for a wrong step or order."""
    names = spec.removesuffix(QMF).split("+")
    step_names = [*TRANSFORMS, *SCORERS, *NORMALISATIONS]
    for name in names:
        if name not in step_names:
            raise ValueError(
                f"backend: unknown step '{name}' in '{spec}'; known:"
                f" {', '.join(step_names)}, and qmf at the end; join steps with +, separate"
                " back ends with blanks"
            )

    # Take the normalisation and the scorer from the end; the transforms remain.
    remaining = list(names)
    normalisation = None
    if remaining[-1] in NORMALISATIONS:
        normalisation = remaining.pop()
    scorer = remaining.pop() if remaining else ""
    # False where a scorer or a normalisation comes too early, as in "cosine+mean+plda".
    are_transforms = all(name in TRANSFORMS for name in remaining)
    # True for "mean+mean+cosine": a transform may occur once.
    has_repeats = len(set(remaining)) < len(remaining)
    if scorer not in SCORERS or not are_transforms or has_repeats:
        raise ValueError(
            f"backend: steps out of order in '{spec}'; use any of"
            f" {', '.join(TRANSFORMS)}, then {' or '.join(SCORERS)}, then optionally"
            f" {' or '.join(NORMALISATIONS)}, then optionally qmf, each once"
        )
    return _Steps(
        spec=spec,
        transforms=remaining,
        scorer=scorer,
        normalisation=normalisation,
        with_quality=spec.endswith(QMF),
    )


def _unlearned_chain(steps: _Steps) -> Chain:
    """Build a back end without a development set; ValueError if a step needs one."""
    learned_steps = steps.learned()
    if learned_steps:
        raise ValueError(
            f"backend: '{steps.spec}' needs a development set to learn"
            f" {', '.join(learned_steps)}; make one with `speakerlab extract"
            " --per-speaker 10`, or score with cosine"
        )
    # The only transform that learns nothing is `length`.
    transforms = (to_unit_length,) if steps.transforms else ()
    return Chain(
        name=steps.spec,
        protocol=_protocol(steps),
        transforms=transforms,
        with_quality=steps.with_quality,
    )


def _learn_transforms(
    steps: Sequence[str],
    development: Development,
    lda_dim: int | None,
) -> tuple[Development, tuple[Transform, ...]]:
    """Return the development set after all transforms, and the transforms."""
    transforms: list[Transform] = []
    for step in steps:
        _require(step, development)  # `length` requires nothing
        if step == "lda":
            transform = learn_lda(development, dim=lda_dim)
        else:
            learn, _ = TRANSFORMS[step]
            transform = learn(development)
        transforms.append(transform)
        # The next step sees embeddings as this one leaves them, in learning as in scoring.
        development = replace(development, table=transform(development.table))
    return development, tuple(transforms)


def _require(step: str, development: Development) -> None:
    """Raise TooFewError if the development set is too small to learn a step from."""
    num_utterances, num_dims = development.table.emb_ND.shape
    num_speakers = len(set(development.speaker_M))
    require_development(step, num_utterances, num_speakers, num_dims)


def _speaker_means(
    development: Development, transforms: Sequence[Transform]
) -> EmbeddingTable:
    """Return the cohort: the mean embedding of each development speaker, then transformed."""
    means = SpeakerMeans.of(development)
    table = EmbeddingTable(
        ids=means.names,
        emb_ND=means.mean_SD.astype(np.float32),
        model_sha256=development.table.model_sha256,
    )
    return transformed(table, transforms)


def _num_compared(normalisation: str, num_speakers: int, top_n: int) -> int:
    """Return the number of cohort speakers that an embedding is compared with."""
    if normalisation == "snorm":
        return num_speakers
    if top_n < 2:
        raise ValueError(
            f"--top-n: {top_n} scores have no deviation; use e.g. {USUAL_TOP_N}"
        )
    return min(top_n, num_speakers)


def _describe_normalisation(
    normalisation: str,
    *,
    num_compared: int,
    num_speakers: int,
    top_n: int,
) -> str:
    """Return the normalisation in words, for the protocol."""
    nearest = ""
    if normalisation == "asnorm":
        capped = f" ({top_n:,} requested)" if num_compared < top_n else ""
        nearest = f"the {num_compared:,}{capped} nearest of "
    cohort = f"a cohort of the mean embeddings of {num_speakers:,} speakers"
    return f"{NORMALISATIONS[normalisation]} with {nearest}{cohort}"


def _protocol(
    steps: _Steps,
    *,
    num_dims: int = 0,
    adaptation: str = "",
    normalisation: str = "",
    source: str = "",
) -> str:
    """Describe the steps and what they were learned from, in one sentence."""
    transforms: list[str] = []
    for step in steps.transforms:
        _, text = TRANSFORMS[step]
        transforms.append(text.format(num_dims=num_dims))
    preparation = ""
    if transforms:
        preparation = f"embeddings are first {', then '.join(transforms)}"
    parts = [
        f"scored with {SCORERS[steps.scorer]}{adaptation}",
        preparation,
        normalisation,
        source,
        QUALITY_TEXT if steps.with_quality else "",
    ]
    return "; ".join(part for part in parts if part)
