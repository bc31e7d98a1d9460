"""Check this machine before a run: print one line per check, with the fix if it fails."""

import logging
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser, plain_text


def main(words: Sequence[str]) -> None:
    options = parser("doctor", __doc__)
    options.add("--data DIR", "folder of the data directories")
    options.add("--exp DIR", "folder for experiments (default: current folder)", default=Path())
    what = options.add_mutually_exclusive_group()
    options.add("--model NAME", "configuration conf/NAME.yaml", group=what, default="campplus")
    options.add("--config YAML", "files, as in `speakerlab train`", group=what, nargs="+")
    options.add_settings()
    options.add("--gpus N", "number of GPUs to use", least=1)
    options.add("--nproc N", "ranks on this host (default: --gpus, else 1)", least=1)
    options.add("--num-workers N", "data workers of each rank, as runtime.num_workers", least=0)
    args = options.parse_args(words)
    from speakerlab.bench.doctor import CHECKS, Plan
    from speakerlab.config.schema import load_config

    logging.disable(logging.INFO)  # the findings are in the lines
    if args.num_workers is not None:
        args.set += [f"runtime.num_workers={args.num_workers}"]
    config = load_config(args.config or [Path(args.model)], args.set)
    ranks, gpus = args.nproc or args.gpus or 1, args.gpus or 0
    plan, failed = Plan(config, args.exp, args.data, ranks, gpus), 0
    for check in CHECKS:
        try:
            for line in check(plan):
                print(line, flush=True)
                failed += line.level == "fail"
        except (ValueError, OSError) as error:  # the next check is made all the same
            print(f"fail {plain_text(error)}", flush=True)
            failed += 1
    if failed:
        raise ValueError(f"doctor: failed checks: {failed}; fix the problems above before a run")
