"""Fuse score files of several systems by logistic regression, and measure each and the fusion.

The weights are learned from development scores, or by cross-validation over the speakers of the
list itself, where no trial is scored by a model that saw either of its speakers.
Letters: N trials, F systems.
"""

import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from speakerlab.bin.command import parser
from speakerlab.core.atomic import check_writable
from speakerlab.data.tables import COLUMNS, read_table
from speakerlab.experiments.results import aligned, number, percent
from speakerlab.experiments.trial_list import read_trial_list
from speakerlab.scoring.linear import cross_validated, fit_linear
from speakerlab.scoring.metrics import act_dcf, cllr, eer, min_dcf
from speakerlab.scoring.score_files import read_scores, write_scores
from speakerlab.scoring.trials import Trials, read_trials

log = logging.getLogger(__name__)
LlrOf = Callable[[slice], np.ndarray]  # columns of systems -> fused ratios (N)


def main(arguments: Sequence[str]) -> None:
    options = parser("fuse", __doc__, builds_components=False)
    options.add("--trials FILE", "trial list to score", required=True)
    options.add(
        "--scores FILE", "score files, one per system", nargs="+", required=True
    )
    options.add("--out FILE", "file to write the fused ratios to", required=True)
    dev = "trials of other speakers, to learn from (default: cross-validation)"
    options.add("--dev-trials FILE", dev)
    options.add("--dev-scores FILE", "scores of the same systems", nargs="+")
    options.add("--speakers FILE", "utt2spk (default: the one beside the trials)")
    args = options.parse_args(arguments)
    _check(args)
    check_writable(args.out)
    trials, llr_of = _fusion(args)
    fused_N = llr_of(slice(None))
    # Calibrate each single system in the same way, so that its metrics are comparable.
    ratios: dict[str, np.ndarray] = {}
    for column, path in enumerate(args.scores):
        own_column = slice(column, column + 1)
        ratios[str(path)] = llr_of(own_column)
    ratios["fused"] = fused_N
    write_scores(args.out, trials, fused_N)
    sys.stdout.write(_table(ratios, trials.is_target_N))
    log.info("%s: wrote the fused log-likelihood ratios", args.out)


def _fusion(args: Namespace) -> tuple[Trials, LlrOf]:
    """Return the trials, and a function that learns a fusion and returns the fused ratios.

    It learns from development scores if there are any, else by cross-validation.
    """
    names = [path.name for path in args.scores]
    if args.dev_trials:
        trials = read_trials(args.trials)
        scores_NF = _columns(args.scores, trials)
        dev_trials = read_trials(args.dev_trials)
        dev_MF = _columns(args.dev_scores, dev_trials)

        def learn_from_development(columns: slice) -> np.ndarray:
            model = fit_linear(
                dev_MF[:, columns],
                dev_trials.is_target_N,
                names=names[columns],
            )
            log.info("learned from %s: %s", args.dev_trials, model)
            return model.llr(scores_NF[:, columns])

        return trials, learn_from_development

    # By default the speakers of the list's data directory.
    if args.speakers is None:
        listed = read_trial_list(args.trials)
        trials, speakers = listed.trials, listed.speakers
    else:
        trials = read_trials(args.trials)
        speaker_of = read_table(args.speakers, columns=COLUMNS["utt2spk"])
        trials.check_known(speaker_of, where=str(args.speakers))
        speakers = trials.speakers(speaker_of)
    scores_NF = _columns(args.scores, trials)

    def learn_by_cross_validation(columns: slice) -> np.ndarray:
        return cross_validated(
            scores_NF[:, columns],
            trials.is_target_N,
            *speakers,
            names=names[columns],
        )

    return trials, learn_by_cross_validation


def _columns(paths: Sequence[Path], trials: Trials) -> np.ndarray:
    """Return the scores of each file as a column, (N, F)."""
    columns = [read_scores(path, trials) for path in paths]
    return np.stack(columns, axis=1)


def _check(args: Namespace) -> None:
    """Refuse conflicting options."""
    dev_scores = args.dev_scores or []
    num_dev = len(dev_scores)
    # Scores are useless without trials, which have the labels.
    has_dev_trials = args.dev_trials is not None
    is_complete = has_dev_trials == (num_dev > 0)
    # There is one weight per system, so the numbers of files must be equal.
    is_same_number = num_dev in (0, len(args.scores))
    if not is_complete or not is_same_number:
        raise ValueError(
            f"--dev-scores: {num_dev} files for {len(args.scores)} --scores; give as"
            " many with --dev-trials, and none without"
        )
    if has_dev_trials and args.speakers is not None:
        raise ValueError(
            f"--speakers: {args.speakers} has no effect with --dev-trials; leave"
            " one out"
        )
    trials = args.trials.resolve()
    inputs = {trials}
    # One file may have the scores of both lists, but no list has a system twice.
    for option, paths in (("--scores", args.scores), ("--dev-scores", dev_scores)):
        # Resolve paths, because a file can have several names.
        files = [path.resolve() for path in paths]
        twice = {str(path) for path in files if files.count(path) > 1}
        if twice:
            raise ValueError(f"{option}: {min(twice)} is given twice; leave one out")
        inputs.update(files)
    if args.out.resolve() in inputs:
        raise ValueError(f"--out: {args.out} is one of the inputs; choose another path")
    if has_dev_trials and args.dev_trials.resolve() == trials:
        raise ValueError(
            f"--dev-trials: {args.dev_trials} is the list to score, not one of other"
            " speakers; leave it out for cross-validation over speakers"
        )


def _table(ratios: Mapping[str, np.ndarray], is_target_N: np.ndarray) -> str:
    """Return the metrics of each system and of the fusion, all calibrated in the same way."""
    table = [["", "EER %", "minDCF(0.01)", "actDCF(0.01)", "Cllr"]]
    for name, llr_N in ratios.items():
        row = [
            name,
            percent(eer(llr_N, is_target_N)),
            number(min_dcf(llr_N, is_target_N)),
            number(act_dcf(llr_N, is_target_N)),
            number(cllr(llr_N, is_target_N)),
        ]
        table.append(row)
    text = (
        "metrics of the log-likelihood ratios, each system calibrated like the fusion:"
    )
    return f"{text}\n{aligned(table)}\n"
