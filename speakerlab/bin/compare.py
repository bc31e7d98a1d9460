"""Measure score files of one trial list, and compare each with the first by a paired test."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from speakerlab.bin.command import parser
from speakerlab.experiments.results import bounds
from speakerlab.experiments.trial_list import read_trial_list
from speakerlab.scoring.bootstrap import Replicates, bootstrap
from speakerlab.scoring.metrics import eer, error_rates, min_cllr, min_dcf, threshold_at
from speakerlab.scoring.score_files import read_scores

# Name in the output -> name in the replicates.
METRICS = {"EER": "eer", "minDCF(0.01)": "min_dcf_0.01"}


class Measured(NamedTuple):
    """Metrics of a score file."""

    metrics: dict[str, float]
    replicates: Replicates


def main(arguments: Sequence[str]) -> None:
    options = parser("compare", __doc__, builds_components=False)
    options.add("scores SCORES", "score files, each compared with the first", nargs="+")
    options.add(
        "--trials FILE", "trial list, in the same folder as its utt2spk", required=True
    )
    rate = options.add_mutually_exclusive_group()
    options.add(
        "--far RATE", "print the threshold for this false-alarm rate", group=rate
    )
    options.add("--frr RATE", "print the threshold for this miss rate", group=rate)
    args = options.parse_args(arguments)

    listed = read_trial_list(args.trials)
    is_target_N = listed.trials.is_target_N
    enrol_speaker_N, test_speaker_N = listed.speakers
    first: Measured | None = None
    for path in args.scores:
        scores_N = read_scores(path, listed.trials)
        metrics = {
            "eer": eer(scores_N, is_target_N),
            "min_dcf_0.01": min_dcf(scores_N, is_target_N),
        }
        replicates = bootstrap(
            scores_N,
            is_target_N,
            enrol_speaker_N,
            test_speaker_N,
            p_targets=(0.01,),
        )
        sys.stdout.write(f"{path}\n")
        for name, key in METRICS.items():
            ci95 = replicates.interval(key)
            value = _format(replicates, key, metrics[key], ci95)
            sys.stdout.write(f"  {name:13} {value}\n")
        sys.stdout.write(f"  minCllr       {min_cllr(scores_N, is_target_N):.4f}\n")
        has_rate = args.far is not None or args.frr is not None
        if has_rate:
            threshold = threshold_at(scores_N, is_target_N, far=args.far, frr=args.frr)
            p_miss, p_fa = error_rates(scores_N, is_target_N, threshold=threshold)
            rates = f"false alarms {100 * p_fa:.2f} %, misses {100 * p_miss:.2f} %"
            sys.stdout.write(f"  threshold     {threshold:.6f}: {rates}\n")

        if first is None:
            first = Measured(metrics, replicates)
            continue
        # All files have the same trials and the same bootstrap replicates, so the differences
        # are paired.
        for name, key in METRICS.items():
            ci95, p_value = replicates.paired(first.replicates, key)
            change = metrics[key] - first.metrics[key]
            difference = _format(replicates, key, change, ci95, sign="+")
            significance = "" if p_value is None else f", p = {p_value:.3g}"
            sys.stdout.write(
                f"  {name:13} {difference} against {args.scores[0]}{significance}\n"
            )


def _format(
    replicates: Replicates,
    key: str,
    value: float,
    ci95: Sequence[float] | None,
    *,
    sign: str = "",
) -> str:
    """Format a rate in percent or a cost, with its interval."""
    if key == "eer":
        scale, digits, unit = 100, 2, " %"
    else:
        scale, digits, unit = 1, 4, ""

    def show(number: float) -> str:
        return f"{scale * number:{sign}.{digits}f}"

    # Without an interval, the number of speakers is shown as the reason.
    row = {"num_speakers": replicates.num_speakers}
    interval = bounds(ci95, row, show)
    return f"{show(value)}{unit} ({interval})"
