"""Print the card of a model: licence, training data, front end, results."""

import sys
import textwrap
from collections.abc import Sequence

from speakerlab.bin.command import parser
from speakerlab.checkpoints.hub import local

WIDTH = 100  # columns of a line
LABEL_WIDTH = 15
GAP = "  "  # between columns, as in tables


def main(arguments: Sequence[str]) -> None:
    options = parser("card", __doc__, builds_components=False)
    options.add("model MODEL", "experiment, model folder, hub:NAME or hf:owner/name")
    args = options.parse_args(arguments)

    from speakerlab.experiments.model_card import describe
    from speakerlab.experiments.results import terminal_width

    folder = local(args.model)
    # On a terminal, tables are broken to fit beside the labels.
    width = terminal_width()
    if width is not None:
        width -= LABEL_WIDTH + len(GAP)
    for name, lines in describe(folder, width=width):
        # Print the label only before its first line.
        label = name
        for line in lines:
            for part in wrap(line):
                sys.stdout.write(f"{label:{LABEL_WIDTH}}{GAP}{part}\n")
                label = ""


def wrap(line: str) -> list[str]:
    """Return a line of text as lines that fit; a line of a table stays as it is."""
    if GAP in line:
        return [line]
    return textwrap.wrap(
        line,
        WIDTH - LABEL_WIDTH - len(GAP),
        subsequent_indent=GAP,
        break_long_words=False,
        break_on_hyphens=False,
    )
