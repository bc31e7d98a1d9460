"""Write checkpoints in the background while training continues.

A checkpoint that cannot be written, because the disk is full, is reported; training continues and
the next one is tried.
"""

import errno
import logging
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from speakerlab.training import checkpoint
from speakerlab.training.checkpoint import STATE, Note, list_checkpoints

log = logging.getLogger(__name__)


@dataclass(eq=False)
class CheckpointWriter:
    """Writes checkpoints in a thread, one at a time, so that training waits for no disk."""

    folder: Path
    keep: int
    thread: threading.Thread | None = None
    failure: str = ""  # why the last checkpoint could not be written

    def save(
        self,
        state: Mapping[str, Any],
        *,
        scheduled: bool = True,
        valid: Mapping[str, float] | None = None,
    ) -> None:
        """Copy the state and begin to write it; waits for the previous checkpoint.

        state: has `step` and `attempt`. valid: the metric of this step's validation by its name,
        `eer` or `error`.
        """
        step = state["step"]
        attempt = state["attempt"]
        self._join()
        # Without any checkpoint, an interruption would lose the whole run.
        if self.failure and not list_checkpoints(self.folder):
            raise OSError(f"{self.failure}. Stopping: no checkpoint could be written")

        # Size and digest are known only after the state is written: `_write` adds them.
        metrics = valid or {}
        note = partial(
            Note,
            step=step,
            attempt=attempt,
            scheduled=scheduled,
            valid_eer=metrics.get("eer"),
            valid_error=metrics.get("error"),
        )
        name = f"step_{step:08d}"
        if attempt:
            name += f"_attempt_{attempt}"

        # A copy, because the next steps change the parameters while the thread writes.
        copied_state = checkpoint.snapshot(state)
        self.thread = threading.Thread(
            target=self._write,
            args=(name, copied_state, note),
            name="checkpoint",
        )
        self.thread.start()

    def wait(self) -> None:
        """Wait until all is on disk; raise OSError if the last checkpoint was not written."""
        self._join()
        if self.failure:
            raise OSError(f"{self.failure}; the same command resumes from there")

    def _join(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def _write(self, name: str, state: Any, note: partial[Note]) -> None:
        """Write a checkpoint and remove old ones; keep and log the reason of a failure."""
        # A run that was killed while it wrote has left its unfinished folder.
        for leftover in self.folder.glob(".step_*"):
            shutil.rmtree(leftover, ignore_errors=True)

        # Written under a hidden name and then renamed, so that no reader sees half a checkpoint.
        unfinished = self.folder / f".{name}"
        state_file = unfinished / STATE
        try:
            unfinished.mkdir(parents=True)
            digest = checkpoint.write_tensors(state_file, state)
            size = state_file.stat().st_size
            full_note = note(sha256={STATE: digest}, bytes=size)
            checkpoint.finish(unfinished, self.folder / name, full_note)
            # Remove older checkpoints only after the newer one is on disk.
            checkpoint.prune(self.folder, keep=self.keep)
            self.failure = ""
        # An error must not end the thread unseen, nor the training: the next try may succeed.
        except (OSError, RuntimeError, MemoryError) as error:
            num_bytes = 0
            for leaf in tree_leaves(state):
                if isinstance(leaf, Tensor):
                    num_bytes += leaf.nbytes
            self.failure = self._explain(name, error, num_bytes)
            log.error(
                "%s; training continues and retries at the next checkpoint",
                self.failure,
            )
            shutil.rmtree(unfinished, ignore_errors=True)

    def _explain(self, name: str, error: Exception, num_bytes: int) -> str:
        """Return why a checkpoint of this size could not be written, and which one remains."""
        names = [path.name for path in list_checkpoints(self.folder)]
        last = f"{names[-1]} remains" if names else "There is no earlier one"
        reason = f"{error}; check the disk and permissions"
        # The disk, or the user's quota on it, is full.
        full_disk_errors = (errno.ENOSPC, errno.EDQUOT)
        if isinstance(error, OSError) and error.errno in full_disk_errors:
            free_bytes = shutil.disk_usage(self.folder).free
            reason = (
                f"the disk is full: {free_bytes / 2**20:.1f} MiB free,"
                f" {num_bytes / 2**20:.1f} needed; free some space"
            )
        return f"{self.folder / name}: cannot be written: {reason}. {last}"
