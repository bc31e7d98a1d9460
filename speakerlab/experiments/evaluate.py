"""From embeddings to results. In: an experiment, trial lists, back ends. Out: scores and rows.

Letters: N trials, F features of a trial.
A back end is a chain of steps (`scoring/chain.py`); `+qmf` at its end adds what tells how far a
score can be trusted. Nothing is learned from the trials themselves, but for `calibration="cross"`,
by which no trial is read by what was learned from either of its speakers.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from speakerlab.experiments import report
from speakerlab.experiments.development import DevelopmentSet
from speakerlab.experiments.embedded import are_embedded, read_embedded
from speakerlab.experiments.report_page import ListScores
from speakerlab.experiments.trial_list import TrialList
from speakerlab.scoring.calibration import Calibration, quality
from speakerlab.scoring.chain import Chain, Scored, build_chain
from speakerlab.scoring.conditions import condition_rows
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.intervals import Replicates, bootstrap, interval, paired, summary
from speakerlab.scoring.linear import cross_validated, fit_linear
from speakerlab.scoring.metrics import P_TARGETS, act_dcf, cllr, eer, min_cllr
from speakerlab.scoring.quality import quality_features

log = logging.getLogger(__name__)
QMF = "+qmf"
Learning = Literal["auto", "validation", "cross", "none"]
LEARNINGS = ("auto", "validation", "cross", "none")
NUM_FOLDS = 5
USUAL_TOP_N = 300


@dataclass(frozen=True)
class BackEnd:
    """A chain, and whether quality measures are added to its scores."""

    chain: Chain
    with_quality: bool
    options: tuple[str, ...] = ()  # that differ from the usual ones, as in "lda-dim=50"

    @property
    def name(self) -> str:
        """The steps, and the options that others of these steps may not have."""
        return ",".join([self.chain.name + (QMF if self.with_quality else ""), *self.options])

    @property
    def protocol(self) -> str:
        added = "; log durations, norms and cohort means are added by logistic regression"
        return self.chain.protocol + (added if self.with_quality else "")


@dataclass(frozen=True)
class System:
    """What is evaluated: a model's embeddings, and what its scores mean as far as it knows."""

    exp_dir: Path
    card: Mapping[str, Any]
    calibration: Calibration | None
    development: DevelopmentSet | None


@dataclass(frozen=True)
class Read:
    """Scores as log-likelihood ratios, and what they were learned from."""

    llr_N: np.ndarray
    source: str


def build_back_ends(
    specs: Sequence[str],
    development: DevelopmentSet | None,
    *,
    top_n: int = USUAL_TOP_N,
    lda_dim: int | None = None,
    adapt: tuple[str, EmbeddingTable] | None = None,
) -> list[BackEnd]:
    """Back ends by their names, such as `mean+cosine+asnorm+qmf`.

    adapt: the name of a set and its embeddings, which a PLDA is adapted to.
    """
    options = {
        "lda": [] if lda_dim is None else [f"lda-dim={lda_dim}"],
        "asnorm": [] if top_n == USUAL_TOP_N else [f"top-n={top_n}"],
        "plda": [] if adapt is None else [f"adapt={adapt[0]}"],
    }
    return [
        BackEnd(
            build_chain(
                spec.removesuffix(QMF),
                None if development is None else development.cohort,
                top_n=top_n,
                lda_dim=lda_dim,
                adaptation=None if adapt is None else adapt[1],
            ),
            spec.endswith(QMF),
            tuple(text for step in spec.split("+") for text in options.get(step, [])),
        )
        for spec in specs
    ]


def evaluate(
    system: System,
    listed: TrialList,
    back_ends: Sequence[BackEnd],
    *,
    learning: Learning = "auto",
    p_targets: Sequence[float] = P_TARGETS,
) -> tuple[list[report.Row], list[ListScores]]:
    """Score a list with every back end; the others are compared with the first.

    learning: whose trials tell what scores mean: `validation`, those of the development set's
    held-out speakers; `cross`, those of the list, by cross-validation over speakers; `none`; or
    `auto`: the calibration stored with the model for plain cosine scores; for others the held-out
    speakers where there are enough, else `cross`.
    """
    tables = listed.tables(read_embedded(system.exp_dir, listed.path.parent))
    untrained_N = score_untrained(system, listed)
    scores: list[ListScores] = []
    rows: list[report.Row] = []
    first: Replicates = {}
    for back_end in back_ends:
        scored = _score(back_end, listed, tables)
        read = read_as_llr(system, listed, back_end, scored, learning)
        if read is None and back_end.with_quality:
            log.info("%s: left out %s, which must be learned", listed.name, back_end.name)
            continue
        own = _together(listed, back_end, scored, read, untrained_N)
        drawn = bootstrap(
            own.scores_N,
            own.trials.is_target_N,
            *listed.speakers,
            llr=own.llr_N,
            p_targets=p_targets,
        )
        first = first or drawn
        row = _row(system, listed, back_end, own, read, drawn, p_targets)
        row["compared"] = _compared(row, rows[0], drawn, first) if rows else None
        scores.append(own)
        rows.append(row)
        source = "" if read is None else f", read as ratios by {read.source}"
        log.info("%s: scored by %s%s", listed.name, back_end.name, source)
    if not rows:
        raise ValueError(
            f"{listed.path}: nothing was scored, got too little to learn quality measures from; "
            "add a back end without qmf"
        )
    return rows, scores


