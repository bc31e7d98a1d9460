"""Compare experiments: settings that differ, EERs, and which differences are significant."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speakerlab.bin.command import json_line, parser

if TYPE_CHECKING:  # it imports torch, which is slow: only for valid options
    from speakerlab.experiments.run_table import Difference, Run


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    from speakerlab.experiments import run_table

    folders = run_table.find_experiments(args.experiments)
    runs = run_table.read_runs(folders)
    reference, reason = run_table.choose_reference(runs)
    if args.against is not None:
        reference = find_run(args, runs)
        reason = "as requested"
    differences = run_table.find_differences(runs, reference, args.trials)
    if args.json:
        for row in run_table.json_rows(runs, reference, differences):
            sys.stdout.write(json_line(row))
        return
    print_tables(runs, differences, f"{reference.name} ({reason})")


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("compare-runs", __doc__, builds_components=False)
    options.add("experiments EXP", "experiments, or folders of experiments", nargs="+")
    options.add(
        "--against EXP",
        "experiment that the others are compared with (default: the one with the lowest"
        " validation metric, else the first)",
    )
    options.add(
        "--trials FILE",
        "trial lists, if they are not where they were when they were scored",
        nargs="+",
        default=[],
    )
    options.add_json("experiment")
    return options.parse_args(arguments)


def find_run(args: Namespace, runs: "Sequence[Run]") -> "Run":
    """Return the run of --against; ValueError if it is not one of them."""
    for run in runs:
        if run.exp_dir.resolve() == args.against.resolve():
            return run
    raise ValueError(
        f"--against: {args.against} is not among the experiments; add it to them"
    )


def print_tables(
    runs: "Sequence[Run]",
    differences: "Sequence[Difference]",
    reference: str,
) -> None:
    """Print the experiments, the differences of their EERs, and notes."""
    from speakerlab.experiments import run_table
    from speakerlab.experiments.results import terminal_width

    # In a file or a pipe, every row is one line.
    width = terminal_width()
    sys.stdout.write(f"{run_table.format_runs(runs, width)}\n")
    table = run_table.format_differences(differences, width)
    if table:
        sys.stdout.write(f"\nEER compared with {reference}, in points:\n\n{table}\n")
    notes = run_table.notes_of(runs, differences)
    if notes:
        text = "\n".join(notes)
        sys.stdout.write(f"\n{text}\n")
