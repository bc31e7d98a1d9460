"""Measure systems on trial lists, and compare each with the first by a paired test."""

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from speakerlab.bin.command import json_line, parser
from speakerlab.experiments.results import bounds
from speakerlab.scoring.metrics import error_rates, min_cllr, threshold_at

if TYPE_CHECKING:  # it imports torch, which is slow: only for valid options
    from speakerlab.experiments.systems import Scored

# Name in the output -> name in the replicates.
METRICS = {"EER": "eer", "minDCF(0.01)": "min_dcf_0.01"}
P_TARGETS = (0.01,)
NOT_SIGNIFICANT = "no significant difference"


@dataclass(frozen=True)
class Difference:
    """Metric of a system minus that of the first one on the same list."""

    trials: str
    system: str
    key: str  # of the metric
    change: float
    ci95: Sequence[float] | None
    p_value: float | None
    # By Holm's method, for all comparisons of the metric; None: too few speakers.
    corrected_p: float | None = None
    num_comparisons: int = 1


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    from speakerlab.experiments.systems import (
        read_lists,
        read_systems,
        require_scores,
        score_systems,
    )

    systems = read_systems(args.systems, num_lists=len(args.trials), short_names=False)
    lists = read_lists(args.trials, systems, short_names=False)
    scored_of_lists: list[list[Scored]] = []
    differences: list[Difference] = []
    for trial_list, results in zip(lists, score_systems(systems, lists, P_TARGETS)):
        scored = require_scores(trial_list, systems, results)
        scored_of_lists.append(scored)
        differences += compare_with_first(scored)
    differences = correct(differences)

    for scored in scored_of_lists:
        first = scored[0]
        if len(lists) > 1 and not args.json:
            sys.stdout.write(f"{first.trial_list.name}\n")
        for result in scored:
            differences_of_system = select(
                differences, trials=first.trial_list.name, system=result.system.name
            )
            if args.json:
                row = json_row(args, result, first, differences_of_system)
                sys.stdout.write(json_line(row))
            else:
                print_system(args, result, first, differences_of_system)
    if args.json:
        return
    num_comparisons = len(lists) * (len(systems) - 1)
    if num_comparisons > 1:
        sys.stdout.write(
            f"corrected: by Holm's method, for {num_comparisons} comparisons of each"
            " metric\n"
        )
    for line in conclusions(scored_of_lists, differences):
        sys.stdout.write(f"{line}\n")


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("compare", __doc__, builds_components=False)
    options.add_systems()
    rate = options.add_mutually_exclusive_group()
    options.add(
        "--far RATE", "print the threshold for this false-alarm rate", group=rate
    )
    options.add("--frr RATE", "print the threshold for this miss rate", group=rate)
    options.add_json("system and trial list")
    return options.parse_args(arguments)


def compare_with_first(scored: "Sequence[Scored]") -> list[Difference]:
    """Return the differences of all other systems on a list from the first."""
    first, *others = scored
    differences: list[Difference] = []
    for result in others:
        # All systems have the same trials and the same bootstrap replicates, so the differences
        # are paired.
        for key in METRICS.values():
            ci95, p_value = result.replicates.paired(first.replicates, key)
            difference = Difference(
                trials=result.trial_list.name,
                system=result.system.name,
                key=key,
                change=result.metric(key) - first.metric(key),
                ci95=ci95,
                p_value=p_value,
            )
            differences.append(difference)
    return differences


def select(
    differences: Iterable[Difference],
    *,
    system: str,
    trials: str | None = None,
    key: str | None = None,
) -> list[Difference]:
    """Return the differences of a system; None: on all lists, of all metrics."""
    selected: list[Difference] = []
    for difference in differences:
        is_on_list = trials in (None, difference.trials)
        is_of_metric = key in (None, difference.key)
        if difference.system == system and is_on_list and is_of_metric:
            selected.append(difference)
    return selected


def correct(differences: Sequence[Difference]) -> list[Difference]:
    """Fill in the corrected p-values, of each metric for all its comparisons."""
    from speakerlab.experiments.run_table import holm

    p_values_of: dict[str, list[float]] = {}  # of the comparisons that were tested
    for difference in differences:
        if difference.p_value is not None:
            p_values_of.setdefault(difference.key, []).append(difference.p_value)
    corrected_of = {key: iter(holm(p_values)) for key, p_values in p_values_of.items()}

    corrected: list[Difference] = []
    for difference in differences:
        if difference.p_value is not None:
            key = difference.key
            difference = replace(
                difference,
                corrected_p=next(corrected_of[key]),
                num_comparisons=len(p_values_of[key]),
            )
        corrected.append(difference)
    return corrected


def conclusions(
    scored_of_lists: "Sequence[Sequence[Scored]]",
    differences: Sequence[Difference],
) -> list[str]:
    """Return what is significant for each system and metric, over all lists."""
    from speakerlab.experiments.run_table import LEVEL, least_p

    lists = [scored[0].trial_list.name for scored in scored_of_lists]
    first, *compared = [result.system.name for result in scored_of_lists[0]]
    num_comparisons = len(lists) * len(compared)
    level = f"level {LEVEL:g}"
    if num_comparisons > 1:
        level += ", corrected"
    lines: list[str] = []
    for name in compared:
        for metric, key in METRICS.items():
            verdict = _verdict(select(differences, system=name, key=key), LEVEL)
            lines.append(f"{metric} of {name} against {first}: {verdict} ({level})")

    for trials, scored in zip(lists, scored_of_lists):
        replicates = scored[0].replicates
        least = least_p(replicates)
        # Without a p-value, the verdict has the list.
        if compared and least is not None and least * num_comparisons >= LEVEL:
            lines.append(
                f"{trials}: with {replicates.num_speakers} speakers, a p-value is at least"
                f" {least:.2g} before the correction; this list can hardly show a"
                " difference"
            )
    return lines


