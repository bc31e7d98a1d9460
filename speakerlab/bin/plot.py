"""Draw a figure for a paper: DET or ROC curves, scores, durations or confusions of systems."""

import argparse
import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from speakerlab.bin.classify import TASK
from speakerlab.bin.command import parser
from speakerlab.core.atomic import check_writable
from speakerlab.core.counting import count_of
from speakerlab.experiments.paper_layout import (
    COLUMN_CM,
    PAGE_CM,
    Size,
    paper_style,
    save_figure,
)

if TYPE_CHECKING:  # it imports torch, which is slow: only for valid options
    from speakerlab.experiments.results import Row
    from speakerlab.experiments.systems import Scored

log = logging.getLogger(__name__)
KINDS = ("det", "scores", "roc", "duration", "confusion")
FORMATS = (".pdf", ".svg", ".png")
WIDTHS = {"column": COLUMN_CM, "page": PAGE_CM}
MIN_WIDTH, MAX_WIDTH = 5.0, 30.0
WITH_PRIORS = ("det", "roc", "scores")  # figures that mark minDCFs
MAX_PRIORS = 5  # as many as have their own markers and dashes beside those of the EER


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    from speakerlab.experiments.paper_confusion import confusion_figure
    from speakerlab.experiments.plots import import_matplotlib

    # Before the work, which may take minutes.
    check_writable(args.out)
    import_matplotlib()
    size = Size(args.width, args.font_size)
    with paper_style(size):
        if args.kind == "confusion":
            figure = confusion_figure(read_confusions(args), size)
        else:
            figure = draw(args, read_scored(args), size)
        save_figure(figure, args.out)
        width, height = 2.54 * figure.get_size_inches()
    log.info(
        "%s: wrote a figure of %.1f x %.1f cm with text of %g pt; include it at this"
        " size",
        args.out,
        width,
        height,
        args.font_size,
    )


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("plot", __doc__, builds_components=False)
    kind = (
        "det, roc: error rates at all thresholds; scores: histograms and thresholds;"
        " duration: EER by the duration of the shorter recording; confusion: results of"
        " `speakerlab classify`"
    )
    options.add("kind KIND", kind, choices=KINDS)
    options.add_systems(several_lists=False)
    options.add(
        "--out FILE", "file to write: .pdf, .svg or .png; replaced", required=True
    )
    options.add(
        "--width column|page|CM",
        "width of the figure in the paper: column, 8 cm (default), page, 17 cm, or a"
        " number of cm",
        value_type=_width,
        default=WIDTHS["column"],
    )
    options.add("--font-size PT", "size of the text in points", least=4.0, default=8.0)
    options.add(
        "--p-target P",
        "target priors of the minDCF that det, roc and scores mark (default: 0.01)",
        nargs="+",
        default=None,
    )
    options.add("--intervals", "det: also draw 95 %% intervals of the curves")
    options.add("--data NAME", "confusion: data directory, if several were classified")
    args = options.parse_args(arguments)
    check(args)
    # Each prior once.
    args.p_target = list(dict.fromkeys(args.p_target or [0.01]))
    return args


def _width(text: str) -> float:
    """Read a width: a name or centimetres."""
    if text in WIDTHS:
        return WIDTHS[text]
    try:
        width = float(text)
    except ValueError:
        width = 0.0
    if not MIN_WIDTH <= width <= MAX_WIDTH:  # NaN is not
        raise argparse.ArgumentTypeError(
            f"must be column, page, or {MIN_WIDTH:g} to {MAX_WIDTH:g} cm, got {text}"
        )
    return width


def check(args: Namespace) -> None:
    """Refuse an unknown format, and options that the kind of figure does not have."""
    if args.out.suffix.lower() not in FORMATS:
        raise ValueError(
            f"--out: {args.out} must end with {', '.join(FORMATS)}; choose one of them"
        )
    if args.intervals and args.kind != "det":
        raise ValueError(f"--intervals: is for det, not for {args.kind}; leave it out")
    if args.p_target is not None and args.kind not in WITH_PRIORS:
        raise ValueError(
            f"--p-target: is for {', '.join(WITH_PRIORS)}, not for {args.kind}; leave it"
            " out"
        )
    if args.p_target is not None and len(set(args.p_target)) > MAX_PRIORS:
        raise ValueError(
            f"--p-target: a figure marks at most {MAX_PRIORS} priors, got"
            f" {len(args.p_target)}; choose some"
        )
    if len(args.trials) > 1:
        raise ValueError(
            f"--trials: a figure has one list, got {len(args.trials)}; draw one figure for"
            " each"
        )
    if args.kind == "confusion" and args.trials:
        raise ValueError("--trials: is not for confusion; give --data")
    if args.kind != "confusion" and args.data is not None:
        raise ValueError(
            f"--data: is for confusion, not for {args.kind}; give --trials"
        )


def read_scored(args: Namespace) -> "list[Scored]":
    """Return the systems on the one trial list that they have in common."""
    from speakerlab.experiments.systems import (
        read_lists,
        read_systems,
        require_scores,
        score_systems,
    )

    systems = read_systems(args.systems, num_lists=len(args.trials))
    lists = read_lists(args.trials, systems)
    if not args.trials:
        # Score files need --trials, so all systems are experiments.
        common_keys = set.intersection(*[set(system.rows) for system in systems])
        lists = [trial_list for trial_list in lists if trial_list.key in common_keys]
    if not lists:
        raise ValueError(
            "--trials: the systems have no list in common; score them on the same list"
        )
    if len(lists) > 1:
        keys = " and ".join(f"'{trial_list.key}'" for trial_list in lists)
        raise ValueError(
            f"--trials: a figure has one list, the results have {keys}; choose one, as"
            f" --trials '{lists[0].key}'"
        )
    (results,) = score_systems(systems, lists, args.p_target)
    return require_scores(lists[0], systems, results)


def draw(args: Namespace, scored: "Sequence[Scored]", size: Size) -> Any:
    """Return the figure."""
    from speakerlab.experiments import paper_figures

    if args.kind == "duration":
        return paper_figures.duration_figure(scored, size)
    if args.kind == "roc":
        return paper_figures.roc_figure(scored, size, p_targets=args.p_target)
    if args.kind == "scores":
        return paper_figures.scores_figure(scored, size, p_targets=args.p_target)
    return paper_figures.det_figure(
        scored,
        size,
        p_targets=args.p_target,
        with_bands=args.intervals,
    )


def read_confusions(args: Namespace) -> "dict[str, Row]":
    """Return system -> its row of an identification; ValueError if there is none, or several."""
    from speakerlab.experiments.results import read_rows
    from speakerlab.experiments.systems import named_paths, only_path

    row_of: dict[str, Row] = {}
    for name, paths in named_paths(args.systems).items():
        exp_dir = only_path(name, paths)
        rows = [
            row
            for row in read_rows(exp_dir / "results.json")
            if row.get("task") == TASK and args.data in (None, row["data"])
        ]
        if not rows:
            of_data = "" if args.data is None else f" of {args.data}"
            raise ValueError(
                f"{exp_dir}: has no results of an identification{of_data}; run"
                " `speakerlab classify`"
            )
        if len(rows) > 1:
            names = ", ".join(row["data"] for row in rows)
            count = count_of(len(rows), "data directory")
            raise ValueError(
                f"{exp_dir}: has results of {count}, {names}; choose one with --data"
            )
        row_of[name] = rows[0]
    return row_of
