"""Run torchrun such that it dies with the shell that started it, and its ranks die with it.

`python -m speakerlab launch <torchrun options> -m speakerlab train <options>`

Returns the exit code of the rank that ended the run, with one line that names the rank or the
signal. A signal is passed on to the ranks, once.
"""

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import ClassVar, NoReturn

from torch.distributed import DistNetworkError, DistStoreError, run
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError

from speakerlab.core import process

RESUME = "run the same command again to resume from the last checkpoint"
# A training saves, then leaves. SIGUSR1 is Slurm's.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
SAVING_SECONDS = 30  # for ranks to leave by themselves
LOST_SECONDS = 10  # the same after one was killed: the others wait for it and cannot save
REMEDIES = {
    process.EXIT_INPUT: "see the error above; with several hosts, also the output of the others",
    process.EXIT_NUMERIC: "see nan_report.json in the experiment; lower training.lr, or use "
    "runtime.precision=fp32",
    process.EXIT_DIVERGED: "the loss grows: lower training.lr",
    process.EXIT_MEMORY: "out of memory: use a smaller runtime.micro_batch (run.sh does)",
    process.EXIT_LOST: "another rank ended: see that rank's message, here or on its host",
    -signal.SIGKILL: f"often the kernel's out-of-memory killer, see dmesg; {RESUME}",
    -signal.SIGBUS: "/dev/shm was full (see df /dev/shm), or a file was truncated while read: "
    "enlarge it (docker run --shm-size=2g, or --ipc=host), or lower runtime.num_workers; " + RESUME,
    -signal.SIGABRT: f"a library aborted, see above; {RESUME}",
}


class Ranks(SubprocessContext):
    """torchrun's rank processes, with what its options cannot express."""

    first: ClassVar[dict[int, int]] = {}  # local rank -> exit code, if it ended itself

    def start(self) -> None:
        """Start as torchrun does; pass SIGUSR1 (Slurm's) on too, keep what nohup ignores."""
        ignored = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
        super().start()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in ignored else pass_on)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = SAVING_SECONDS) -> None:
        """Close as torchrun does, but sooner if a rank was killed and the others wait for it."""
        if death_sig is None:  # not stopped from outside: some have ended
            codes = {rank: own.proc.poll() for rank, own in self.subprocess_handlers.items()}
            Ranks.first = {rank: code for rank, code in codes.items() if code is not None}
        if min(Ranks.first.values(), default=0) < 0:
            timeout = min(timeout, LOST_SECONDS)
        super().close(death_sig, timeout)


def pass_on(number: int, _frame: FrameType | None) -> NoReturn:
    """Stop the run; a second signal (Slurm sends it, and the shell) must not cut saving short.

    Not SIG_IGN: Python would print a traceback for a second signal that has already arrived.
    """
    for each in SIGNALS:
        signal.signal(each, lambda *_: None)
    raise SignalException(f"got signal {number}", signal.Signals(number))


def main(words: Sequence[str]) -> None:
    """Tie this process to its parent and the ranks to this process, and run torchrun."""
    process.die_with_launcher()
    os.environ[process.PARENT_VARIABLE] = str(os.getpid())
    multiprocessing.SubprocessContext = Ranks
    process.die_of_ctrl_c()  # until ranks start, there is nothing to save
    code, line = 0, ""
    try:
        run.main(words)
    except ChildFailedError as error:
        rank = first_failure(error.failures)
        failure = error.failures[rank]
        line = verdict(rank, failure)
        # A signal is a negative code here, and 128 + its number in a shell.
        code = failure.exitcode if failure.exitcode > 0 else process.EXIT_SIGNAL - failure.exitcode
    except SignalException as error:
        line = stopped(error.sigval)
        code = process.EXIT_SIGNAL + error.sigval
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        text = " ".join(str(error).split())[:200]
        line = (
            f"{socket.gethostname()}: other hosts lost or not found: {text}; see their output, "
            f"and check that HOST:PORT of --rdzv is open; {RESUME}"
        )
        code = process.EXIT_LOST
    if line:
        sys.stderr.write(f"{line}\n")
    process.leave(code)


def first_failure(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the rank to blame: killed ones before those that lost them and those we ended."""

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        failure = failures[rank]
        consequence = failure.exitcode in (process.EXIT_INPUT, process.EXIT_LOST)
        return failure.local_rank not in Ranks.first, failure.exitcode > 0, consequence, rank

    return min(failures, key=order)


def verdict(rank: int, failure: ProcessFailure) -> str:
    """Return one line on the rank that failed first, because of which the others stopped."""
    code = failure.exitcode
    if code - process.EXIT_SIGNAL in SIGNALS:
        return stopped(signal.Signals(code - process.EXIT_SIGNAL))
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    where = f"rank {rank} on {socket.gethostname()}: ended the run with {how}"
    return f"{where} (process {failure.pid}); {REMEDIES.get(code, RESUME)}"


def stopped(number: signal.Signals) -> str:
    """Return one line on a run that was stopped from outside; its ranks log whether they saved."""
    return f"stopped by {number.name}; {RESUME}"
