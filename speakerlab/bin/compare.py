"""Measure score files of one trial list, and compare each with the first by a paired test."""

import sys
from collections.abc import Sequence

from speakerlab.bin.command import parser
from speakerlab.experiments.results import bounds
from speakerlab.experiments.trial_list import read_trial_list
from speakerlab.scoring.bootstrap import Replicates, bootstrap
from speakerlab.scoring.metrics import eer, error_rates, min_cllr, min_dcf, threshold_at
from speakerlab.scoring.score_files import read_scores

METRICS = {"EER": "eer", "minDCF(0.01)": "min_dcf_0.01"}


def main(words: Sequence[str]) -> None:
    options = parser("compare", __doc__)
    options.add("scores SCORES", "score files, each compared with the first", nargs="+")
    options.add("--trials FILE", "trial list, in the same folder as its utt2spk", required=True)
    rate = options.add_mutually_exclusive_group()
    for name, kind in (("--far", "false-alarm"), ("--frr", "miss")):
        options.add(f"{name} RATE", f"print the threshold for this {kind} rate", group=rate)
    args = options.parse_args(words)
    listed = read_trial_list(args.trials)
    is_target_N = listed.trials.is_target_N
    first: tuple[dict[str, float], Replicates] | None = None
    for path in args.scores:
        scores_N = read_scores(path, listed.trials)
        found = {"eer": eer(scores_N, is_target_N), "min_dcf_0.01": min_dcf(scores_N, is_target_N)}
        drawn = bootstrap(scores_N, is_target_N, *listed.speakers, p_targets=(0.01,))
        sys.stdout.write(f"{path}\n")
        for name, key in METRICS.items():
            sys.stdout.write(f"  {name:13} {_value(drawn, key, found[key], drawn.interval(key))}\n")
        sys.stdout.write(f"  minCllr       {min_cllr(scores_N, is_target_N):.4f}\n")
        if args.far is not None or args.frr is not None:
            threshold = threshold_at(scores_N, is_target_N, far=args.far, frr=args.frr)
            p_miss, p_fa = error_rates(scores_N, is_target_N, threshold=threshold)
            rates = f"false alarms {100 * p_fa:.2f} %, misses {100 * p_miss:.2f} %"
            sys.stdout.write(f"  threshold     {threshold:.6f}: {rates}\n")
        if first is None:
            first = found, drawn
            continue
        for name, key in METRICS.items():
            ci95, p_value = drawn.paired(first[1], key)
            difference = _value(drawn, key, found[key] - first[0][key], ci95, sign="+")
            significance = "" if p_value is None else f", p = {p_value:.3g}"
            sys.stdout.write(f"  {name:13} {difference} against {args.scores[0]}{significance}\n")


def _value(
    drawn: Replicates, key: str, value: float, ci95: Sequence[float] | None, *, sign: str = ""
) -> str:
    """Format a rate in per cent or a cost, with its interval."""
    scale, digits, unit = (100, 2, " %") if key == "eer" else (1, 4, "")

    def show(number: float) -> str:
        return f"{scale * number:{sign}.{digits}f}"

    interval = bounds(ci95, {"num_speakers": drawn.num_speakers}, show)
    return f"{show(value)}{unit} ({interval})"