def _together(
    listed: TrialList,
    back_end: BackEnd,
    scored: Scored,
    read: Read | None,
    untrained_N: np.ndarray | None,
) -> ListScores:
    """What is measured and shown; with quality measures the ratios are the scores."""
    llr_N = None if read is None else read.llr_N
    return ListScores(
        name=listed.name,
        backend=back_end.name,
        trials=listed.trials,
        scores_N=llr_N if back_end.with_quality and llr_N is not None else scored.scores_N,
        llr_N=llr_N,
        untrained_N=untrained_N if back_end.name == "cosine" else None,
        data_dir=listed.path.parent,
        utterances_of=listed.models,
    )


def _row(
    system: System,
    listed: TrialList,
    back_end: BackEnd,
    own: ListScores,
    read: Read | None,
    drawn: Replicates,
    p_targets: Sequence[float],
) -> report.Row:
    """What was measured of one list and back end."""
    is_target_N, calibrated = listed.trials.is_target_N, dict[str, Any]()
    if system.calibration is not None and back_end.name == "cosine":
        calibrated = dict(quality(system.calibration, own.scores_N, is_target_N))
    if own.llr_N is not None:
        calibrated["cllr"] = cllr(own.llr_N, is_target_N)
        calibrated["act_dcf"] = act_dcf(own.llr_N, is_target_N)
    untrained_N = own.untrained_N
    return report.result_row(
        trials=listed.name,
        system=system.exp_dir.name,
        eer_untrained=None if untrained_N is None else eer(untrained_N, is_target_N),
        backend=back_end.name,
        protocol=f"{listed.protocol}; {back_end.protocol}",
        model_sha256=system.card["sha256"],
        commit=system.card.get("commit"),
        calibrated=calibrated or None,
        bn_batch=system.card.get("bn_batch"),
        min_cllr=min_cllr(own.scores_N, is_target_N),
        intervals={name: interval(values_R) for name, values_R in drawn.items()},
        calibration=None if read is None else read.source,
        conditions=condition_rows(
            own.scores_N, listed.trials, listed.speakers, listed.columns, listed.seconds
        ),
        **summary(own.scores_N, is_target_N, drawn, p_targets=p_targets),
    )


def _compared(
    row: report.Row, first_row: report.Row, drawn: Replicates, first: Replicates
) -> dict[str, Any]:
    """This back end beside the first one, on the same trials."""
    found = paired(row["eer"] - first_row["eer"], drawn["eer"], first["eer"])
    return {
        "with": first_row["backend"],
        "eer_difference": found["difference"],
        "ci95": found["ci95"],
        "p_value": found["p_value"],
    }


def read_as_llr(
    system: System, listed: TrialList, back_end: BackEnd, scored: Scored, learning: Learning
) -> Read | None:
    """Scores as log-likelihood ratios; None where there is nothing to learn the map from."""
    stored, held_out = system.calibration, system.development and system.development.held_out
    if learning == "auto" and back_end.name == "cosine" and stored is not None:
        return Read(stored.llr(scored.scores_N), f"stored with the model, from {stored.source}")
    if learning == "auto" and held_out is None:
        try:
            return read_as_llr(system, listed, back_end, scored, "cross")
        except ValueError as error:  # a small list; its EER is worth telling all the same
            log.info("%s: no Cllr of %s, since %s", listed.name, back_end.name, error)
            return None
    if learning == "auto":
        learning = "validation"
    if learning == "none" and back_end.with_quality:
        raise ValueError(
            f"{back_end.name}: must learn from trials, got --calibration none; use cross or "
            "validation"
        )
    if learning == "none":
        return None
    features_NF, names = _features(back_end, listed, scored)
    if learning == "cross":
        llr_N = cross_validated(
            features_NF,
            listed.trials.is_target_N,
            *listed.speakers,
            names=names,
            num_folds=min(NUM_FOLDS, len(np.unique(listed.speakers))),
        )
        return Read(llr_N, f"{listed.name} itself, by cross-validation over speakers")
    if held_out is None or system.development is None:
        raise ValueError(
            f"{back_end.name}: --calibration validation needs at least 10 held-out speakers with "
            "two utterances in the development set, got fewer; use --calibration cross"
        )
    own = _score(back_end, held_out, held_out.tables(system.development.table))
    learned = fit_linear(
        _features(back_end, held_out, own)[0], held_out.trials.is_target_N, names=names
    )
    return Read(learned.llr(features_NF), held_out.name)


def score_untrained(system: System, listed: TrialList) -> np.ndarray | None:
    """Cosine scores of the initial weights, None where they were not extracted."""
    data_dir = listed.path.parent
    if not are_embedded(system.exp_dir, data_dir, untrained=True):
        log.info("%s: no untrained embeddings (extract --untrained), left out", listed.name)
        return None
    cosine = build_chain("cosine", None)
    table = read_embedded(system.exp_dir, data_dir, untrained=True)
    return cosine.score(*listed.tables(table), listed.trials).scores_N


def _score(
    back_end: BackEnd, listed: TrialList, tables: tuple[EmbeddingTable, EmbeddingTable]
) -> Scored:
    num_enrol = {model: len(names) for model, names in listed.models.items()}
    return back_end.chain.score(*tables, listed.trials, num_enrol=num_enrol)


def _features(
    back_end: BackEnd, listed: TrialList, scored: Scored
) -> tuple[np.ndarray, tuple[str, ...]]:
    """features_NF of the trials and what they are called: the score, and what goes with it."""
    if not back_end.with_quality:
        return scored.scores_N[:, None], ("score",)
    return quality_features(scored, *(listed.side_seconds() or (None, None)))
