"""Train a model into an experiment's folder, or resume where it was stopped.

Run by plain python as one process, or by torchrun as several ranks.
"""

import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn, TextIO

from speakerlab.bin.command import parser
from speakerlab.checkpoints.hub import local
from speakerlab.core import process

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    process.die_with_launcher()
    args = parse(words)
    # torch is slow to import: not before the options are valid
    from speakerlab.experiments import consistency, setup, train
    from speakerlab.training.devices import check_format
    from speakerlab.training.signals import Signals

    config = consistency.load_same_config(args.exp, args.config, args.set)
    check_format(config.runtime.device, config.runtime.precision)
    ranks = setup.start_rank(config)
    is_new = not args.exp.exists()
    locks: list[TextIO] = []  # held as long as this process lives
    ranks.on_first(lambda: locks.append(consistency.lock_experiment(args.exp)))
    setup.log_to(args.exp, ranks)
    signals = Signals(lambda number: process.leave(process.EXIT_SIGNAL + number))
    signals.listen()
    try:
        below = args.below_micro_batch
        with setup.undone_if_refused(args.exp, is_new=is_new and ranks.is_first):
            more = (config, ranks, signals)
            training = train.build_training(args.exp, args.init, *more, below=below)
        train.train(training)
    except RuntimeError as error:
        leave(error, ranks.rank)


def leave(error: RuntimeError, rank: int) -> NoReturn:
    """Leave with the exit code of what ended the training early; a bug is raised again."""
    from speakerlab.training.distributed import is_lost_peer
    from speakerlab.training.progress import DivergedError
    from speakerlab.training.rescue import OutOfMemoryStop, is_out_of_memory
    from speakerlab.training.signals import Stopped
    from speakerlab.training.update import NumericError

    if isinstance(error, NumericError):
        log.error("%s; giving up: lower training.lr, or use runtime.precision=fp32", error)
        process.leave(process.EXIT_NUMERIC)
    if isinstance(error, DivergedError):
        process.leave(process.EXIT_DIVERGED)
    if isinstance(error, OutOfMemoryStop):
        process.leave(process.EXIT_MEMORY)
    if isinstance(error, Stopped):
        log.log(logging.DEBUG if rank else logging.INFO, "%s; the same command resumes", error)
        process.leave(process.EXIT_SIGNAL + error.number)
    if is_out_of_memory(error):
        found = str(error).splitlines()[0]
        text = (
            "rank %d: out of memory outside of a step: %s; free memory of the device, or use a %s"
        )
        log.error(text, rank, found, "smaller model or a lower runtime.precision")
        process.leave(process.EXIT_INPUT)
    if is_lost_peer(error):
        log.error("rank %d: lost another rank; see the output of that rank", rank)
        process.leave(process.EXIT_LOST)
    raise error


def parse(words: Sequence[str]) -> Namespace:
    options = parser("train", __doc__)
    options.add("--exp DIR", "folder of the experiment, new or to resume", required=True)
    config = "files, or names in conf/ such as eres2net; a later one overrides earlier ones"
    options.add("--config YAML", config, nargs="+", required=True)
    options.add("--init MODEL", "start from this experiment, model folder or hub:NAME")
    options.add_settings("change settings; they override all files, e.g. training.lr=0.1")
    below = "use a micro-batch smaller than N (set by run.sh after N ran out of memory)"
    options.add("--below-micro-batch N", below, least=2)
    args = options.parse_args(words)
    args.init = args.init and local(args.init)
    return args
