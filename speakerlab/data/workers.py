"""Data workers: how many fit this machine, and which one is stuck or has died.

Workers note what they do on a `Board`. While no batch arrives, a warning says so every
`stall_seconds`; a dead worker is reported in one line instead of torch's many.
"""

import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from speakerlab.core import process
from speakerlab.core.batch import Batch

log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")  # workers hand their batches over in it
MAX_WORKERS = 8
MICRO_BATCHES_AHEAD = 4  # read ahead by each worker
IN_FLIGHT = 1.5  # batches in shared memory for each that is read ahead: some are being taken out
NCCL_BYTES = 64 << 20  # of shared memory for each GPU, if a host has several
TENSORS = 48  # in a batch, at most; each takes whole pages
PAGE_BYTES = 4096
MAX_NAMED = 4  # busy workers in a line
POLL_SECONDS = 5.0  # between looks at the workers; torch's own interval
TIMED_OUT = "DataLoader timed out"  # how torch's message for that begins
ENDING_SECONDS = 2.0  # for a worker whose connection broke to end
REMEDIES: dict[int, str] = {
    signal.SIGKILL: "often the kernel's out-of-memory killer, see dmesg: lower runtime.num_workers",
    signal.SIGBUS: "enlarge /dev/shm (docker run --shm-size) or lower runtime.num_workers, and "
    "check that no audio file is being truncated or replaced",
}


def auto_workers(local_ranks: int) -> int:
    """Workers for each rank of this host: its share of the CPUs, one left for the rank itself."""
    return max(1, min(MAX_WORKERS, process.available_cpus() // local_ranks - 1))


def fit_workers(
    wanted: int,
    *,
    bytes_per_batch: int,
    local_ranks: int,
    is_fixed: bool,
    on_gpus: bool = False,
    folder: Path = SHARED_MEMORY,
) -> int:
    """Return how many of `wanted` workers a rank can have, given the space free in `folder`.

    Raises ValueError if the number is fixed and they do not fit.
    """
    fixed = NCCL_BYTES * local_ranks if on_gpus and local_ranks > 1 else 0
    each = round(local_ranks * MICRO_BATCHES_AHEAD * bytes_per_batch * IN_FLIGHT)
    free = free_shared_memory(folder)
    if wanted == 0 or free < 0 or fixed + wanted * each <= free:
        return wanted
    fitting = max(0, (free - fixed) // each)
    if is_fixed or fixed > free:
        need = -(-(fixed + wanted * each) >> 20)
        raise ValueError(
            f"runtime.num_workers: {wanted} for each of {local_ranks} ranks need {need} MiB "
            f"of {folder}, got {free >> 20} MiB free; enlarge it (docker run --shm-size="
            f"{2 * need}m, or --ipc=host) or lower runtime.num_workers (0 needs none)"
        )
    text = "%d data workers per rank instead of %d: %s has %d MiB free, each needs %d"
    log.info(text, fitting, wanted, folder, free >> 20, -(-each >> 20))
    return fitting


def start_worker(worker: int) -> None:
    """Have a worker die with its rank, leave signals to it and use one thread."""
    if worker:  # the first one warns of the same
        warnings.simplefilter("ignore")
    process.die_with_parent()
    process.leave_signals_to_parent()
    torch.set_num_threads(1)


class Hop(IntEnum):
    """What a worker is doing."""

    STARTING = 0
    READING = 1
    COLLATING = 2
    IDLE = 3  # every batch it was asked for has been sent


class Board:
    """What each worker does, and since when: written by the workers, read by their rank."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.cells = RawArray(c_int64, 3 * num_workers)
        for worker in range(num_workers):
            self.note(worker, Hop.STARTING)

    def note(self, worker: int, hop: Hop, row: int = -1) -> None:
        """Note what a worker does; `row`: of the manifest."""
        self.cells[3 * worker : 3 * worker + 3] = [hop, row, time.monotonic_ns()]

    def read(self, worker: int) -> tuple[Hop, int, float]:
        """Return (hop, row, seconds since then)."""
        hop, row, since = self.cells[3 * worker : 3 * worker + 3]
        return Hop(hop), row, (time.monotonic_ns() - since) / 1e9


@dataclass
class Watch:
    """The workers of a loader, and how to name a row: by id and file."""

    board: Board
    name_row: Callable[[int], str]
    workers: Sequence[BaseProcess] = ()

    def describe_stall(self, seconds: float) -> str:
        """Say in one line what delays the next batch."""
        count = self.board.num_workers
        states = [(worker, *self.board.read(worker)) for worker in range(count)]
        busy = sorted((s for s in states if s[1] != Hop.IDLE), key=lambda state: -state[3])
        parts = [
            f"worker {worker} (process {self.workers[worker].pid}) has been "
            f"{self._doing(hop, row)} for {age:.1f} s"
            for worker, hop, row, age in busy[:MAX_NAMED]
        ]
        if len(busy) > MAX_NAMED:
            parts.append(f"{len(busy) - MAX_NAMED} more are busy")
        if not busy:
            parts.append(
                "every worker has sent its batches: the next one has not arrived; "
                f"{free_shared_memory() >> 20} MiB of {SHARED_MEMORY} are free"
            )
        elif len(busy) < count:
            parts.append(f"{count - len(busy)} of {count} have sent their batches")
        return f"data: no batch for {seconds:.0f} s; {'; '.join(parts)}"

    def describe_death(self) -> str | None:
        """Say in one line how the first dead worker ended; None if all live."""
        for number, worker in enumerate(self.workers):
            code = worker.exitcode
            if code is None or code == 0:
                continue
            hop, row, _ = self.board.read(number)
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            remedy = REMEDIES.get(-code, "report this")
            who = f"data worker {number} (process {worker.pid})"
            return f"{who}: ended with {how} while {self._doing(hop, row)}; {remedy}"
        return None

    def _doing(self, hop: Hop, row: int) -> str:
        return f"reading {self.name_row(row)}" if hop == Hop.READING else hop.name.lower()


def watched(loader: DataLoader[Batch], watch: Watch, *, stall_seconds: float) -> Iterator[Batch]:
    """Yield the batches of `loader`, whose timeout is at most `stall_seconds`.

    Raises ValueError with one line where a worker has died, and what a worker raised.
    """
    batches = iter(loader)
    watch.workers = getattr(batches, "_workers", ())
    if threading.current_thread() is threading.main_thread():
        # torch's handler raises anywhere in the trainer; `next` notices a dead worker as well.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    since, num_warnings = time.monotonic(), 0
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            if isinstance(error, ConnectionError | EOFError | FileNotFoundError):
                for worker in watch.workers:  # one that is ending breaks its connections first
                    worker.join(ENDING_SECONDS / len(watch.workers))
            death = watch.describe_death()
            if death is not None:
                raise ValueError(death) from error
            if not str(error).startswith(TIMED_OUT):
                raise
            waited = time.monotonic() - since
            if waited >= (num_warnings + 1) * stall_seconds:
                num_warnings = int(waited / stall_seconds)
                log.warning(watch.describe_stall(waited))
            continue
        yield batch
        since, num_warnings = time.monotonic(), 0


def free_shared_memory(folder: Path = SHARED_MEMORY) -> int:
    """Bytes free for batches; -1 where there is no such file system."""
    if not folder.exists():
        return -1
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
