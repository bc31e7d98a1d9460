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

from speakerlab.experiments import results
from speakerlab.experiments.embedded import DevelopmentSet, are_embedded, read_embedded
from speakerlab.experiments.trial_list import ListScores, TrialList
from speakerlab.scoring.bootstrap import Replicates, bootstrap, interval, paired
from speakerlab.scoring.calibration import Calibration
from speakerlab.scoring.chain import Chain, Scored, build_chain
from speakerlab.scoring.conditions import condition_rows
from speakerlab.scoring.linear import cross_validated, fit_linear
from speakerlab.scoring.metrics import (
    P_TARGETS,
    act_dcf,
    cllr,
    eer,
    eer_of_points,
    error_rates,
    min_cllr,
    min_dcf_of_points,
    operating_points,
)

log = logging.getLogger(__name__)
LearnFrom = Literal["auto", "validation", "cross", "none"]
LEARN_FROM = get_args(LearnFrom)
NUM_FOLDS = 5
Calibrated = tuple[np.ndarray | None, str | None]  # llr_N, and what the calibration is from


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
    p_targets: Sequence[float] = P_TARGETS,
) -> tuple[list[results.Row], list[ListScores]]:
    """Score a list with every back end, and compare the others with the first.

    learn_from: the trials that calibration learns from: `validation`, those of held-out speakers of
    the development set; `cross`, those of the list, by cross-validation over speakers; `none`; or
    `auto`: the model's own calibration for plain cosine scores, for others the held-out speakers
    where there are enough, else `cross`.
    """
    trials = listed.trials
    enrol, test = listed.tables(read_embedded(system.exp_dir, listed.path.parent))
    untrained_N = score_untrained(system, listed)
    rows: list[results.Row] = []
    scores: list[ListScores] = []
    first: Replicates = {}
    for back_end in back_ends:
        scored = back_end.score(enrol, test, trials, num_enrol=listed.num_enrol)
        llr_N, source = calibrate(system, listed, back_end, scored, learn_from)
        if llr_N is None and back_end.with_quality:
            log.info("%s: left out %s, which needs a calibration", listed.name, back_end.name)
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
        if rows:
            ci95, p_value = paired(replicates["eer"], first["eer"])
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
    if not rows:
        raise ValueError(
            f"{listed.path}: nothing was scored: too few speakers to learn quality measures from; "
            "add a back end without qmf"
        )
    return rows, scores


def calibrate(
    system: System, listed: TrialList, back_end: Chain, scored: Scored, learn_from: LearnFrom
) -> Calibrated:
    """Scores as log-likelihood ratios, and the source of the calibration; None without one."""
    stored, development = system.calibration, system.development
    held_out = None if development is None else development.held_out
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
            return cross_calibrate(listed, back_end, scored)
        except ValueError as error:
            if learn_from == "cross":
                raise
            log.info("%s: %s is not calibrated: %s", listed.name, back_end.name, error)
            return None, None
    if development is None or held_out is None:
        raise ValueError(
            f"{back_end.name}: --calibration validation needs at least 10 held-out speakers with "
            "two utterances in the development set, got fewer; use --calibration cross"
        )
    learned = back_end.score(*held_out.tables(development.table), held_out.trials)
    features_MF, names = back_end.features(learned, held_out.side_seconds())
    model = fit_linear(features_MF, held_out.trials.is_target_N, names=names)
    return model.llr(back_end.features(scored, listed.side_seconds())[0]), held_out.name


def cross_calibrate(listed: TrialList, back_end: Chain, scored: Scored) -> Calibrated:
    """Calibrate on the list itself, by cross-validation over speakers."""
    features_NF, names = back_end.features(scored, listed.side_seconds())
    llr_N = cross_validated(
        features_NF,
        listed.trials.is_target_N,
        *listed.speakers,
        names=names,
        num_folds=min(NUM_FOLDS, len(np.unique(listed.speakers))),
    )
    return llr_N, f"{listed.name} itself, by cross-validation over speakers"


def score_untrained(system: System, listed: TrialList) -> np.ndarray | None:
    """Cosine scores of the initial weights; None if those were not extracted."""
    data_dir = listed.path.parent
    if not are_embedded(system.exp_dir, data_dir, untrained=True):
        log.info("%s: no untrained embeddings (extract --untrained), left out", listed.name)
        return None
    table = read_embedded(system.exp_dir, data_dir, untrained=True)
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
    p_miss_K, p_fa_K, _ = operating_points(own.scores_N, is_target_N)
    num_target = int(np.count_nonzero(is_target_N))
    llr_N, at_threshold = own.llr_N, None
    if system.calibration is not None and own.backend == "cosine":
        threshold = system.calibration.threshold
        p_miss, p_fa = error_rates(own.scores_N, is_target_N, threshold=threshold)
        at_threshold = {"threshold": threshold, "p_miss": p_miss, "p_fa": p_fa}
        llr_N = system.calibration.llr(own.scores_N) if llr_N is None else llr_N
    return {
        "trials": listed.name,
        "system": system.exp_dir.name,
        "eer": eer_of_points(p_miss_K, p_fa_K),
        "eer_untrained": None if own.untrained_N is None else eer(own.untrained_N, is_target_N),
        "eer_ci95": interval(replicates["eer"]),
        "min_dcf": {f"{p:g}": min_dcf_of_points(p_miss_K, p_fa_K, p_target=p) for p in p_targets},
        "cllr": None if llr_N is None else cllr(llr_N, is_target_N),
        "act_dcf": None if llr_N is None else act_dcf(llr_N, is_target_N),
        "num_target": num_target,
        "num_nontarget": len(is_target_N) - num_target,
        "backend": own.backend,
        "protocol": protocol,
        "model_sha256": system.card["sha256"],
        "commit": system.card.get("commit"),
        "at_threshold": at_threshold,
        "bn_batch": system.card.get("bn_batch"),
        "min_cllr": min_cllr(own.scores_N, is_target_N),
        "intervals": {name: interval(values_R) for name, values_R in replicates.items()},
        "calibration": source,
        "conditions": condition_rows(
            own.scores_N, listed.trials, listed.speakers, listed.columns, listed.seconds
        ),
        "compared": None,
    }
