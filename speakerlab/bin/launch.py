"""Start the ranks of this host with torch's elastic launcher, and end together with them.

`speakerlab train --nproc 2 ...` does this by itself. For other programs, with torchrun's options:
`speakerlab launch --standalone --nproc-per-node 2 script.py ...`

The launcher exits with the shell that started it, and its ranks exit with it. It exits with the
code of the rank that ended the run, and prints one line with the rank or the signal. It forwards
only the first signal to the ranks.
"""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import ClassVar, NoReturn

from torch.distributed import DistNetworkError, DistStoreError, run
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import (
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError

from speakerlab.core import ctrl_c, process, system

RESUME = "run the same command again to resume from the last checkpoint"
# On these signals, a training saves a checkpoint and exits. Slurm sends SIGUSR1.
SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
)
SAVING_SECONDS = 30  # for the ranks to save and exit
CLOSING_SECONDS = 5  # for closing the rendezvous of the previous attempt
MEETING_SECONDS = 600  # for hosts to wait for each other
LOOPBACK = "lo"  # the interface of 127.0.0.1 on Linux
# For the ranks to exit after one was killed: they wait for it in a collective and cannot save.
LOST_SECONDS = 10
# Ranks that are started again would end in the same way, or were stopped by the user.
FINAL_CODES = (
    process.EXIT_INPUT,
    process.EXIT_NUMERIC,
    process.EXIT_DIVERGED,
    process.EXIT_MEMORY,  # has an attempt of its own, with a smaller micro-batch
    process.EXIT_UNREAD,
    *[process.EXIT_SIGNAL + number for number in SIGNALS],
)
REMEDIES = {
    process.EXIT_INPUT: (
        "see the error above; with several hosts, also the output of the others"
    ),
    process.EXIT_NUMERIC: (
        "see nan_report.json in the experiment; lower training.lr, or use "
        "runtime.precision=fp32"
    ),
    process.EXIT_DIVERGED: "the loss grows: lower training.lr",
    process.EXIT_MEMORY: "out of memory: use a smaller runtime.micro_batch",
    process.EXIT_LOST: (
        "another rank ended: see that rank's message, here or on its host"
    ),
    process.EXIT_CRASH: f"see its traceback above; {RESUME}",
    -signal.SIGKILL: f"often the kernel's out-of-memory killer, see dmesg; {RESUME}",
    -signal.SIGBUS: (
        "/dev/shm was full (see df /dev/shm), or a file was truncated while read:"
        " enlarge it (docker run --shm-size=2g, or --ipc=host), or lower"
        " runtime.num_workers; " + RESUME
    ),
    -signal.SIGABRT: f"a library aborted, see above; {RESUME}",
}


class Ranks(SubprocessContext):
    """Rank processes of torchrun, with signals and time limits for which it has no options."""

    # Local rank -> exit code, of the ranks that ended before the launcher stopped the others.
    first: ClassVar[dict[int, int]] = {}
    # Whether all hosts have met, so that the ranks could start.
    have_started: ClassVar[bool] = False
    # Whether the ranks are commands of speakerlab, which let Ctrl-C through when they are ready.
    are_commands: ClassVar[bool] = False

    def start(self) -> None:
        """Start as torchrun does; also forward Slurm's SIGUSR1, keep ignored signals (nohup)."""
        Ranks.have_started = True
        ignored: list[signal.Signals] = []
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_IGN:
                ignored.append(number)
        # A command lets Ctrl-C through when it can end in one line (`command.run`).
        held = ctrl_c.hold_ctrl_c() if Ranks.are_commands else nullcontext()
        # torchrun sets its signal handlers here; replace them.
        with held:
            super().start()
        for number in SIGNALS:
            handler = signal.SIG_IGN if number in ignored else pass_on
            signal.signal(number, handler)

    def close(
        self,
        death_sig: signal.Signals | None = None,
        timeout: int = SAVING_SECONDS,
    ) -> None:
        """Close as torchrun does, but earlier if a rank was killed, for which the others wait."""
        # Without a signal, the run stops because some ranks have ended.
        if death_sig is None:
            Ranks.first = {}
            for rank, handler in self.subprocess_handlers.items():
                code = handler.proc.poll()
                if code is not None:
                    Ranks.first[rank] = code
        # If a signal killed the rank, its exit code is negative.
        lowest_code = min(Ranks.first.values(), default=0)
        if lowest_code < 0:
            timeout = min(timeout, LOST_SECONDS)
        super().close(death_sig, timeout)


