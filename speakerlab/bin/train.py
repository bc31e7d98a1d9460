"""Train a model into an experiment's folder, or resume where it was stopped.

Run by plain python as one process, or by torchrun as several ranks.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser, run
from speakerlab.core import process


def main(words: Sequence[str]) -> None:
    """`speakerlab train --exp DIR --config YAML... [--init MODEL] [--set key=value ...]`"""
    process.die_with_launcher()
    args = parse(words)
    from speakerlab.bin.training import train  # torch: not before the options are right

    train(args)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("train", __doc__)
    options.add_argument("--exp", type=Path, required=True, metavar="DIR")
    options.add_argument("--config", type=Path, nargs="+", required=True, metavar="YAML")
    options.add_argument("--init", type=Path, metavar="MODEL", help="a published model")
    settings = "e.g. training.lr=0.1, after all files"
    options.add_argument(
        "--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE", help=settings
    )
    below = "only smaller micro-batches: this one did not fit (run.sh gives it)"
    options.add_argument("--below-micro-batch", type=int, metavar="N", help=below)
    args = options.parse_args(words)
    if args.below_micro_batch is not None and args.below_micro_batch < 2:
        got = args.below_micro_batch
        raise ValueError(f"--below-micro-batch: must be at least 2, got {got}; leave it out")
    return args


if __name__ == "__main__":
    run(main, sys.argv[1:])
