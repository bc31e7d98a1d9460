"""Look at this machine before a run: a line for each thing, ok or what to change."""

import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speakerlab.bin.command import parser

if TYPE_CHECKING:  # torch comes with it: not before the options are right
    from speakerlab.config.schema import Config

ROOT = Path(__file__).parents[2]


def main(words: Sequence[str]) -> None:
    """`speakerlab doctor [--data DIR] [--exp DIR] [--model M | --config YAML...] [--nproc N]`"""
    args = parse(words)
    from speakerlab.bench.doctor import Plan, check_host
    from speakerlab.bench.doctor_devices import check_devices

    logging.disable(logging.INFO)  # what is found is in the lines
    config = read_config(args)
    asked = config.runtime.num_workers if args.num_workers is None else args.num_workers
    plan = Plan(
        config=config,
        exp=args.exp,
        data=args.data,
        ranks=args.nproc or args.gpus or 1,
        num_workers=None if asked == "auto" else asked,
    )
    failed = 0
    for lines in (check_host(plan), check_devices(plan.ranks)):
        for line in lines:
            print(line, flush=True)
            failed += line.level == "fail"
    if failed:
        raise ValueError(f"doctor: {failed} lines with fail; mend what they name before a run")


def read_config(args: Namespace) -> "Config":
    """The training that is meant; runtime.num_workers may be given by itself."""
    from speakerlab.config.schema import load_config

    layers = args.config or [ROOT / "conf" / f"{args.model}.yaml"]
    return load_config(layers, args.set)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("doctor", __doc__)
    options.add_argument("--data", type=Path, metavar="DIR", help="data directories, to be read")
    exp = "where experiments go, to be written to (here)"
    options.add_argument("--exp", type=Path, default=Path(), metavar="DIR", help=exp)
    what = options.add_mutually_exclusive_group()
    what.add_argument("--model", default="campplus", metavar="NAME", help="conf/NAME.yaml")
    what.add_argument("--config", type=Path, nargs="+", metavar="YAML", help="as in train")
    options.add_argument(
        "--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE", help="as in train"
    )
    options.add_argument("--gpus", type=count, metavar="N", help="how many are to be used")
    options.add_argument("--nproc", type=count, metavar="N", help="ranks here (one for each GPU)")
    workers = "data workers a rank, as runtime.num_workers"
    options.add_argument("--num-workers", type=whole, metavar="N", help=workers)
    return options.parse_args(words)


def whole(text: str) -> int:
    """A number that counts, or none."""
    if not text.isdecimal():
        raise ValueError
    return int(text)


def count(text: str) -> int:
    """At least one of something."""
    if not whole(text):
        raise ValueError
    return int(text)
