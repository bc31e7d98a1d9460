"""Train a model into an experiment's folder, or resume where it was stopped.

One process trains alone, or as one rank of several. With `--gpus "0 1"`, `--nproc` or `--nnodes`
the command starts its ranks; torchrun, srun and operators that set RANK and WORLD_SIZE start it
as one of theirs. After running out of memory it starts once more, with a smaller micro-batch.
"""

import json
import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from speakerlab.bin.command import choose_gpus, parser
from speakerlab.checkpoints.hub import local
from speakerlab.checkpoints.model_files import find_model
from speakerlab.core import process
from speakerlab.training.group import Group, find_group

if TYPE_CHECKING:  # it imports torch, which is slow: only for valid options
    from speakerlab.config.schema import Config

log = logging.getLogger(__name__)
# Variables of a rank's place that torch.distributed and our own code read.
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NOTE_SECONDS = 60.0  # NFS may hide another host's file this long (attribute cache)
CLOCK_SECONDS = 60.0  # tolerated difference between the clocks of hosts
SECOND_MEMORY_REMEDY = (
    "use a shorter data.crop_seconds, a smaller model or a lower runtime.precision"
)


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    # There is nothing to save until the training begins.
    process.leave_on_ctrl_c()
    group = find_group(os.environ)
    check_group(args, group)
    if args.check:
        report_needs(args)
    elif args.nnodes > 1 or (group is None and args.nproc > 1):
        # This process is not a rank: it starts the ranks of its host.
        train_on_ranks(args, arguments)
    else:
        # Without a group, they are of another program, such as LOCAL_RANK of an older shell.
        for name in PLACE:
            os.environ.pop(name, None)
        if group is not None:
            os.environ.update(group.variables())
            note_group(group)
        train_as_rank(args, arguments, can_retry=group is None)


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("train", __doc__)
    options.add(
        "--exp DIR", "folder of the experiment, new or to resume", required=True
    )
    config = (
        "files, or names in conf/ such as eres2net; a later one overrides earlier ones"
    )
    options.add("--config YAML", config, nargs="+", required=True)
    options.add("--init MODEL", "start from this experiment, model folder or hub:NAME")
    teachers = "learn from this experiment, model folder, hub:NAME or .onnx file"
    options.add("--teacher MODEL", f"{teachers} (task distil)", nargs="+")
    options.add_settings(
        "change settings; they override all files, e.g. training.lr=0.1"
    )
    options.add_gpus("one rank on each")
    options.add(
        "--nproc N", "ranks on this host (default: one for each of --gpus)", least=1
    )
    options.add("--nnodes N", "hosts; run the same command on each", least=1, default=1)
    options.add("--node-rank I", "number of this host, from 0", least=0)
    options.add("--rdzv HOST:PORT", "address of node rank 0, with an open port")
    options.add(
        "--check", "check devices, settings and --init, print what is needed, and exit"
    )
    below = "use a micro-batch smaller than N (after one of N crops ran out of memory)"
    options.add("--below-micro-batch N", below, least=2)
    args = options.parse_args(arguments)
    gpus = choose_gpus(args.gpus)
    num_gpus = len(gpus)
    if gpus and args.nproc is not None and args.nproc > num_gpus:
        problem = f"{args.nproc} ranks for {num_gpus} GPUs"
        raise ValueError(f"--nproc: {problem}; use {num_gpus} or fewer")
    if args.nproc is None:
        args.nproc = max(1, num_gpus)
    check_hosts(args)
    if args.init is not None:
        args.init = find_initial(args.init)
    if args.teacher is not None:
        teachers = [str(path) for path in args.teacher]
        names = json.dumps(teachers, ensure_ascii=False)
        args.set = [*args.set, f"distil.teachers={names}"]
    return args


