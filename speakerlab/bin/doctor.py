"""Check this machine before a run: print one line per check, with the fix if it fails."""

import logging
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser, plain_text
from speakerlab.bin.plan import model_layer


def main(words: Sequence[str]) -> None:
    """`speakerlab doctor [--data DIR] [--exp DIR] [--model M | --config YAML...] [--nproc N]`"""
    options = parser("doctor", __doc__)
    options.add_argument("--data", type=Path, metavar="DIR", help="folder of the data directories")
    exp = "folder for experiments (default: current folder)"
    options.add_argument("--exp", type=Path, default=Path(), metavar="DIR", help=exp)
    what = options.add_mutually_exclusive_group()
    what.add_argument("--model", default="campplus", metavar="NAME", help="conf/NAME.yaml")
    what.add_argument("--config", type=Path, nargs="+", metavar="YAML", help="as in train")
    options.add_argument(
        "--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE", help="as in train"
    )
    options.add_argument("--gpus", type=int, metavar="N", help="number of GPUs to use")
    ranks = "ranks on this host (default: --gpus, else 1)"
    options.add_argument("--nproc", type=int, metavar="N", help=ranks)
    workers = "data workers a rank, as runtime.num_workers"
    options.add_argument("--num-workers", type=int, metavar="N", help=workers)
    args = options.parse_args(words)
    for name, least in (("gpus", 1), ("nproc", 1), ("num_workers", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            options.error(f"--{name.replace('_', '-')}: {value}: must be at least {least}")

    from speakerlab.bench.doctor import CHECKS, Plan
    from speakerlab.bench.doctor_devices import check_devices
    from speakerlab.config.schema import load_config

    logging.disable(logging.INFO)  # the findings are in the lines
    config = load_config(args.config or [model_layer(args.model)], args.set)
    workers = config.runtime.num_workers if args.num_workers is None else args.num_workers
    num_workers = None if workers == "auto" else workers
    plan = Plan(config, args.exp, args.data, args.nproc or args.gpus or 1, num_workers)
    failed = 0
    for check in (*CHECKS, check_devices):
        try:
            for line in check(plan):
                print(line, flush=True)
                failed += line.level == "fail"
        except (ValueError, OSError) as error:  # the next check is made all the same
            print(f"fail {plain_text(error)}", flush=True)
            failed += 1
    if failed:
        raise ValueError(f"doctor: {failed} checks failed; fix the problems above before a run")
