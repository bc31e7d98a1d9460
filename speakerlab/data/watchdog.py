"""Names the hop that is stuck when training waits for its next batch, and the worker that died.

In: the batches of a loader whose workers note what they do on a `Board`. Out: the same batches; a
warning each `stall_seconds` that none comes; one line in place of torch's where a worker is gone.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

from torch.utils.data import DataLoader, get_worker_info

from speakerlab.core.batch import Batch

log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")  # what workers hand their batches over in
MAX_NAMED = 4  # busy workers in a line
ENDING_SECONDS = 2.0  # that a worker whose connection broke is given to end
REMEDIES = {
    signal.SIGKILL: "often the kernel's out-of-memory killer, see dmesg: lower runtime.num_workers",
    signal.SIGBUS: "enlarge /dev/shm (docker run --shm-size) or lower runtime.num_workers, and see "
    "that no audio file is being cut or replaced",
}


class Hop(IntEnum):
    """What a worker is at."""

    STARTING = 0
    READING = 1
    COLLATING = 2
    IDLE = 3  # all that it was asked for is on its way


class Board:
    """What each worker does, and since when: written by the workers, read by their rank.

    Without workers the rank itself has the one line there is.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_lines = max(1, num_workers)
        self.cells = RawArray(c_int64, 3 * self.num_lines)
        for line in range(self.num_lines):
            self._write(line, Hop.STARTING, -1)

    def note(self, hop: Hop, row: int = -1) -> None:
        """Note what this process is at; `row`: of the manifest."""
        worker = get_worker_info()
        self._write(0 if worker is None else worker.id, hop, row)

    def read(self, line: int) -> tuple[Hop, int, float]:
        """(hop, row, seconds since then)."""
        hop, row, since = self.cells[3 * line : 3 * line + 3]
        return Hop(hop), row, (time.monotonic_ns() - since) / 1e9

    def _write(self, line: int, hop: Hop, row: int) -> None:
        self.cells[3 * line : 3 * line + 3] = [hop, row, time.monotonic_ns()]


@dataclass
class Watch:
    """The workers of a loader, and how to name what they are at; `name_row`: id and file."""

    board: Board
    name_row: Callable[[int], str]
    workers: Sequence[BaseProcess] = ()

    def describe_stall(self, seconds: float) -> str:
        """One line on what holds the next batch up."""
        lines = [(line, *self.board.read(line)) for line in range(self.board.num_lines)]
        busy = sorted((each for each in lines if each[1] != Hop.IDLE), key=lambda each: -each[3])
        parts = [
            f"{self._who(line)} has been {self._doing(hop, row)} for {age:.1f} s"
            for line, hop, row, age in busy[:MAX_NAMED]
        ]
        if len(busy) > MAX_NAMED:
            parts.append(f"{len(busy) - MAX_NAMED} more are busy")
        if not busy:
            parts.append(
                "every worker has sent what it was asked for: the batch is stuck between it and "
                f"this process, {free_shared_memory() >> 20} MiB of {SHARED_MEMORY} are free"
            )
        elif len(busy) < len(lines):
            parts.append(f"{len(lines) - len(busy)} of {len(lines)} have sent their batches")
        return f"data: no batch for {seconds:.0f} s; {'; '.join(parts)}"

    def describe_death(self) -> str | None:
        """One line on the first worker that is gone, None if they all live."""
        for line, worker in enumerate(self.workers):
            code = worker.exitcode
            if code is None or code == 0:
                continue
            hop, row, _ = self.board.read(line)
            ended = signal.Signals(-code) if code < 0 else None
            got = f"exit code {code}" if ended is None else ended.name
            remedy = "report this" if ended is None else REMEDIES.get(ended, "report this")
            who = f"data worker {line} (process {worker.pid})"
            return f"{who}: ended while {self._doing(hop, row)}, got {got}; {remedy}"
        return None

    def _who(self, line: int) -> str:
        if not self.workers:
            return "this process"
        return f"worker {line} (process {self.workers[line].pid})"

    def _doing(self, hop: Hop, row: int) -> str:
        return f"reading {self.name_row(row)}" if hop == Hop.READING else hop.name.lower()


class Alarm:
    """Calls `ring(seconds waited)` from a thread of its own, each `seconds` that a wait takes."""

    def __init__(self, seconds: float, ring: Callable[[float], None]) -> None:
        self.seconds, self.ring = seconds, ring
        self.since: float | None = None  # when the wait began
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="data watchdog", daemon=True)

    def __enter__(self) -> "Alarm":
        self.thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.over.set()

    def _watch(self) -> None:
        wait, rung = None, 0  # times rung in this wait
        while not self.over.wait(self.seconds / 4):
            since = self.since
            if since != wait:
                wait, rung = since, 0
            waited = 0.0 if since is None else time.monotonic() - since
            if waited >= (rung + 1) * self.seconds:
                rung = int(waited / self.seconds)
                self.ring(waited)


def watched(loader: DataLoader[Batch], watch: Watch, *, stall_seconds: float) -> Iterator[Batch]:
    """The batches of `loader`.

    Raises ValueError with one line where a worker has died, and what a worker raised.
    """
    batches = iter(loader)
    watch.workers = getattr(batches, "_workers", ())
    if threading.current_thread() is threading.main_thread():
        # torch's handler raises in the midst of whatever the trainer is at; `next` tells as well.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Alarm(stall_seconds, lambda seconds: log.warning(watch.describe_stall(seconds))) as alarm:
        while True:
            alarm.since = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                if isinstance(error, ConnectionError | EOFError | FileNotFoundError):
                    for worker in watch.workers:  # one that is ending breaks its connections first
                        worker.join(ENDING_SECONDS / len(watch.workers))
                death = watch.describe_death()
                if death is None:
                    raise
                raise ValueError(death) from error
            finally:
                alarm.since = None
            yield batch


def free_shared_memory(folder: Path = SHARED_MEMORY) -> int:
    """Bytes free for batches; -1 where there is no such file system."""
    if not folder.exists():
        return -1
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
