"""Train a model into an experiment's folder, or resume where it was stopped.

One process trains alone, or as one rank of several. With `--gpus "0 1"`, `--nproc` or `--nnodes`
the command starts its ranks; torchrun, srun and operators that set RANK and WORLD_SIZE start it
as one of theirs. After running out of memory it starts once more, with a smaller micro-batch;
with --max-restarts it also starts again after losing a rank or a host.
"""

import json
import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from speakerlab.bin.command import choose_gpus, parser
from speakerlab.checkpoints.hub import local
from speakerlab.checkpoints.model_files import find_model, weights_in
from speakerlab.core import ctrl_c, process
from speakerlab.training.group import Group, find_group

if TYPE_CHECKING:  # it imports torch, which is slow: only for valid options
    from speakerlab.config.schema import Config

log = logging.getLogger(__name__)
# Variables of a rank's place that torch.distributed and our own code read.
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NOTE_SECONDS = 60.0  # NFS may hide another host's file this long (attribute cache)
CLOCK_SECONDS = 60.0  # tolerated difference between the clocks of hosts
AUTO = "auto"  # --exp auto, or --exp DIR/auto: an experiment named after its settings
FOLDER = Path("exp")  # of --exp auto
SECOND_MEMORY_REMEDY = (
    "use a shorter data.crop_seconds, a smaller model or a lower runtime.precision"
)


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    # There is nothing to save until the training begins.
    ctrl_c.leave_on_ctrl_c()
    group = find_group(os.environ)
    check_group(args, group)
    is_first = group is None or group.rank == 0
    if args.asked_exp is not None and is_first:
        log.info("--exp %s: %s", args.asked_exp, args.exp)
    # Restarts need a process that outlives its ranks.
    needs_ranks = args.nproc > 1 or args.max_restarts > 0
    if args.check:
        report_needs(args)
    elif args.nnodes > 1 or (group is None and needs_ranks):
        # This process is not a rank: it starts the ranks of its host.
        train_on_ranks(args, arguments)
    else:
        # Without a group, these variables are of another program, such as LOCAL_RANK of an older
        # shell.
        for name in PLACE:
            os.environ.pop(name, None)
        if group is not None:
            os.environ.update(group.variables())
            note_group(group)
        train_as_rank(args, arguments, can_retry=group is None)


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("train", __doc__)
    exp = (
        "folder of the experiment, new or to resume; auto, or DIR/auto: a folder in exp,"
        " or in DIR, that is named after --config, the seed, --set and --init"
    )
    options.add("--exp DIR", exp, required=True)
    config = (
        "files, or names in conf/ such as eres2net; a later one overrides earlier ones"
    )
    options.add("--config YAML", config, nargs="+", required=True)
    initial = "start from this experiment, model folder, hub:NAME or hf:owner/name"
    options.add("--init MODEL", initial)
    teachers = "learn from this experiment, model folder, hub:NAME, hf:owner/name or .onnx file"
    options.add("--teacher MODEL", f"{teachers} (task distil)", nargs="+")
    options.add_settings(
        "change settings; they override all files, e.g. training.lr=0.1"
    )
    options.add_gpus("one rank on each")
    options.add(
        "--nproc N", "ranks on this host (default: one for each of --gpus)", least=1
    )
    hosts = "hosts; run the same command on each (default: 1)"
    options.add("--nnodes N", hosts, least=1)
    options.add("--node-rank I", "number of this host, from 0", least=0)
    options.add("--rdzv HOST:PORT", "address of node rank 0, with an open port")
    again = (
        "after losing a rank or a host, start again from the last checkpoint, at most"
    )
    options.add("--max-restarts N", f"{again} N times", least=0, default=0)
    options.add(
        "--check", "check devices, settings and --init, print what is needed, and exit"
    )
    below = "use a micro-batch smaller than N (after one of N crops ran out of memory)"
    options.add("--below-micro-batch N", below, least=2)
    args = options.parse_args(arguments)
    gpus = choose_gpus(args.gpus)
    choose_nproc(args, num_gpus=len(gpus))
    check_hosts(args)
    if args.teacher is not None:
        # `rank_options` passes --set to the ranks, and so the teachers.
        teacher_names = [str(path) for path in args.teacher]
        names = json.dumps(teacher_names, ensure_ascii=False)
        args.set = [*args.set, f"distil.teachers={names}"]
    # Before --init is resolved, because the name has the initial model as given.
    name_experiment(args)
    if args.init is not None:
        args.init = find_initial(args.init)
    return args


def choose_nproc(args: Namespace, *, num_gpus: int) -> None:
    """Set the default of --nproc; ValueError for more ranks than chosen GPUs.

    num_gpus: the number of GPUs in --gpus; 0 for auto and for the CPU.
    """
    if args.nproc is None:
        args.nproc = max(1, num_gpus)
    elif 0 < num_gpus < args.nproc:
        problem = f"{args.nproc} ranks for {num_gpus} GPUs"
        raise ValueError(f"--nproc: {problem}; use {num_gpus} or fewer")


def name_experiment(args: Namespace) -> None:
    """Replace an --exp that ends with `auto` by a folder named after the settings.

    The name depends on nothing but the command, so all ranks and hosts find the same one. It has
    the initial model as given: `find_initial` returns another path on each host for hub:NAME.
    """
    args.asked_exp = None
    # An experiment that has this name is resumed.
    is_experiment = (args.exp / "config.yaml").exists()
    if args.exp.name != AUTO or is_experiment:
        return
    from speakerlab.experiments.naming import experiment_name

    folder = FOLDER if args.exp == Path(AUTO) else args.exp.parent
    args.asked_exp = args.exp
    args.exp = folder / experiment_name(args.config, args.set, args.init)


