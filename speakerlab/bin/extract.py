"""Embed every utterance of a data directory with an experiment's model."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.bin.model_options import add_precision
from speakerlab.bin.pack import job
from speakerlab.core import process


def main(words: Sequence[str]) -> None:
    """`speakerlab extract --exp DIR --data DIR [--precision bf16] [--nproc N] [--job I/N] ...`"""
    process.die_with_launcher()
    args = parse(words)
    from speakerlab.bin.extracting import extract  # torch: not before the options are right

    extract(args)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("extract", __doc__)
    options.add_argument("--exp", type=Path, required=True, metavar="DIR")
    options.add_argument("--data", type=Path, required=True, metavar="DIR")
    options.add_argument("--untrained", action="store_true", help="as training began")
    options.add_argument("--per-speaker", type=int, metavar="K", help="at most K of each speaker")
    options.add_argument("--nproc", type=int, default=1, help="processes, one a GPU")
    add_precision(options)
    options.add_argument("--job", type=job, default=(1, 1), metavar="I/N", help="of N at a time")
    wait = "for the other jobs; give up when none has finished a chunk for so long"
    options.add_argument("--wait-minutes", type=float, metavar="M", help=wait)
    args = options.parse_args(words)
    for name in ("nproc", "per_speaker"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: is at least 1, got {value}; see --help")
    return args