def pass_on(number: int, _frame: FrameType | None) -> NoReturn:
    """Stop the run; a second signal, from Slurm or the shell, must not interrupt saving.

    With SIG_IGN, Python would print a traceback for a second signal that has already arrived.
    """
    for later in SIGNALS:
        signal.signal(later, lambda *_: None)
    raise SignalException(f"got signal {number}", signal.Signals(number))


@dataclass(frozen=True)
class End:
    """End of a run: its exit code, and one line about the cause, empty after success."""

    code: int
    line: str
    # Which rank or host was lost, and how; empty if ranks that start again would end like this.
    lost: str = ""


def main(arguments: Sequence[str]) -> None:
    """Run torchrun with its own options."""
    end = run_torchrun(add_local_address(arguments))
    if end.line:
        sys.stderr.write(f"{end.line}\n")
    process.leave(end.code)


def run_ranks(
    command: Sequence[str],
    *,
    num_ranks: int,
    num_hosts: int = 1,
    host: int | None = None,
    rendezvous: str | None = None,
    attempt: int = 1,
    meets_again: bool = False,
) -> End:
    """Run a command of speakerlab as the ranks of this host, and wait until they exit.

    host, rendezvous: number of this host and HOST:PORT of the first host, for several hosts.
    attempt: 2 after the ranks ran out of memory. meets_again: hosts start their ranks again after
    losing some, so the first host's rendezvous may still be that of the lost ranks: try again for
    MEETING_SECONDS. torchrun's own restarts are not used: they start ranks again after any error.
    """
    options = ["--nnodes", str(num_hosts)]
    options += ["--nproc-per-node", str(num_ranks)]
    options += ["--max-restarts", "0"]
    if num_hosts == 1:
        # On a free port, so that several runs can share a host.
        options.append("--standalone")
    else:
        assert host is not None and rendezvous is not None
        options += join_hosts(host, rendezvous, attempt=attempt)
        # Host 0 opens the rendezvous; first wait until the previous rendezvous is closed.
        if attempt > 1 and host > 0:
            time.sleep(CLOSING_SECONDS)

    process.run_own_package()
    # Otherwise each rank starts one thread per CPU, and the ranks slow each other down.
    if num_ranks > 1:
        num_cpus = system.available_cpus()
        share = max(1, num_cpus // num_ranks)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
    arguments = [*options, "-m", "speakerlab", *command]
    Ranks.are_commands = True
    deadline = time.monotonic() + MEETING_SECONDS
    while True:
        end = run_torchrun(add_local_address(arguments))
        if not meets_again or time.monotonic() > deadline:
            return end
        if Ranks.have_started or end.code != process.EXIT_LOST:
            return end
        time.sleep(CLOSING_SECONDS)


def join_hosts(host: int, rendezvous: str, *, attempt: int) -> list[str]:
    """Return torchrun's options for one of several hosts; host 0 has the rendezvous."""
    settings = {
        # Explicit, because host 0 may resolve its own name to 127.0.0.1.
        "is_host": int(host == 0),
        "timeout": 300,
        "read_timeout": MEETING_SECONDS,
        "join_timeout": MEETING_SECONDS,
    }
    first_address, _, _ = rendezvous.rpartition(":")
    address = first_address if host == 0 else address_towards(first_address)

    options = ["--node-rank", str(host)]
    options += ["--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", rendezvous]
    options += ["--rdzv-id", f"speakerlab-{attempt}"]
    rendezvous_settings = [f"{name}={value}" for name, value in settings.items()]
    options += ["--rdzv-conf", ",".join(rendezvous_settings)]
    options += ["--local-addr", address]
    return options


def address_towards(other: str) -> str:
    """Return the address of this host in the network of another host.

    The name of this host is not resolved, because a failing lookup may take minutes. No packet is
    sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 1))
        except OSError as error:
            raise ValueError(
                f"--rdzv: {other} cannot be reached: {error}; correct it"
            ) from None
        return probe.getsockname()[0]


def add_local_address(arguments: Sequence[str]) -> list[str]:
    """Return torchrun's options with the address of this host, if it is the only host.

    Otherwise torchrun resolves the name of this host, which may take minutes.
    """
    names = ("--local-addr", "--local_addr")
    has_address = any(argument.startswith(names) for argument in arguments)
    if "--standalone" not in arguments or has_address:
        return list(arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    return ["--local-addr", "127.0.0.1", *arguments]


def run_torchrun(arguments: Sequence[str]) -> End:
    """Run torchrun; the ranks exit if this process dies."""
    os.environ[process.PARENT_VARIABLE] = str(os.getpid())
    try:
        return _run_torchrun(arguments)
    finally:
        del os.environ[process.PARENT_VARIABLE]


def _run_torchrun(arguments: Sequence[str]) -> End:
    """Run torchrun in this process; convert its exceptions to an `End`."""
    # Otherwise a second rendezvous finds the store of the first and hangs (torch 2.11, 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    multiprocessing.SubprocessContext = Ranks
    Ranks.have_started = False
    # Ctrl-C may kill this process until the ranks start: there is nothing to save.
    ctrl_c.die_of_ctrl_c()
    try:
        run.main(arguments)
    except ChildFailedError as error:
        rank = first_failure(error.failures)
        failure = error.failures[rank]
        code = failure.exitcode
        # A signal has a negative code here, and 128 + its number in a shell.
        if code <= 0:
            code = process.EXIT_SIGNAL - code
        # Like every process of Python that ends with a traceback.
        if code == process.EXIT_CRASH and Ranks.are_commands:
            code = process.EXIT_INPUT
        is_lost = may_start_again(failure.exitcode)
        lost = find_end(rank, failure) if is_lost else ""
        return End(code, verdict(rank, failure), lost)
    except SignalException as error:
        return End(process.EXIT_SIGNAL + error.sigval, stopped(error.sigval))
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        # Hosts that have not met within the time limit are not awaited again.
        lost = find_hosts(error) if Ranks.have_started else ""
        return End(process.EXIT_LOST, lost_hosts(error), lost)
    return End(0, "")


def may_start_again(code: int) -> bool:
    """Return whether the ranks may succeed if they start again; code: of the rank's process."""
    if code <= 0:
        # The signals of SIGNALS come from the user or the scheduler.
        return -code not in SIGNALS
    # A rank may have lost one of this host that found an input error.
    if code == process.EXIT_LOST:
        return process.EXIT_INPUT not in Ranks.first.values()
    return code not in FINAL_CODES


def find_hosts(error: Exception) -> str:
    """Return that this host has lost others, or has not found them, and torch's reason."""
    reason = " ".join(str(error).split())
    # Errors of time limits have no text, so their class is the reason.
    if not reason:
        name = type(error).__name__
        reason = re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower()
    return f"{socket.gethostname()}: other hosts lost or not found: {reason[:200]}"


def lost_hosts(error: Exception) -> str:
    """Return one line about hosts that this one has lost or not found, with a remedy."""
    return (
        f"{find_hosts(error)}; see their output, and check that HOST:PORT of --rdzv is"
        f" open; {RESUME}"
    )


def first_failure(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the rank that failed first: killed ranks before ranks that ended as a consequence."""

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        failure = failures[rank]
        was_ended_by_us = failure.local_rank not in Ranks.first
        was_not_killed = failure.exitcode > 0
        # A rank that lost a peer exits with one of these codes; all ranks may for one wrong input.
        consequences = (process.EXIT_INPUT, process.EXIT_LOST)
        may_be_consequence = failure.exitcode in consequences
        return was_ended_by_us, was_not_killed, may_be_consequence, rank

    return min(failures, key=order)


def verdict(rank: int, failure: ProcessFailure) -> str:
    """Return one line about the rank that failed first and so ended the run."""
    code = failure.exitcode
    # A rank that saved after a signal exits with 128 + its number.
    number = code - process.EXIT_SIGNAL
    if number in SIGNALS:
        return stopped(signal.Signals(number))
    return f"{find_end(rank, failure)}; {REMEDIES.get(code, RESUME)}"


def find_end(rank: int, failure: ProcessFailure) -> str:
    """Return how a rank ended, without a remedy."""
    code = failure.exitcode
    cause = f"exit code {code}"
    if code <= 0:
        cause = signal.Signals(-code).name
    if code == process.EXIT_CRASH and Ranks.are_commands:
        cause = "an error"
    place = f"rank {rank} on {socket.gethostname()}"
    return f"{place}: ended the run with {cause} (process {failure.pid})"


def stopped(number: signal.Signals) -> str:
    """Return one line about a run stopped by a signal; its ranks log whether they saved."""
    return f"stopped by {number.name}; {RESUME}"