def _verdict(differences: Sequence[Difference], level: float) -> str:
    """Return on which lists a system is significantly better or worse, by one metric."""
    lists_of: dict[str, list[str]] = {}  # outcome -> the lists with it
    for difference in differences:
        if difference.corrected_p is None:
            outcome = "not tested (fewer than five speakers)"
        elif difference.corrected_p >= level:
            outcome = NOT_SIGNIFICANT
        elif difference.change < 0:
            outcome = "significantly lower"
        else:
            outcome = "significantly higher"
        lists_of.setdefault(outcome, []).append(difference.trials)
    if len(lists_of) > 1:
        texts: list[str] = []
        for outcome, lists in lists_of.items():
            texts.append(f"{outcome} on {' and '.join(lists)}")
        return ", ".join(texts)

    # The outcome is the same on all lists.
    ((outcome, lists),) = lists_of.items()
    if len(lists) == 1:
        return outcome
    if outcome == NOT_SIGNIFICANT:
        return f"{outcome} on any list"
    all_lists = "both" if len(lists) == 2 else f"all {len(lists)}"
    return f"{outcome} on {all_lists} lists"


def print_system(
    args: Namespace,
    result: "Scored",
    first: "Scored",
    differences: Sequence[Difference],
) -> None:
    """Print the metrics of a system on a list, and its differences from the first system."""
    from speakerlab.experiments.run_table import least_p

    sys.stdout.write(f"{result.system.name}\n")
    for name, key in METRICS.items():
        value = _format(result, key, result.metric(key), result.interval(key))
        sys.stdout.write(f"  {name:13} {value}\n")
    minimum = min_cllr(result.scores_N, result.is_target_N)
    sys.stdout.write(f"  minCllr       {minimum:.4f}\n")
    at_rate = threshold_row(args, result)
    if at_rate is not None:
        p_miss = 100 * at_rate["p_miss"]
        p_fa = 100 * at_rate["p_fa"]
        rates = f"false alarms {p_fa:.2f} %, misses {p_miss:.2f} %"
        sys.stdout.write(f"  threshold     {at_rate['threshold']:.6f}: {rates}\n")

    for name, difference in zip(METRICS, differences):
        value = _format(
            result,
            difference.key,
            difference.change,
            difference.ci95,
            is_difference=True,
        )
        significance = ""
        if difference.p_value is not None:
            significance = f", p = {difference.p_value:.3g}"
            # Otherwise equal p-values of two metrics look like a mistake.
            if difference.p_value == least_p(result.replicates):
                significance += " (the least possible on this list)"
            if difference.num_comparisons > 1:
                significance += f", corrected {difference.corrected_p:.3g}"
        sys.stdout.write(
            f"  {name:13} {value} against {first.system.name}{significance}\n"
        )


def threshold_row(args: Namespace, result: "Scored") -> dict[str, float] | None:
    """Return the threshold for the requested rate, and its rates; None without a request."""
    if args.far is None and args.frr is None:
        return None
    scores_N = result.scores_N
    is_target_N = result.is_target_N
    threshold = threshold_at(scores_N, is_target_N, far=args.far, frr=args.frr)
    p_miss, p_fa = error_rates(scores_N, is_target_N, threshold=threshold)
    return {"threshold": threshold, "p_miss": p_miss, "p_fa": p_fa}


def json_row(
    args: Namespace,
    result: "Scored",
    first: "Scored",
    differences: Sequence[Difference],
) -> dict[str, Any]:
    """Return what is printed as a plain dict; rates are fractions."""
    num_target = int(result.is_target_N.sum())
    compared: dict[str, Any] | None = None
    if differences:
        compared = {"with": first.system.name}
        for difference in differences:
            compared[difference.key] = {
                "difference": difference.change,
                "ci95": difference.ci95,
                "p_value": difference.p_value,
                "p_holm": difference.corrected_p,
            }
    return {
        "system": result.system.name,
        "trials": result.trial_list.name,
        **{key: result.metric(key) for key in METRICS.values()},
        "intervals": {key: result.interval(key) for key in METRICS.values()},
        "min_cllr": min_cllr(result.scores_N, result.is_target_N),
        "num_target": num_target,
        "num_nontarget": len(result.is_target_N) - num_target,
        "num_speakers": result.replicates.num_speakers,
        "at_rate": threshold_row(args, result),
        "compared": compared,
    }


def _format(
    result: "Scored",
    key: str,
    value: float,
    ci95: Sequence[float] | None,
    *,
    is_difference: bool = False,
) -> str:
    """Format a rate in percent or a cost, with its interval.

    A difference of rates is in percentage points, and has a sign.
    """
    if key == "eer":
        scale, digits = 100, 2
        unit = " points" if is_difference else " %"
    else:
        scale, digits, unit = 1, 4, ""
    sign = "+" if is_difference else ""

    def show(number: float) -> str:
        return f"{scale * number:{sign}.{digits}f}"

    # Without an interval, the number of speakers is shown as the reason.
    row = {"num_speakers": result.replicates.num_speakers}
    interval = bounds(ci95, row, show)
    return f"{show(value)}{unit} ({interval})"
