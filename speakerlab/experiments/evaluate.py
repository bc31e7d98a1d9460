"""Evaluate trial lists: embeddings and back ends in; scores and rows of results out.

Letters: N trials.
A row of results.json holds rates as fractions; what was not measured is null. Nothing is learned
from the trials themselves, except by `calibration="cross"`, where no trial is calibrated by a model
that saw either of its speakers.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from speakerlab.data.treatments import Treatment
from speakerlab.experiments import results
from speakerlab.experiments.embedded import DevelopmentSet, are_embedded, read_embedded
from speakerlab.experiments.trial_list import ListScores, TrialList
from speakerlab.scoring import metrics
from speakerlab.scoring.bootstrap import Replicates, bootstrap
from speakerlab.scoring.calibration import Calibration
from speakerlab.scoring.chain import Chain, Scored, build_chain
from speakerlab.scoring.conditions import condition_rows, measure_condition
from speakerlab.scoring.linear import cross_validated, fit_linear
from speakerlab.scoring.minima import TooFewError, min_speakers

log = logging.getLogger(__name__)
LearnFrom = Literal["auto", "validation", "cross", "none"]
LEARN_FROM = get_args(LearnFrom)


@dataclass(frozen=True)
class System:
    """A model under evaluation: its embeddings, its calibration, its development set."""

    exp_dir: Path
    card: Mapping[str, Any]
    calibration: Calibration | None
    development: DevelopmentSet | None


def evaluate(
    system: System,
    listed: TrialList,
    back_ends: Sequence[Chain],
    *,
    learn_from: LearnFrom = "auto",
    p_targets: Sequence[float] = metrics.P_TARGETS,
    treatments: Sequence[Treatment] = (),
) -> tuple[list[results.Row], list[ListScores], list[str]]:
    """Score a list with every back end, and compare the others with the first, the primary one.

    Return rows of results, scores, and a line for each back end with too little to learn from,
    which is skipped. Raises TooFewError if that is the primary one.
    learn_from: the trials that calibration learns from: `validation`, those of held-out speakers of
    the development set; `cross`, those of the list, by cross-validation over speakers; `none`; or
    `auto`: the model's own calibration for plain cosine scores, for others the held-out speakers
    where there are enough, else `cross`.
    treatments: of the test side, each of which has a row in the conditions of every back end that
    does not weigh the quality of utterances; their embeddings must exist.
    """
    trials, folder = listed.trials, listed.path.parent
    enrol, test = listed.tables(read_embedded(system.exp_dir, folder))
    treated = {one: read_embedded(system.exp_dir, folder, treatment=one) for one in treatments}
    untrained_N = score_untrained(system.exp_dir, listed)
    rows: list[results.Row] = []
    scores: list[ListScores] = []
    first: Replicates | None = None
    skipped: list[str] = []
    for back_end in back_ends:
        scored = back_end.score(enrol, test, trials, num_enrol=listed.num_enrol)
        try:
            llr_N, source = calibrate(system, listed, back_end, scored, learn_from)
        except TooFewError as error:
            if not rows:
                raise
            skipped.append(f"{listed.name}: skipped {back_end.name}: {error}")
            continue
        own = ListScores(
            listed,
            back_end.name,
            scored.scores_N if llr_N is None or not back_end.with_quality else llr_N,
            llr_N,
            untrained_N if back_end.name == "cosine" else None,
        )
        replicates = bootstrap(
            own.scores_N, trials.is_target_N, *listed.speakers, llr=llr_N, p_targets=p_targets
        )
        first = first or replicates
        protocol = f"{listed.protocol}; {back_end.protocol}"
        row = measure(system, own, replicates, protocol, source, p_targets)
        row["primary"] = not rows
        for treatment, table in treated.items() if not back_end.with_quality else ():
            again = back_end.score(enrol, table, trials, num_enrol=listed.num_enrol)
            values = measure_condition(again.scores_N, trials.is_target_N, listed.speakers)
            named = {"condition": treatment.condition, "value": treatment.value}
            row["conditions"].append({**named, **values})
        if rows:
            ci95, p_value = replicates.paired(first, "eer")
            row["compared"] = {
                "with": rows[0]["backend"],
                "eer_difference": row["eer"] - rows[0]["eer"],
                "ci95": ci95,
                "p_value": p_value,
            }
        rows.append(row)
        scores.append(own)
        calibrated = f"calibrated with {source}" if source else "uncalibrated"
        log.info("%s: scored with %s; %s", listed.name, back_end.name, calibrated)
    return rows, scores, skipped


def calibrate(
    system: System, listed: TrialList, back_end: Chain, scored: Scored, learn_from: LearnFrom
) -> tuple[np.ndarray | None, str | None]:
    """Return log-likelihood ratios and the source of the calibration; None without one.

    Raises TooFewError if there are too few speakers to learn from, but with `auto` only for quality
    measures; other scores are then not calibrated.
    """
    stored, development = system.calibration, system.development
    features_NF, names = back_end.features(scored, listed.side_seconds())
    least, held_out = min_speakers(len(names)), development and development.held_out
    if held_out and len(np.unique(held_out.speakers)) < least:
        held_out = None
    if learn_from == "none":
        if back_end.with_quality:
            raise ValueError(
                f"{back_end.name}: must learn from trials, got --calibration none; use cross or "
                "validation"
            )
        return None, None
    if learn_from == "auto" and back_end.name == "cosine" and stored is not None:
        return stored.llr(scored.scores_N), f"the model's own calibration ({stored.source})"
    if learn_from == "cross" or (learn_from == "auto" and held_out is None):
        try:
            llr_N = cross_validated(
                features_NF, listed.trials.is_target_N, *listed.speakers, names=names
            )
        except TooFewError as error:
            if learn_from == "cross" or back_end.with_quality:
                raise
            log.warning("%s: %s is not calibrated: %s", listed.name, back_end.name, error)
            return None, None
        return llr_N, f"{listed.name} itself, by cross-validation over speakers"
    if development is None or held_out is None:
        raise TooFewError(
            f"{back_end.name}: --calibration validation needs at least {least} held-out speakers "
            "with two utterances in the development set, got fewer; use --calibration cross"
        )
    learned = back_end.score(*held_out.tables(development.table), held_out.trials)
    features_MF, _ = back_end.features(learned, held_out.side_seconds())
    model = fit_linear(features_MF, held_out.trials.is_target_N, names=names)
    return model.llr(features_NF), held_out.name


def score_untrained(exp_dir: Path, listed: TrialList) -> np.ndarray | None:
    """Return cosine scores of the initial weights; None if those were not extracted."""
    data_dir = listed.path.parent
    if not are_embedded(exp_dir, data_dir, untrained=True):
        return None
    table = read_embedded(exp_dir, data_dir, untrained=True)
    return build_chain("cosine", None).score(*listed.tables(table), listed.trials).scores_N


def measure(
    system: System,
    own: ListScores,
    replicates: Replicates,
    protocol: str,
    source: str | None,
    p_targets: Sequence[float],
) -> results.Row:
    """Measure one list and back end: a row of results.json."""
    listed, is_target_N = own.listed, own.listed.trials.is_target_N
    p_miss_K, p_fa_K, _ = metrics.operating_points(own.scores_N, is_target_N)
    num_target = int(np.count_nonzero(is_target_N))
    llr_N, at_threshold = own.llr_N, None
    if system.calibration is not None and own.backend == "cosine":
        threshold = system.calibration.threshold
        p_miss, p_fa = metrics.error_rates(own.scores_N, is_target_N, threshold=threshold)
        at_threshold = {"threshold": threshold, "p_miss": p_miss, "p_fa": p_fa}
    return {
        "trials": listed.name,
        "system": system.exp_dir.name,
        "eer": metrics.eer_of_points(p_miss_K, p_fa_K),
        "eer_untrained": None
        if own.untrained_N is None
        else metrics.eer(own.untrained_N, is_target_N),
        "eer_ci95": replicates.interval("eer"),
        "min_dcf": {
            f"{p:g}": metrics.min_dcf_of_points(p_miss_K, p_fa_K, p_target=p) for p in p_targets
        },
        "cllr": None if llr_N is None else metrics.cllr(llr_N, is_target_N),
        "act_dcf": None if llr_N is None else metrics.act_dcf(llr_N, is_target_N),
        "num_target": num_target,
        "num_nontarget": len(is_target_N) - num_target,
        "backend": own.backend,
        "protocol": protocol,
        "model_sha256": system.card["sha256"],
        "commit": system.card.get("commit"),
        "at_threshold": at_threshold,
        "bn_batch": system.card.get("bn_batch"),
        "min_cllr": metrics.min_cllr(own.scores_N, is_target_N),
        "num_speakers": replicates.num_speakers,
        "intervals": {metric: replicates.interval(metric) for metric in replicates.values},
        "calibration": source,
        "conditions": condition_rows(
            own.scores_N, listed.trials, listed.speakers, listed.columns, listed.seconds
        ),
        "compared": None,
        "primary": False,
    }