def find_initial(model: Path) -> Path:
    """Return the folder of --init, downloaded if it is a published model."""
    folder = local(model)
    try:
        # Whether it fits the task is checked with the configuration.
        find_model(folder, weights_in(folder))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--init: {error}") from None
    return folder


def check_hosts(args: Namespace) -> None:
    """Raise ValueError unless the options of several hosts are complete."""
    if args.nnodes is None:
        if args.node_rank is not None or args.rdzv:
            raise ValueError(
                "--node-rank, --rdzv: only for several hosts; add --nnodes N"
            )
        args.nnodes = 1
    # The command of several hosts also continues on one.
    if args.nnodes == 1 and not args.node_rank:
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
    if is_rank and args.max_restarts:
        raise ValueError(
            f"--max-restarts: {group.starter} started this process as one of its ranks,"
            " which it must start again itself; leave the option out"
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
    restarts = Restarts.of_this_command()
    # Also marks the ranks, whose exit codes then tell a crash from an input error.
    restarts.record()
    if args.nnodes > 1 and restarts.count:
        log.info("waits up to 10 minutes for all %d hosts", args.nnodes)
    elif args.nnodes > 1:
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
        meets_again=args.nnodes > 1 and args.max_restarts > 0,
    )
    if end.lost and args.max_restarts:
        start_lost_again(args, arguments, restarts, end.lost)
    if end.line:
        sys.stderr.write(f"{end.line}\n")
    if end.code == process.EXIT_MEMORY:
        if args.nnodes > 1:
            wait_for_memory_note(args.exp, began)
        retry_smaller(args, arguments)
    process.leave(end.code)


@dataclass(frozen=True)
class Restarts:
    """Restarts of this command so far; a new process of it reads them from the environment."""

    count: int
    step: int  # of the newest checkpoint at the last restart; -1 before the first

    @classmethod
    def of_this_command(cls) -> "Restarts":
        count, step = os.environ.get(process.RESTARTS_VARIABLE, "0 -1").split()
        return cls(int(count), int(step))

    def record(self) -> None:
        os.environ[process.RESTARTS_VARIABLE] = f"{self.count} {self.step}"


def start_lost_again(
    args: Namespace,
    arguments: Sequence[str],
    restarts: Restarts,
    lost: str,
) -> None:
    """Restart this command, whose ranks resume; return if --max-restarts is used up.

    lost: which rank or host was lost, and how.
    """
    from speakerlab.training.checkpoint import list_checkpoints, read_step

    checkpoints = list_checkpoints(args.exp / "checkpoints")
    step = read_step(checkpoints[-1]) if checkpoints else 0
    if restarts.count >= args.max_restarts:
        progress = f"the newest checkpoint is of step {step}"
        if step == restarts.step:
            progress = f"no new checkpoint since the last, from step {step}"
        log.error("--max-restarts: all %d are used, %s", restarts.count, progress)
        return
    count = restarts.count + 1
    log.warning(
        "%s; restart %d of %d, from step %d", lost, count, args.max_restarts, step
    )
    Restarts(count, step).record()
    process.start_again(["train", *arguments])


def forget_memory_note(args: Namespace) -> float:
    """Remove the note of an earlier training that ran out of memory; return the time (s)."""
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
    from speakerlab.experiments import consistency, other_ranks, run_log, train
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
            # Read first, because the start of the training overwrites it.
            earlier = other_ranks.read_earlier_plan(config, args.exp, ranks)
            if earlier is not None:
                config = other_ranks.keep_bn_batch(config, earlier, ranks.world_size)
            training = train.start_training(
                args.exp,
                args.init,
                config,
                ranks,
                signals,
                too_large=args.below_micro_batch,
            )
        if earlier is not None:
            other_ranks.log_other_ranks(config, earlier, training.trainer.plan)
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
    if process.RESTARTS_VARIABLE in os.environ:
        log.error("rank %d: failed, not by its input", rank, exc_info=error)
        process.leave(process.EXIT_CRASH)
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


def check_other_folders(config: "Config") -> None:
    """Raise FileNotFoundError if training data outside `data.dir` are missing.

    Those in `data.dir` may be prepared after the check.
    """
    from speakerlab.data.tables import is_address

    data_dir = Path(config.data.dir).absolute()
    for corpus in config.data.corpora:
        if is_address(corpus.dir):
            continue
        folder = Path(os.path.normpath(data_dir / corpus.dir))
        is_prepared_here = folder.is_relative_to(data_dir)
        if not is_prepared_here and not (folder / "wav.scp").exists():
            raise FileNotFoundError(
                f"data.train: no data directory {folder}, which has a wav.scp; prepare"
                " it first, or correct the path"
            )


def report_needs(args: Namespace) -> None:
    """Print the device, and whether the training uses noise and RIRs."""
    from speakerlab.experiments.corpus import PROBABILITIES
    from speakerlab.experiments.train_batches import check_shared_memory
    from speakerlab.training.devices import describe_device

    config = read_config(args)
    check_other_folders(config)
    num_gpus = check_inputs(args, config)
    check_shared_memory(config, local_ranks=args.nproc, gpus=num_gpus)
    device = describe_device(config.runtime.device, num_gpus, num_ranks=args.nproc)
    if args.asked_exp is not None:
        print(f"experiment: {args.exp}")
    print(f"device: {device}")
    for place, key in PROBABILITIES.items():
        probability = getattr(config.augment, key)
        use = "used" if probability else "not used"
        print(f"{place}: {use} (augment.{key} {probability:g})")
