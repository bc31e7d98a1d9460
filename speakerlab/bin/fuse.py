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
from speakerlab.data.tables import read_table
from speakerlab.experiments.results import aligned, number, percent
from speakerlab.experiments.trial_list import read_trial_list
from speakerlab.scoring.linear import cross_validated, fit_linear
from speakerlab.scoring.metrics import act_dcf, cllr, eer, min_dcf
from speakerlab.scoring.score_files import read_scores, write_scores
from speakerlab.scoring.trials import Trials, read_trials

log = logging.getLogger(__name__)
LlrOf = Callable[[slice], np.ndarray]  # some of the systems -> ratios (N)


def main(words: Sequence[str]) -> None:
    options = parser("fuse", __doc__)
    options.add("--trials FILE", "trial list to score", required=True)
    options.add("--scores FILE", "score files, one per system", nargs="+", required=True)
    options.add("--out FILE", "file to write the fused ratios to", required=True)
    dev = "trials of other speakers, to learn from (default: cross-validation)"
    options.add("--dev-trials FILE", dev)
    options.add("--dev-scores FILE", "scores of the same systems", nargs="+")
    options.add("--speakers FILE", "utt2spk (default: the one beside the trials)")
    args = options.parse_args(words)
    _check(args)
    check_writable(args.out)
    trials, llr_of = _fusion(args)
    fused_N = llr_of(slice(None))
    ratios = {str(path): llr_of(slice(i, i + 1)) for i, path in enumerate(args.scores)}
    write_scores(args.out, trials, fused_N)
    sys.stdout.write(_table(ratios | {"fused": fused_N}, trials.is_target_N))
    log.info("%s: wrote the fused log-likelihood ratios", args.out)


def _fusion(args: Namespace) -> tuple[Trials, LlrOf]:
    """Return the trials, and what learns from development scores or by cross-validation."""
    trials = read_trials(args.trials)
    scores_NF, names = _columns(args.scores, trials), [path.name for path in args.scores]
    if args.dev_trials:
        dev_trials = read_trials(args.dev_trials)
        dev_MF = _columns(args.dev_scores, dev_trials)

        def learned(part: slice) -> np.ndarray:
            model = fit_linear(dev_MF[:, part], dev_trials.is_target_N, names=names[part])
            log.info("learned from %s: %s", args.dev_trials, model)
            return model.llr(scores_NF[:, part])

        return trials, learned
    if args.speakers is None:
        speakers = read_trial_list(args.trials).speakers
    else:
        trials.check_known(speaker_of := read_table(args.speakers), where=str(args.speakers))
        speakers = trials.speakers(speaker_of)
    return trials, lambda part: cross_validated(
        scores_NF[:, part], trials.is_target_N, *speakers, names=names[part]
    )


def _columns(paths: Sequence[Path], trials: Trials) -> np.ndarray:
    return np.stack([read_scores(path, trials) for path in paths], axis=1)


def _check(args: Namespace) -> None:
    """Refuse options that do not go together."""
    num_dev = len(args.dev_scores or [])
    if (args.dev_trials is None) != (num_dev == 0) or num_dev not in (0, len(args.scores)):
        raise ValueError(
            f"--dev-scores: {num_dev} files for {len(args.scores)} --scores; give as many with "
            "--dev-trials, and none without"
        )
    if args.dev_trials is not None and args.speakers is not None:
        raise ValueError(
            f"--speakers: {args.speakers} has no effect with --dev-trials; leave one out"
        )
    files = [path.resolve() for path in (*args.scores, *(args.dev_scores or []))]
    twice = {str(path) for path in files if files.count(path) > 1}
    if twice:
        raise ValueError(f"--scores: {min(twice)} is given twice; leave one out")
    if args.out.resolve() in {*files, args.trials.resolve()}:
        raise ValueError(f"--out: {args.out} is one of the inputs; choose another path")
    if args.dev_trials and args.dev_trials.resolve() == args.trials.resolve():
        raise ValueError(
            f"--dev-trials: {args.dev_trials} is the list to score, not one of other speakers; "
            "leave it out for cross-validation over speakers"
        )


def _table(ratios: Mapping[str, np.ndarray], is_target_N: np.ndarray) -> str:
    """Return the metrics of each system and of the fusion, all calibrated in the same way."""
    table = [["", "EER %", "minDCF(0.01)", "actDCF(0.01)", "Cllr"]]
    for name, llr_N in ratios.items():
        error, *costs = (of(llr_N, is_target_N) for of in (eer, min_dcf, act_dcf, cllr))
        table.append([name, percent(error), *map(number, costs)])
    text = "metrics of the log-likelihood ratios, each system calibrated like the fusion:"
    return f"{text}\n{aligned(table)}\n"
