"""Print a table for a paper: EER and minDCF of systems on trial lists, with intervals."""

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence

from speakerlab.bin.command import parser
from speakerlab.core.atomic import check_writable, write_text

log = logging.getLogger(__name__)
FORMATS = ("latex", "markdown", "csv")


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    from speakerlab.experiments import paper_table
    from speakerlab.experiments.paper_layout import PAGE_CM
    from speakerlab.experiments.systems import (
        read_lists,
        read_systems,
        score_systems,
    )

    # Before the work, which may take minutes.
    if args.out is not None:
        check_writable(args.out)
    systems = read_systems(args.systems, num_lists=len(args.trials))
    lists = read_lists(args.trials, systems)
    scored = score_systems(systems, lists, args.p_target)
    table = paper_table.build_table(systems, lists, scored, args.p_target)
    for note in table.notes:
        log.warning("%s", note)
    if args.format == "latex":
        warn_of_width(paper_table.latex_width_cm(table), PAGE_CM)
    text = paper_table.FORMATS[args.format](table)
    if args.out is None:
        sys.stdout.write(text)
        return
    write_text(args.out, text)
    log.info("%s: wrote the table", args.out)


def warn_of_width(width_cm: float, page_cm: float) -> None:
    """Log that a table is wider than a page."""
    if width_cm > page_cm:
        log.warning(
            "the table is about %.0f cm wide in \\small, a page %.0f cm; choose fewer"
            " lists with --trials, or give shorter names",
            width_cm,
            page_cm,
        )


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("table", __doc__, builds_components=False)
    options.add_systems()
    options.add("--format", "format of the table", choices=FORMATS, default="markdown")
    options.add("--out FILE", "file to write, replaced (default: print the table)")
    options.add(
        "--p-target P", "target priors of the minDCF", nargs="+", default=[0.01]
    )
    return options.parse_args(arguments)
