"""Train a model into an experiment's folder, or resume where it was stopped.

Run by plain python as one process, or by torchrun as several ranks.
"""

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from speakerlab import process, setup_training
from speakerlab.bin.command import parser, run
from speakerlab.consistency import load
from speakerlab.run_training import build_training, train
from speakerlab.training.distributed import is_lost_peer, start_ranks
from speakerlab.training.guard import NumericError
from speakerlab.training.learning import DivergedError
from speakerlab.training.lock import lock_experiment
from speakerlab.training.precision import apply_backend_settings
from speakerlab.training.rescue import OutOfMemoryStop
from speakerlab.training.signals import Signals, Stopped

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab train --exp DIR --config YAML... [--init MODEL] [--set key=value ...]`"""
    process.die_with_launcher()
    args = parse(words)
    config = load(args.exp, args.config, args.set)
    conv_tf32 = config.runtime.tf32 == "auto"
    apply_backend_settings(deterministic=config.runtime.deterministic, conv_tf32=conv_tf32)
    ranks = start_ranks(timeout_minutes=config.runtime.timeout_minutes)
    locks: list[TextIO] = []  # open for as long as this process lives
    ranks.on_first(lambda: locks.append(lock_experiment(args.exp)))
    setup_training.log_to(args.exp, ranks)
    signals = Signals(lambda number: process.leave(process.stopped(number)))
    signals.listen()
    try:
        below = args.below_micro_batch
        parts = build_training(args.exp, args.init, config, ranks, signals, below=below)
        train(args.exp, config, ranks, parts)
    except NumericError as error:
        log.error("%s; given up: lower training.lr, or use runtime.precision=fp32", error)
        process.leave(process.EXIT_NUMERIC)
    except DivergedError:
        process.leave(process.EXIT_DIVERGED)
    except OutOfMemoryStop:
        process.leave(process.EXIT_MEMORY)
    except Stopped as stop:
        if ranks.is_first:
            log.info("%s; the same command goes on from here", stop)
        process.leave(process.stopped(stop.number))
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        log.error("rank %d: lost another rank, which tells why", ranks.rank)
        process.leave(process.EXIT_LOST)


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
