"""torchrun that dies with the shell that started it, and whose ranks die with it.

`python -m speakerlab.bin.launch <torchrun options> -m speakerlab.bin.train <options>`

In: torchrun's options. Out: the exit code of the rank that ended the run, and one line that names
it, or the signal that stopped the run. A signal is passed on to the ranks, once.
"""

import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import ClassVar, NoReturn

from torch.distributed import DistNetworkError, DistStoreError, run
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError

from speakerlab.core import process

RESUME = "run the same command again to go on from the last checkpoint"
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # a training saves and leaves
SAVING_SECONDS = 30  # that ranks have to leave by themselves
LOST_SECONDS = 10  # the same when one was killed: the others wait for it and cannot save
SHARED_MEMORY = Path("/dev/shm")
REMEDIES = {
    process.EXIT_INPUT: "what to mend stands above",
    process.EXIT_NUMERIC: "nan_report.json in the experiment says where; lower training.lr, or use "
    "runtime.precision=fp32",
    process.EXIT_DIVERGED: "the loss grows: lower training.lr",
    process.EXIT_MEMORY: "out of memory: a smaller runtime.micro_batch (run.sh takes it by itself)",
    process.EXIT_LOST: "it lost another rank: that one's line, here or on its host, says why",
    -signal.SIGKILL: f"often the kernel's out-of-memory killer, see dmesg; {RESUME}",
    -signal.SIGABRT: f"a library gave up, see above; {RESUME}",
}
HOSTS = "; it may also be that another host's rank ended first: see the output there"


class Ranks(SubprocessContext):
    """torchrun's rank processes, with what its options cannot say."""

    first: ClassVar[dict[int, int]] = {}  # local rank -> exit code, of those nobody told to end
    num_hosts: ClassVar[int] = 1

    def start(self) -> None:
        """As torchrun; SIGUSR1 (Slurm's) is passed on too, and what nohup ignores stays so."""
        Ranks.num_hosts = int(self.envs[0].get("GROUP_WORLD_SIZE", 1))
        ignored = [name for name in SIGNALS if signal.getsignal(_number(name)) == signal.SIG_IGN]
        super().start()
        for name in SIGNALS:
            signal.signal(_number(name), signal.SIG_IGN if name in ignored else pass_on)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = SAVING_SECONDS) -> None:
        """As torchrun, but ranks that wait for one that was killed are not given half a minute."""
        if death_sig is None:  # not told from outside: some have ended
            Ranks.first = self.exit_codes()
        if min(Ranks.first.values(), default=0) < 0:
            timeout = min(timeout, LOST_SECONDS)
        super().close(death_sig, timeout)

    def exit_codes(self) -> dict[int, int]:
        """Of the ranks that have ended."""
        codes = {rank: handler.proc.poll() for rank, handler in self.subprocess_handlers.items()}
        return {rank: code for rank, code in codes.items() if code is not None}


def pass_on(number: int, _frame: FrameType | None) -> NoReturn:
    """Stop the run; a second signal (Slurm sends it, and the shell) must not cut saving short."""
    for name in SIGNALS:
        signal.signal(_number(name), signal.SIG_IGN)
    raise SignalException(f"got signal {number}", signal.Signals(number))


def _number(name: str) -> signal.Signals:
    return signal.Signals[name]


def main() -> None:
    """Tie this process to its parent, name it as the ranks' parent, and be torchrun."""
    process.die_with_launcher()
    os.environ[process.PARENT_VARIABLE] = str(os.getpid())
    multiprocessing.SubprocessContext = Ranks
    code, line = 0, ""
    try:
        run.main()
    except ChildFailedError as error:
        rank = first_failure(error.failures)
        failure = error.failures[rank]
        line = verdict(rank, failure)
        # A signal is told by a negative code; a shell tells it by 128 + its number.
        code = failure.exitcode if failure.exitcode > 0 else process.stopped(-failure.exitcode)
    except SignalException as error:
        line = stopped(error.sigval)
        code = process.stopped(error.sigval)
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        text = " ".join(str(error).split())[:200]
        line = (
            f"{socket.gethostname()}: lost, or did not find, the other hosts, got '{text}'; see "
            f"their output, and that HOST:PORT of --rdzv is open; {RESUME}"
        )
        code = process.EXIT_LOST
    if line:
        sys.stderr.write(f"{line}\n")
    process.leave(code)


def first_failure(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank to blame: one that was killed, before those that lost it, before those we ended."""

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        failure = failures[rank]
        consequence = failure.exitcode in (process.EXIT_INPUT, process.EXIT_LOST)
        return failure.local_rank not in Ranks.first, failure.exitcode > 0, consequence, rank

    return min(failures, key=order)


def verdict(rank: int, failure: ProcessFailure) -> str:
    """One line on the rank that failed first; the others were stopped because of it."""
    code = failure.exitcode
    if code in [process.stopped(_number(name)) for name in SIGNALS]:
        return stopped(signal.Signals(code - process.stopped(0)))
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    remedy = shared_memory() if code == -signal.SIGBUS else REMEDIES.get(code, RESUME)
    if code == process.EXIT_INPUT and Ranks.num_hosts > 1:
        remedy += HOSTS
    where = f"rank {rank} on {socket.gethostname()}"
    return f"{where}: ended the run, got {how} of process {failure.pid}; {remedy}"


def shared_memory() -> str:
    """What a rank that died of SIGBUS most often ran out of."""
    size = ""
    if SHARED_MEMORY.is_dir():
        disk = shutil.disk_usage(SHARED_MEMORY)
        size = f" ({disk.total >> 20} MiB, {disk.free >> 20} MiB free now)"
    return (
        f"{SHARED_MEMORY}{size} was full, or a file was cut while it was read: enlarge it (docker "
        f"run --shm-size=2g, or --ipc=host), or lower runtime.num_workers; {RESUME}"
    )


def stopped(number: signal.Signals) -> str:
    """One line on a run that was stopped from outside; its ranks say whether they saved."""
    return f"stopped by {number.name}; {RESUME}"


if __name__ == "__main__":
    main()
