"""What `speakerlab train` does when its options are right. In: them. Out: an exit code, a model."""

import logging
from argparse import Namespace
from typing import TextIO

from speakerlab.config.schema import Config
from speakerlab.core import process
from speakerlab.experiments import setup as setup_training
from speakerlab.experiments import train as run_training
from speakerlab.experiments.consistency import load
from speakerlab.experiments.train import build_training
from speakerlab.training.distributed import Ranks, is_lost_peer, start_ranks
from speakerlab.training.guard import NumericError
from speakerlab.training.learning import DivergedError
from speakerlab.training.lock import lock_experiment
from speakerlab.training.precision import apply_backend_settings
from speakerlab.training.rescue import OutOfMemoryStop
from speakerlab.training.signals import Signals, Stopped

log = logging.getLogger(__name__)


def train(args: Namespace) -> None:
    """Train as one rank; what ends a run early is told in a line and by the exit code."""
    config = load(args.exp, args.config, args.set)
    ranks = start_rank(config)
    locks: list[TextIO] = []  # open for as long as this process lives
    ranks.on_first(lambda: locks.append(lock_experiment(args.exp)))
    setup_training.log_to(args.exp, ranks)
    signals = Signals(lambda number: process.leave(process.stopped(number)))
    signals.listen()
    try:
        below = args.below_micro_batch
        parts = build_training(args.exp, args.init, config, ranks, signals, below=below)
        run_training.train(args.exp, config, ranks, parts)
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


def start_rank(config: Config) -> Ranks:
    """This process as one of the ranks, with all that is set for the whole process."""
    conv_tf32 = config.runtime.tf32 == "auto"
    apply_backend_settings(deterministic=config.runtime.deterministic, conv_tf32=conv_tf32)
    ranks = start_ranks(timeout_minutes=config.runtime.timeout_minutes)
    if ranks.device.type == "cpu":
        process.keep_freed_memory()
    return ranks
