"""Print the card of a model: licence, training data, front end, results."""

import sys
from collections.abc import Sequence

from speakerlab.bin.command import parser
from speakerlab.checkpoints.hub import local


def main(arguments: Sequence[str]) -> None:
    options = parser("card", __doc__, builds_components=False)
    options.add("model MODEL", "experiment, model folder or hub:NAME")
    args = options.parse_args(arguments)

    from speakerlab.experiments.model_card import describe

    folder = local(args.model)
    for name, lines in describe(folder):
        # Print the label only before its first line.
        label = name
        for line in lines:
            sys.stdout.write(f"{label:15}  {line}\n")
            label = ""
