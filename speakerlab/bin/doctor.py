"""Check this machine before a run: print one line per check, with the fix if it fails."""

import logging
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser, plain_text
from speakerlab.bin.plan import model_layer


def main(words: Sequence[str]) -> None:
    """`speakerlab doctor [--data DIR] [--exp DIR] [--model M | --config YAML...] [--nproc N]`"""
    options = parser("doctor", __doc__)
    options.add_path("--data", "DIR", "folder of the data directories")
    exp = "folder for experiments (default: current folder)"
    options.add_path("--exp", "DIR", exp, default=Path())
    what = options.add_mutually_exclusive_group()
    model = "configuration conf/NAME.yaml (default: campplus)"
    what.add_argument("--model", default="campplus", metavar="NAME", help=model)
    config = "configuration files, as in `speakerlab train`"
    what.add_argument("--config", type=Path, nargs="+", metavar="YAML", help=config)
    options.add_settings()
    options.add_number("--gpus", "N", "number of GPUs to use", least=1)
    options.add_number("--nproc", "N", "ranks on this host (default: --gpus, else 1)", least=1)
    workers = "data workers of each rank, as runtime.num_workers"
    options.add_number("--num-workers", "N", workers, least=0)
    args = options.parse_args(words)
    from speakerlab.bench.doctor import CHECKS, Plan
    from speakerlab.bench.doctor_devices import check_devices
    from speakerlab.config.schema import load_config

    logging.disable(logging.INFO)  # the findings are in the lines
    config = load_config(args.config or [model_layer(args.model)], args.set)
    workers = config.runtime.num_workers if args.num_workers is None else args.num_workers
    num_workers = None if workers == "auto" else workers
    ranks, gpus = args.nproc or args.gpus or 1, args.gpus or 0
    plan = Plan(config, args.exp, args.data, ranks, num_workers, gpus)
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
        raise ValueError(f"doctor: failed checks: {failed}; fix the problems above before a run")
