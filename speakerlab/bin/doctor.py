"""Check this machine before a run: print one line per check, with the fix if it fails."""

import logging
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser, plain_text


def main(arguments: Sequence[str]) -> None:
    options = parser("doctor", __doc__)
    options.add("--data DIR", "folder of the data directories")
    options.add(
        "--exp DIR", "folder for experiments (default: current folder)", default=Path()
    )
    configuration = options.add_mutually_exclusive_group()
    options.add(
        "--model NAME",
        "configuration conf/NAME.yaml",
        group=configuration,
        default="campplus",
    )
    options.add(
        "--config YAML",
        "files, as in `speakerlab train`",
        group=configuration,
        nargs="+",
    )
    options.add_settings()
    options.add("--gpus N", "number of GPUs to use", least=1)
    options.add("--nproc N", "ranks on this host (default: --gpus, else 1)", least=1)
    options.add(
        "--num-workers N", "data workers of each rank, as runtime.num_workers", least=0
    )
    args = options.parse_args(arguments)

    from speakerlab.bench.doctor import CHECKS, Plan
    from speakerlab.config.schema import load_config

    # Disable log lines of the tested parts, which would appear between the lines of the checks.
    logging.disable(logging.INFO)
    if args.num_workers is not None:
        args.set += [f"runtime.num_workers={args.num_workers}"]
    layers = args.config or [Path(args.model)]
    config = load_config(layers, args.set)
    plan = Plan(
        config=config,
        exp=args.exp,
        data=args.data,
        ranks=args.nproc or args.gpus or 1,
        gpus=args.gpus or 0,
    )
    num_failed = 0
    for check in CHECKS:
        try:
            for line in check(plan):
                print(line, flush=True)
                num_failed += line.level == "fail"
        # Continue with the next check, so that the user sees all problems at once.
        except (ValueError, OSError) as error:
            print(f"fail {plain_text(error)}", flush=True)
            num_failed += 1
    if num_failed:
        raise ValueError(
            f"doctor: failed checks: {num_failed}; fix the problems above before a run"
        )