def find_initial(model: Path) -> Path:
    """Return the folder of --init, downloaded if it is a published model."""
    folder = local(model)
    try:
        find_model(folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--init: {error}") from None
    return folder


def check_hosts(args: Namespace) -> None:
    """Raise ValueError unless the options of several hosts are complete."""
    if args.nnodes == 1:
        if args.node_rank is not None or args.rdzv:
            raise ValueError(
                "--node-rank, --rdzv: only for several hosts; add --nnodes N"
            )
        return
    if args.node_rank is None or args.node_rank >= args.nnodes:
        problem = "missing" if args.node_rank is None else args.node_rank
        last = args.nnodes - 1
        raise ValueError(
            f"--node-rank: {problem}; give a whole number from 0 to {last}"
        )
    rendezvous = args.rdzv or ""
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal():
        problem = f"'{rendezvous}'" if rendezvous else "missing"
        raise ValueError(f"--rdzv: {problem}; give HOST:PORT of node rank 0")


def check_group(args: Namespace, group: Group | None) -> None:
    """Raise ValueError if the options contradict the group of ranks of this process.

    With --nnodes, one srun task per host starts the ranks of the host.
    """
    if group is None:
        return
    is_rank = group.starter == "torchrun" or args.nnodes == 1
    # --nproc may repeat the number of started ranks.
    is_other_number = args.nproc not in (1, group.local_size)
    starts_others = args.nnodes > 1 or is_other_number
    if is_rank and starts_others:
        started = (
            f"{group.starter} started this process as rank {group.rank} of"
            f" {group.world_size}"
        )
        raise ValueError(
            f"--gpus, --nproc, --nnodes: {started}; leave these options out"
        )


def note_group(group: Group) -> None:
    """Log that this process will wait for others, if only RANK and WORLD_SIZE say so."""
    if group.starter == "RANK and WORLD_SIZE":
        log.info(
            "RANK, WORLD_SIZE: set, so this is rank %d of %d and waits for the others at"
            " %s:%d; unset them to train alone",
            group.rank,
            group.world_size,
            group.address,
            group.port,
        )


def train_on_ranks(args: Namespace, arguments: Sequence[str]) -> NoReturn:
    """Start the ranks of this host; exit with the code of the rank that ended the run."""
    from speakerlab.bin import launch
    from speakerlab.experiments.corpus import PROBABILITIES, find_material

    # The ranks check the same, but only after seconds of starting, and each rank prints a line.
    config = read_config(args)
    check_inputs(args, config)
    for place in PROBABILITIES:
        find_material(config, place)
    if args.nnodes > 1:
        log.info(
            "begins when all %d hosts have run this command, at most 10 minutes apart",
            args.nnodes,
        )

    began = forget_memory_note(args)
    end = launch.run_ranks(
        ["train", *rank_options(args)],
        num_ranks=args.nproc,
        num_hosts=args.nnodes,
        host=args.node_rank,
        rendezvous=args.rdzv,
        attempt=1 if args.below_micro_batch is None else 2,
    )
    if end.line:
        sys.stderr.write(f"{end.line}\n")
    if end.code == process.EXIT_MEMORY:
        if args.nnodes > 1:
            wait_for_memory_note(args.exp, began)
        retry_smaller(args, arguments)
    process.leave(end.code)


def forget_memory_note(args: Namespace) -> float:
    """Remove the note of an earlier training that ran out of memory; return the current time."""
    note = args.exp / process.MEMORY_NOTE
    # With several hosts, only the first host removes the note.
    if args.below_micro_batch is None and not args.node_rank:
        note.unlink(missing_ok=True)
    return time.time()


def wait_for_memory_note(exp_dir: Path, began: float) -> None:
    """Wait until this host sees the note that rank 0 writes, possibly on another host."""
    note = exp_dir / process.MEMORY_NOTE
    deadline = time.monotonic() + NOTE_SECONDS
    while time.monotonic() < deadline:
        # An older note is from an earlier training. The other host's clock may be slow.
        oldest = began - CLOCK_SECONDS
        if note.exists() and note.stat().st_mtime >= oldest:
            return
        time.sleep(0.5)


def rank_options(args: Namespace) -> list[str]:
    """Return the options of the ranks: all options except the choice of GPUs and hosts."""
    options = ["--exp", str(args.exp)]
    options += ["--config", *map(str, args.config)]
    if args.init is not None:
        options += ["--init", str(args.init)]
    if args.plugins is not None:
        options += ["--plugins", str(args.plugins)]
    if args.below_micro_batch is not None:
        options += ["--below-micro-batch", str(args.below_micro_batch)]
    return [*options, "--set", *args.set]


def train_as_rank(
    args: Namespace,
    arguments: Sequence[str],
    *,
    can_retry: bool,
) -> None:
    """Train in this process; with can_retry, restart the command if it runs out of memory."""
    from speakerlab.experiments import consistency, run_log, train
    from speakerlab.experiments.hardware import start_rank
    from speakerlab.training.rescue import OutOfMemoryStop
    from speakerlab.training.signals import Signals

    config = read_config(args)
    ranks = start_rank(config)
    is_new = not args.exp.exists()
    # The open file holds the lock; this list keeps it open until the training ends.
    locks: list[TextIO] = []

    def lock() -> None:
        locks.append(consistency.lock_experiment(args.exp))

    ranks.on_first(lock)
    run_log.log_to(args.exp, ranks)
    signals = Signals(lambda number: process.leave(process.EXIT_SIGNAL + number))
    signals.listen()
    # Remove the folder of a refused training, unless it existed before.
    made_folder = is_new and ranks.is_first
    try:
        with run_log.undone_if_refused(args.exp, is_new=made_folder):
            training = train.start_training(
                args.exp,
                args.init,
                config,
                ranks,
                signals,
                below=args.below_micro_batch,
            )
        train.train(training)
    except OutOfMemoryStop:
        if can_retry and not signals.number:
            retry_smaller(args, arguments)
        process.leave(process.EXIT_MEMORY)
    except RuntimeError as error:
        leave(error, ranks.rank)


def retry_smaller(args: Namespace, arguments: Sequence[str]) -> None:
    """Restart this command once, with a micro-batch below the size that ran out of memory.

    The restart is a new process, because the error may have left memory allocated. Return if this
    is already the second attempt, or if the micro-batch that was too large is unknown.
    """
    note = args.exp / process.MEMORY_NOTE
    # The rank could not write the note, for example because the disk was full.
    if not note.exists():
        return
    text = note.read_text(encoding="utf-8")
    too_large = text.strip()
    if args.below_micro_batch is not None:
        log.error(
            "out of memory again with a micro-batch of %s; %s",
            too_large,
            SECOND_MEMORY_REMEDY,
        )
        return
    log.warning(
        "out of memory with a micro-batch of %s; retrying with a smaller one", too_large
    )
    process.start_again(["train", *arguments, "--below-micro-batch", too_large])


def leave(error: RuntimeError, rank: int) -> NoReturn:
    """Exit with the code of the error that ended the training; re-raise the error of a bug."""
    from speakerlab.training.distributed import is_lost_peer
    from speakerlab.training.progress import DivergedError
    from speakerlab.training.rescue import is_out_of_memory
    from speakerlab.training.signals import Stopped
    from speakerlab.training.update import NumericError

    if isinstance(error, NumericError):
        log.error(
            "%s; giving up: lower training.lr, or use runtime.precision=fp32", error
        )
        process.leave(process.EXIT_NUMERIC)
    if isinstance(error, DivergedError):
        process.leave(process.EXIT_DIVERGED)
    if isinstance(error, Stopped):
        # All ranks stop together, so one line is enough.
        level = logging.INFO if rank == 0 else logging.DEBUG
        log.log(level, "%s; the same command resumes", error)
        process.leave(process.EXIT_SIGNAL + error.number)
    if is_out_of_memory(error):
        # A smaller micro-batch would not solve the problem.
        log.error(
            "rank %d: out of memory outside of a step: %s; free memory of the device,"
            " or use a smaller model or a lower runtime.precision",
            rank,
            str(error).splitlines()[0],
        )
        process.leave(process.EXIT_INPUT)
    # The cause is in the output of the other rank.
    if is_lost_peer(error):
        log.error("rank %d: lost another rank; see the output of that rank", rank)
        process.leave(process.EXIT_LOST)
    raise error


def read_config(args: Namespace) -> "Config":
    """Read the configuration; ValueError if the experiment has another configuration."""
    from speakerlab.experiments.consistency import load_same_config

    config = load_same_config(args.exp, args.config, args.set, init=args.init)
    if args.teacher is not None and config.task != "distil":
        raise ValueError(
            f"--teacher: the task is {config.task}, which has no teacher; add distil to"
            " --config (run.sh: --task distil), or leave it out"
        )
    check_devices(args, config)
    return config


def check_devices(args: Namespace, config: "Config") -> None:
    """Raise ValueError if the configuration contradicts --gpus, or needs a missing GPU."""
    from speakerlab.training.devices import check_format

    asks_for_gpus = args.gpus not in ("auto", "")
    if config.runtime.device == "cpu" and asks_for_gpus:
        raise ValueError(
            f"--gpus: {args.gpus}, but runtime.device is cpu; leave out one of them"
        )
    check_format(config.runtime.device, config.runtime.precision)


def check_inputs(args: Namespace, config: "Config") -> int:
    """Check the inputs before the ranks start; return the number of GPUs they may use."""
    from speakerlab.config.build import check_margin
    from speakerlab.experiments.consistency import check_initial_model
    from speakerlab.training.devices import count_gpus

    num_gpus = count_gpus(config.runtime.device, num_ranks=args.nproc)
    check_margin(config)
    check_initial_model(config, args.init, args.exp)
    return num_gpus


def report_needs(args: Namespace) -> None:
    """Print the device, and whether the training uses noise and RIRs."""
    from speakerlab.experiments.corpus import PROBABILITIES
    from speakerlab.experiments.train_batches import check_shared_memory
    from speakerlab.training.devices import describe_device

    config = read_config(args)
    num_gpus = check_inputs(args, config)
    check_shared_memory(config, local_ranks=args.nproc, gpus=num_gpus)
    device = describe_device(config.runtime.device, num_gpus, num_ranks=args.nproc)
    print(f"device: {device}")
    for place, key in PROBABILITIES.items():
        probability = getattr(config.augment, key)
        use = "used" if probability else "not used"
        print(f"{place}: {use} (augment.{key} {probability:g})")
