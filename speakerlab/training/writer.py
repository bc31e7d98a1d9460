"""Writes checkpoints while training goes on. In: state, copied when handed over. Out: folders.

Rank 0 writes what all ranks have alike; where the rows of the head are split over ranks, each rank
writes its own, and rank 0 gives the folder its name when all have. What cannot be written, on a
disk that is full, is told; training goes on and the next checkpoint is tried.
"""

import errno
import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from speakerlab.training.checkpoint import (
    ROWS,
    STATE,
    Note,
    finish,
    list_checkpoints,
    name_of,
    prune,
    size_of,
    snapshot,
    write_synced,
    write_tensors,
)

log = logging.getLogger(__name__)
OTHERS_SECONDS = 300.0  # that rank 0 waits for the rows of the others
SLOW_SECONDS = 1.0  # a wait for the checkpoint before that is told


class CheckpointWriter:
    """One rank's part in writing checkpoints; one at a time.

    run: a word that all ranks of this run share and no other run has. num_parts: ranks that hand
    over rows of the head.
    """

    def __init__(
        self, folder: Path, *, keep: int, run: str = "", rank: int = 0, num_parts: int = 0
    ) -> None:
        self.folder, self.keep, self.run = folder, keep, run
        self.rank, self.num_parts = rank, num_parts
        self.thread: threading.Thread | None = None
        self.failure = ""  # why the last checkpoint could not be written
        if rank == 0:
            for left in folder.glob(".step_*"):  # of a run that was killed
                shutil.rmtree(left, ignore_errors=True)

    def save(
        self,
        state: Mapping[str, Any],
        *,
        rows: tuple[int, Mapping[str, Any]] | None = None,
        scheduled: bool = True,
        valid: Mapping[str, float] | None = None,
    ) -> None:
        """Copy the state and begin to write it; waits for the checkpoint before.

        state: has `step` and `attempt`; only rank 0's is written. rows: (first row, this rank's).
        valid: the figure of this step's validation by its name, `eer` or `error`.
        """
        if self.rank != 0 and rows is None:
            return
        step, attempt = state["step"], state["attempt"]
        began = time.monotonic()
        self._join()
        if time.monotonic() - began > SLOW_SECONDS:
            text = "step %d: waited %.1f s for the checkpoint before; the disk is slow"
            log.warning(text, step, time.monotonic() - began)
        if self.failure and not list_checkpoints(self.folder):
            raise OSError(f"{self.failure}. A run that was never saved is not gone on with")
        copied = snapshot(state) if self.rank == 0 else None
        part = None if rows is None else (rows[0], snapshot(rows[1]))

        def note(sha256: Mapping[str, str], size: int) -> Note:
            eer, error = ((valid or {}).get(name) for name in ("eer", "error"))
            return Note(step, attempt, scheduled, eer, sha256, size, error)

        self.thread = threading.Thread(
            target=self._write, args=(name_of(step, attempt), copied, part, note), name="checkpoint"
        )
        self.thread.start()

    def wait(self) -> None:
        """Until all is on the disk; OSError where the last checkpoint could not be written."""
        self._join()
        if self.failure:
            raise OSError(f"{self.failure}. The same command goes on from there")

    def _join(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _write(
        self,
        name: str,
        state: Mapping[str, Any] | None,
        part: tuple[int, Mapping[str, Any]] | None,
        note: Callable[[Mapping[str, str], int], Note],
    ) -> None:
        partial = self.folder / f".{name}.{self.run}"
        try:
            partial.mkdir(parents=True, exist_ok=True)
            if part is not None:
                file = f"{ROWS}{part[0]:08d}_{self.rank}.pt"
                digest = write_tensors(partial / file, part[1])
                write_synced(partial / f"{file}.sha256", digest.encode())
            if state is not None:
                sha256 = {STATE: write_tensors(partial / STATE, state), **self._others(partial)}
                size = sum((partial / file).stat().st_size for file in sha256)
                finish(partial, self.folder / name, note(sha256, size))
                prune(self.folder, keep=self.keep)
            self.failure = ""
        except (OSError, RuntimeError, MemoryError) as error:
            self.failure = self._told(name, error, [state, part])
            text = "%s; training goes on and tries again at the next checkpoint"
            log.error(text, self.failure)
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)

    def _others(self, partial: Path) -> dict[str, str]:
        """Name -> sha256 of the rows that all ranks have written, once they have."""
        deadline = time.monotonic() + OTHERS_SECONDS
        while len(done := sorted(partial.glob("*.sha256"))) < self.num_parts:
            if time.monotonic() > deadline:
                raise OSError(f"rows of the head came from {len(done)} of {self.num_parts} ranks")
            time.sleep(0.02)
        found = {path.stem: path.read_text(encoding="ascii") for path in done}
        for path in done:
            path.unlink()
        return found

    def _told(self, name: str, error: Exception, values: Sequence[Any]) -> str:
        """What is wrong with a checkpoint of these values that could not be written."""
        kept = [path.name for path in list_checkpoints(self.folder)]
        last = f"{kept[-1]} remains" if kept else "There is none before it"
        why = f"got '{error}'; look at the disk and permissions"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            free, need = shutil.disk_usage(self.folder).free, size_of(values)
            why = f"the disk is full, got {free / 2**20:.1f} MiB free for {need / 2**20:.1f}"
            why += "; free some there"
        return f"{self.folder / name}: cannot be written: {why}. {last}"


def run_word() -> str:
    """A word that no other run has; rank 0 makes it and tells it to all."""
    return hashlib.sha256(str(time.time_ns()).encode()).hexdigest()[:8]
