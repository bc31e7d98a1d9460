"""Evaluate trial lists. In: embeddings and back ends. Out: scores and rows of results.

Letters: N trials, M trials of held-out speakers, F features for calibration, K operating points.
A row of results.json holds rates as fractions; metrics that were not measured are null. Nothing is
learned from the trials themselves, except by `calibration="cross"`, where no trial is calibrated by
a model that saw either of its speakers.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from speakerlab.core.counting import count_of
from speakerlab.data.treatments import Treatment
from speakerlab.experiments import results
from speakerlab.experiments.embedded import DevelopmentSet, are_embedded, read_embedded
from speakerlab.experiments.trial_list import ListScores, TrialList
from speakerlab.scoring import metrics
from speakerlab.scoring.bootstrap import Replicates, bootstrap
from speakerlab.scoring.calibration import Calibration
from speakerlab.scoring.chain import Chain, Scored, build_chain
from speakerlab.scoring.conditions import condition_rows, measure_condition
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.linear import cross_validated, fit_linear
from speakerlab.scoring.minima import TooFewError, min_speakers

log = logging.getLogger(__name__)
LearnFrom = Literal["auto", "validation", "cross", "none"]
LEARN_FROM = get_args(LearnFrom)


@dataclass(frozen=True)
class System:
    """Model under evaluation: its embeddings, its calibration, its development set."""

    exp_dir: Path
    card: Mapping[str, Any]
    calibration: Calibration | None
    development: DevelopmentSet | None
    # Whose embeddings the enrolment side has; None: of `exp_dir`, too.
    enrol_exp_dir: Path | None = None


def evaluate(
    system: System,
    listed: TrialList,
    back_ends: Sequence[Chain],
    *,
    learn_from: LearnFrom = "auto",
    p_targets: Sequence[float] = metrics.P_TARGETS,
    treatments: Sequence[Treatment] = (),
) -> tuple[list[results.Row], list[ListScores], list[str]]:
    """Score a list with every back end; compare each with the first, the primary back end.

    Return rows of results, scores, and a line for each skipped back end, which has too little data
    to learn from. Raises TooFewError if the primary back end has too little data.
    learn_from: the trials for calibration. `validation`: trials of held-out speakers of the
    development set; `cross`: the list's own trials, by cross-validation over speakers; `none`: no
    calibration; `auto`: the model's own calibration for plain cosine scores, else `validation` if
    there are enough held-out speakers, else `cross`.
    treatments: applied to the test side; each has a row in the conditions of every back end without
    quality measures. The embeddings of the treated utterances must exist.
    """
    trials = listed.trials
    folder = listed.path.parent
    enrol, test = read_sides(system, listed)
    treated: dict[Treatment, EmbeddingTable] = {}
    for treatment in treatments:
        treated[treatment] = read_embedded(
            system.exp_dir,
            folder,
            treatment=treatment,
        )
    # Where a teacher enrols, random weights know nothing of its space.
    untrained_N = None
    if system.enrol_exp_dir is None:
        untrained_N = score_untrained(system.exp_dir, listed)

    rows: list[results.Row] = []
    scores: list[ListScores] = []
    skipped: list[str] = []
    primary_replicates: Replicates | None = None
    for back_end in back_ends:
        _refuse_shared_speakers(back_end, listed)
        scored = back_end.score(enrol, test, trials, num_enrol=listed.num_enrol)
        try:
            llr_N, source = calibrate(system, listed, back_end, scored, learn_from)
        except TooFewError as error:
            # The primary back end is the result of the list, so it must not be skipped.
            if not rows:
                raise
            skipped.append(f"{listed.name}: skipped {back_end.name}: {error}")
            continue

        # Calibration with quality measures reorders the trials, so its ratios replace the scores.
        scores_N = scored.scores_N
        if back_end.with_quality and llr_N is not None:
            scores_N = llr_N
        list_scores = ListScores(
            listed,
            back_end.name,
            scores_N,
            llr_N=llr_N,
            untrained_N=untrained_N if back_end.name == "cosine" else None,
            fine_tuned=system.card.get("init_sha256") is not None,
        )
        replicates = bootstrap(
            scores_N,
            trials.is_target_N,
            *listed.speakers,
            llr=llr_N,
            p_targets=p_targets,
        )
        row = measure(
            system,
            list_scores,
            replicates,
            f"{listed.protocol}; {back_end.protocol}",
            source,
            p_targets,
        )

        if not back_end.with_quality:
            for treatment, treated_test in treated.items():
                row["conditions"].append(
                    _measure_treated(listed, back_end, enrol, treated_test, treatment)
                )
        if primary_replicates is None:
            row["primary"] = True
            primary_replicates = replicates
        else:
            row["compared"] = _compare(row, rows[0], replicates, primary_replicates)
        rows.append(row)
        scores.append(list_scores)
        calibrated = f"calibrated with {source}" if source else "uncalibrated"
        log.info("%s: scored with %s; %s", listed.name, back_end.name, calibrated)
    return rows, scores, skipped


def _refuse_shared_speakers(back_end: Chain, listed: TrialList) -> None:
    """Raise ValueError if a back end was learned from speakers of the list."""
    shared = sorted(back_end.learned_speakers & listed.speaker_names)
    if shared:
        raise ValueError(
            f"{listed.path}: {count_of(len(shared), 'speaker')} of the development set"
            f" occur in it, such as {shared[0]}, so {back_end.name} would know them; give"
            " other speakers with --development"
        )


def read_sides(
    system: System,
    listed: TrialList,
) -> tuple[EmbeddingTable, EmbeddingTable]:
    """Return the embeddings of enrolment and test of a list.

    They differ if a list has enrolment models of several utterances, or another model enrols.
    """
    folder = listed.path.parent
    enrol, test = listed.tables(read_embedded(system.exp_dir, folder))
    if system.enrol_exp_dir is not None:
        enrol, _ = listed.tables(read_embedded(system.enrol_exp_dir, folder))
    return enrol, test


def _measure_treated(
    listed: TrialList,
    back_end: Chain,
    enrol: EmbeddingTable,
    treated_test: EmbeddingTable,
    treatment: Treatment,
) -> dict[str, Any]:
    """Return the row of conditions for a list with a treated test side."""
    trials = listed.trials
    scored = back_end.score(enrol, treated_test, trials, num_enrol=listed.num_enrol)
    rates = measure_condition(scored.scores_N, trials.is_target_N, listed.speakers)
    return {
        "condition": treatment.condition,
        "value": treatment.value,
        **rates,
    }


def _compare(
    row: results.Row,
    primary_row: results.Row,
    replicates: Replicates,
    primary_replicates: Replicates,
) -> dict[str, Any]:
    """Return the difference of the EERs, with its interval and p-value."""
    # Both back ends use the same bootstrap draws of speakers, so their difference varies less than
    # either EER.
    ci95, p_value = replicates.paired(primary_replicates, "eer")
    return {
        "with": primary_row["backend"],
        "eer_difference": row["eer"] - primary_row["eer"],
        "ci95": ci95,
        "p_value": p_value,
    }


def calibrate(
    system: System,
    listed: TrialList,
    back_end: Chain,
    scored: Scored,
    learn_from: LearnFrom,
) -> tuple[np.ndarray | None, str | None]:
    """Return log-likelihood ratios and the source of the calibration; None without one.

    Raises TooFewError if there are too few speakers to learn from. With `auto`, it is raised only
    for quality measures; other scores then stay uncalibrated.
    """
    stored = system.calibration
    development = system.development
    # The score and, if the back end uses them, quality measures of both sides.
    features_NF, names = back_end.features(scored, listed.side_seconds())
    # Calibration learned from fewer speakers does more harm than good: scoring/minima.py.
    least = min_speakers(len(names))
    held_out: TrialList | None = None
    if development is not None and development.held_out is not None:
        num_speakers = len(np.unique(development.held_out.speakers))
        if num_speakers >= least:
            held_out = development.held_out

    if learn_from == "none":
        # Quality measures cannot be added to a score without learned weights.
        if back_end.with_quality:
            raise ValueError(
                f"{back_end.name}: must learn from trials, got --calibration none; use"
                " cross or validation"
            )
        return None, None

    # A model's own calibration was learned from plain cosine scores.
    is_plain = back_end.name == "cosine"
    if learn_from == "auto" and is_plain and stored is not None:
        llr_N = stored.llr(scored.scores_N)
        return llr_N, f"the model's own calibration ({stored.source})"

    is_cross = learn_from == "cross" or (learn_from == "auto" and held_out is None)
    if is_cross:
        # No trial is calibrated by a model that saw one of its speakers.
        try:
            llr_N = cross_validated(
                features_NF,
                listed.trials.is_target_N,
                *listed.speakers,
                names=names,
            )
        except TooFewError as error:
            if learn_from == "cross" or back_end.with_quality:
                raise
            # Uncalibrated scores are enough for the EER and minDCF.
            log.warning(
                "%s: %s is not calibrated: %s",
                listed.name,
                back_end.name,
                error,
            )
            return None, None
        return llr_N, f"{listed.name} itself, by cross-validation over speakers"

    if development is None or held_out is None:
        raise TooFewError(
            f"{back_end.name}: --calibration validation needs at least {least} held-out"
            " speakers with two utterances in the development set, got fewer; use"
            " --calibration cross"
        )
    # Learn from this back end's scores of trials between held-out speakers.
    enrol, test = held_out.tables(development.table)
    learned = back_end.score(enrol, test, held_out.trials)
    features_MF, _ = back_end.features(learned, held_out.side_seconds())
    model = fit_linear(features_MF, held_out.trials.is_target_N, names=names)
    return model.llr(features_NF), held_out.name


def score_untrained(exp_dir: Path, listed: TrialList) -> np.ndarray | None:
    """Return cosine scores of the initial weights; None if those were not extracted."""
    # The EER of random weights shows how much of a result is due to training.
    data_dir = listed.path.parent
    if not are_embedded(exp_dir, data_dir, untrained=True):
        return None
    table = read_embedded(exp_dir, data_dir, untrained=True)
    enrol, test = listed.tables(table)
    cosine = build_chain("cosine", None)
    return cosine.score(enrol, test, listed.trials).scores_N


def measure(
    system: System,
    list_scores: ListScores,
    replicates: Replicates,
    protocol: str,
    source: str | None,
    p_targets: Sequence[float],
) -> results.Row:
    """Return the row of results.json for one list and back end."""
    listed = list_scores.listed
    is_target_N = listed.trials.is_target_N
    scores_N = list_scores.scores_N
    # Sorted once, for the EER and every minDCF.
    p_miss_K, p_fa_K, _ = metrics.operating_points(scores_N, is_target_N)
    num_target = int(np.count_nonzero(is_target_N))

    min_dcf: dict[str, float] = {}
    for p_target in p_targets:
        min_dcf[f"{p_target:g}"] = metrics.min_dcf_of_points(
            p_miss_K,
            p_fa_K,
            p_target=p_target,
        )

    # The initial weights have only plain cosine scores.
    eer_untrained = None
    if list_scores.untrained_N is not None:
        eer_untrained = metrics.eer(list_scores.untrained_N, is_target_N)

    # Cllr needs log-likelihood ratios.
    cllr = None
    act_dcf = None
    if list_scores.llr_N is not None:
        cllr = metrics.cllr(list_scores.llr_N, is_target_N)
        act_dcf = metrics.act_dcf(list_scores.llr_N, is_target_N)

    # The threshold stored with the model applies to cosine scores.
    at_threshold = None
    if system.calibration is not None and list_scores.backend == "cosine":
        threshold = system.calibration.threshold
        p_miss, p_fa = metrics.error_rates(
            scores_N,
            is_target_N,
            threshold=threshold,
        )
        at_threshold = {"threshold": threshold, "p_miss": p_miss, "p_fa": p_fa}

    intervals: dict[str, list[float] | None] = {}
    for metric in replicates.values:
        intervals[metric] = replicates.interval(metric)
    # Metrics of the same scores for each value of the list's conditions.
    conditions = condition_rows(
        scores_N,
        listed.trials,
        listed.speakers,
        listed.columns,
        listed.seconds,
    )
    return {
        "trials": listed.name,
        "system": system.exp_dir.name,
        "eer": metrics.eer_of_points(p_miss_K, p_fa_K),
        "eer_untrained": eer_untrained,
        "eer_ci95": replicates.interval("eer"),
        "min_dcf": min_dcf,
        "cllr": cllr,
        "act_dcf": act_dcf,
        "num_target": num_target,
        "num_nontarget": len(is_target_N) - num_target,
        "backend": list_scores.backend,
        "protocol": protocol,
        "model_sha256": system.card["sha256"],
        "commit": system.card.get("commit"),
        "at_threshold": at_threshold,
        "bn_batch": system.card.get("bn_batch"),
        "fine_tuned": list_scores.fine_tuned,
        "min_cllr": metrics.min_cllr(scores_N, is_target_N),
        "num_speakers": replicates.num_speakers,
        "intervals": intervals,
        "calibration": source,
        "conditions": conditions,
        # The caller sets both keys, which depend on other back ends.
        "compared": None,
        "primary": False,
    }
