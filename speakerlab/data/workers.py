"""Data workers: how many fit this machine, and which one is stuck or has died.

While no batch arrives, a warning every `stall_seconds` lists the files that the workers read. A
dead worker is reported in one line instead of torch's many.
"""

import logging
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from speakerlab.core import ctrl_c, process, system
from speakerlab.core.batch import Batch

log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")  # workers hand their batches over in it
MAX_WORKERS = 8
MICRO_BATCHES_AHEAD = 4  # read ahead by each worker
# Batches in shared memory per batch that is read ahead: some are being taken out.
IN_FLIGHT = 1.5
NCCL_BYTES = 64 << 20  # of shared memory for each GPU
TENSORS = 48  # in a batch, at most; each is an open file
MAX_NAMED = 4  # workers in a line
NO_ROW = -1
POLL_SECONDS = 5.0  # between looks at the workers; torch's own interval
TIMED_OUT = "DataLoader timed out"  # how torch's message for that begins
ENDING_SECONDS = 2.0  # time in which a worker whose connection broke must end
REMEDIES = {
    "SIGKILL": (
        "often the kernel's out-of-memory killer, see dmesg: lower runtime.num_workers"
    ),
    "SIGBUS": (
        "enlarge /dev/shm (docker run --shm-size) or lower runtime.num_workers, and "
        "check that no audio file is being truncated or replaced"
    ),
}


def auto_workers(local_ranks: int) -> int:
    """Return the number of workers per rank: its share of the CPUs, minus one for itself."""
    cpus_per_rank = system.available_cpus() // local_ranks
    num_workers = min(cpus_per_rank - 1, MAX_WORKERS)
    return max(num_workers, 1)


def fit_workers(
    wanted: int,
    *,
    batch_bytes: int,
    local_ranks: int,
    gpus: int = 0,
    folder: Path = SHARED_MEMORY,
) -> int:
    """Return the number of workers per rank, at most `wanted`, that fit in the space of `folder`.

    gpus: number of GPUs of this host; NCCL needs space if there are several.
    """
    if not folder.exists():
        return wanted
    worker_bytes = round(local_ranks * MICRO_BATCHES_AHEAD * IN_FLIGHT * batch_bytes)
    free_bytes = shutil.disk_usage(folder).free
    if gpus > 1:
        free_bytes -= NCCL_BYTES * gpus
    num_fitting = free_bytes // worker_bytes
    return max(0, min(wanted, num_fitting))


def start_worker(worker: int) -> None:
    """Make a worker die with its rank, ignore signals and use one thread."""
    if worker:  # the first worker shows the same warnings
        warnings.simplefilter("ignore")
    process.die_with_parent()
    process.leave_signals_to_parent()
    torch.set_num_threads(1)
    sys.excepthook = _hide_lost_connection


def _hide_lost_connection(kind: type[BaseException], *rest: Any) -> None:
    """Print no traceback when the rank was killed while multiprocessing handed it a batch."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, *rest)


class Watch:
    """The row that each worker of a loader reads: written by the workers, read by their rank."""

    def __init__(self, num_workers: int, name_row: Callable[[int], str]) -> None:
        self.rows = RawArray(c_int64, [NO_ROW] * num_workers)
        self.name_row = name_row  # by id and file
        self.workers: Sequence[BaseProcess] = ()

    def describe_stall(self, seconds: float) -> str:
        """Return one line on the cause of a late batch."""
        busy = [number for number, row in enumerate(self.rows) if row != NO_ROW]
        count = f"{len(busy)} of {len(self.rows)} workers are reading"
        names = [self._name(number) for number in busy[:MAX_NAMED]]
        details = "; ".join([count, *names])
        return f"data: no batch for {seconds:.0f} s; {details}"

    def describe_death(self) -> str | None:
        """Return one line on the end of the first dead worker; None if all are alive."""
        for number, worker in enumerate(self.workers):
            code = worker.exitcode
            if not code:  # it is alive, or has ended normally
                continue
            # multiprocessing reports the number of a fatal signal as a negative exit code.
            end = f"exit code {code}"
            if code < 0:
                end = signal.Signals(-code).name
            remedy = REMEDIES.get(end, "report this")
            return f"{self._name(number)}: ended with {end}; {remedy}"
        return None

    def _name(self, number: int) -> str:
        row = self.rows[number]
        worker = self.workers[number]
        activity = "" if row == NO_ROW else f" reading {self.name_row(row)}"
        return f"data worker {number} (process {worker.pid}){activity}"


def watched(
    loader: DataLoader[Batch], watch: Watch, *, stall_seconds: float
) -> Iterator[Batch]:
    """Yield the batches of `loader`, whose timeout is at most `stall_seconds`.

    Raises ValueError with one line if a worker has died, and the exceptions of a worker.
    """
    with ctrl_c.hold_ctrl_c():
        batches = iter(loader)
    watch.workers = getattr(batches, "_workers", ())
    if threading.current_thread() is threading.main_thread():
        # torch's handler raises anywhere in the trainer; `next` notices a dead worker as well.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    try:
        yield from _batches_of(batches, watch, stall_seconds)
    finally:
        _end(batches, watch.workers)


def _batches_of(
    batches: Iterator[Batch], watch: Watch, stall_seconds: float
) -> Iterator[Batch]:
    last_batch_time = time.monotonic()
    num_warnings = 0
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            if isinstance(error, ConnectionError | EOFError | FileNotFoundError):
                # A worker that ends breaks its connections first: wait for its exit code.
                for worker in watch.workers:
                    worker.join(ENDING_SECONDS / len(watch.workers))
            death = watch.describe_death()
            if death is not None:
                raise ValueError(death) from error
            if not str(error).startswith(TIMED_OUT):
                raise
            waited = time.monotonic() - last_batch_time
            if waited >= (num_warnings + 1) * stall_seconds:
                num_warnings = int(waited / stall_seconds)
                log.warning(watch.describe_stall(waited))
            continue
        yield batch
        last_batch_time = time.monotonic()
        num_warnings = 0


def _end(batches: Iterator[Batch], workers: Sequence[BaseProcess]) -> None:
    """End the workers of an iterator of torch, also while an error still refers to it.

    Without this call, a garbage collector that drops the iterator would leave the workers running.
    At its exit, Python sends them SIGTERM, which they ignore, and would wait for ever.
    """
    if workers:
        iterator: Any = batches
        iterator._shutdown_workers()
    for worker in workers:
        if worker.is_alive():  # in a file that does not answer
            worker.kill()
