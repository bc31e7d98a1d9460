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
    """Writes checkpoints, one at a time."""

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
        """Copy the state and begin to write it; waits for the checkpoint before.

        state: has `step` and `attempt`. valid: the metric of this step's validation by its name,
        `eer` or `error`.
        """
        step, attempt = state["step"], state["attempt"]
        self._join()
        if self.failure and not list_checkpoints(self.folder):
            raise OSError(f"{self.failure}. Stopping: no checkpoint could be written")
        eer, error = ((valid or {}).get(name) for name in ("eer", "error"))
        note = partial(Note, step, attempt, scheduled, eer, valid_error=error)
        name = f"step_{step:08d}" + (f"_attempt_{attempt}" if attempt else "")
        copied = checkpoint.snapshot(state)
        args = (name, copied, note)
        self.thread = threading.Thread(target=self._write, args=args, name="checkpoint")
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
        for left in self.folder.glob(".step_*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        unfinished = self.folder / f".{name}"
        try:
            unfinished.mkdir(parents=True)
            sha256 = {STATE: checkpoint.write_tensors(unfinished / STATE, state)}
            size = (unfinished / STATE).stat().st_size
            checkpoint.finish(unfinished, self.folder / name, note(sha256=sha256, bytes=size))
            checkpoint.prune(self.folder, keep=self.keep)
            self.failure = ""
        except (OSError, RuntimeError, MemoryError) as error:
            tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
            self.failure = self._explain(name, error, sum(tensor.nbytes for tensor in tensors))
            log.error("%s; training continues and retries at the next checkpoint", self.failure)
            shutil.rmtree(unfinished, ignore_errors=True)

    def _explain(self, name: str, error: Exception, num_bytes: int) -> str:
        kept = [path.name for path in list_checkpoints(self.folder)]
        last = f"{kept[-1]} remains" if kept else "There is no earlier one"
        why = f"{error}; check the disk and permissions"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.folder).free
            why = f"the disk is full: {free / 2**20:.1f} MiB free, {num_bytes / 2**20:.1f} needed"
            why += "; free some space"
        return f"{self.folder / name}: cannot be written: {why}. {last}"
