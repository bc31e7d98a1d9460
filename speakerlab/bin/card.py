"""Print the card of a model: licence, training data, front end, results."""

import sys
from collections.abc import Sequence

from speakerlab.bin.command import parser
from speakerlab.checkpoints.hub import local


def main(words: Sequence[str]) -> None:
    options = parser("card", __doc__)
    options.add("model MODEL", "experiment, model folder or hub:NAME")
    args = options.parse_args(words)
    from speakerlab.experiments.model_card import describe

    for name, lines in describe(local(args.model)):
        for number, line in enumerate(lines):
            sys.stdout.write(f"{'' if number else name:15}  {line}\n")
