"""Check this machine before a run: one line per check, ok or what to change."""

import logging
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser

ROOT = Path(__file__).parents[2]


def main(words: Sequence[str]) -> None:
    """`speakerlab doctor [--data DIR] [--exp DIR] [--model M | --config YAML...] [--nproc N]`"""
    options = parser("doctor", __doc__)
    options.add_argument("--data", type=Path, metavar="DIR", help="data directories to read from")
    exp = "where experiments will be written (here)"
    options.add_argument("--exp", type=Path, default=Path(), metavar="DIR", help=exp)
    what = options.add_mutually_exclusive_group()
    what.add_argument("--model", default="campplus", metavar="NAME", help="conf/NAME.yaml")
    what.add_argument("--config", type=Path, nargs="+", metavar="YAML", help="as in train")
    options.add_argument(
        "--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE", help="as in train"
    )
    options.add_argument("--gpus", type=positive, metavar="N", help="number of GPUs to use")
    options.add_argument("--nproc", type=positive, metavar="N", help="ranks on this host (--gpus)")
    workers = "data workers a rank, as runtime.num_workers"
    options.add_argument("--num-workers", type=whole, metavar="N", help=workers)
    args = options.parse_args(words)

    from speakerlab.bench.doctor import Plan, check_host
    from speakerlab.bench.doctor_devices import check_devices
    from speakerlab.config.schema import load_config

    logging.disable(logging.INFO)  # the findings are in the lines
    config = load_config(args.config or [ROOT / "conf" / f"{args.model}.yaml"], args.set)
    workers = config.runtime.num_workers if args.num_workers is None else args.num_workers
    plan = Plan(
        config=config,
        exp=args.exp,
        data=args.data,
        ranks=args.nproc or args.gpus or 1,
        num_workers=None if workers == "auto" else workers,
    )
    failed = 0
    for lines in (check_host(plan), check_devices(plan.ranks)):
        for line in lines:
            print(line, flush=True)
            failed += line.level == "fail"
    if failed:
        raise ValueError(f"doctor: {failed} checks failed; fix the problems above before a run")


def whole(text: str) -> int:
    """Read a number from 0 on."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text} is not a whole number")
    return int(text)


def positive(text: str) -> int:
    """Read a number from 1 on."""
    if not whole(text):
        raise ArgumentTypeError("must be at least 1")
    return int(text)
