"""Exit of all ranks when one runs out of memory during a step.

The other ranks wait for it in a collective, so a thread of each watches the store that all share.
"""

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from speakerlab.core import process
from speakerlab.core.atomic import write_text
from speakerlab.training.distributed import shared_store
from speakerlab.training.run_state import RunState

log = logging.getLogger(__name__)
POLL_SECONDS, LAST_SECONDS = 0.5, 6.0
CALL = "out of memory"
NOTE = "out_of_memory"  # holds the micro-batch that did not fit; run.sh reads it


class OutOfMemoryStop(RuntimeError):
    """A step did not fit in memory."""


class Rescue:
    """One rank's part in the exit."""

    def __init__(self, state: RunState, exp_dir: Path, micro_batch: int) -> None:
        self.state, self.exp_dir, self.micro_batch = state, exp_dir, micro_batch
        self.store: Any = shared_store(state.ranks)
        if self.store is not None:
            threading.Thread(target=self._watch, name="rescue", daemon=True).start()

    def leave(self, error: BaseException) -> NoReturn:
        """Leave with all ranks; a single one, which waits for no other, saves first."""
        step, rank, first = self.state.step, self.state.ranks.rank, str(error).partition("\n")[0]
        line = f"step {step}: out of memory on rank {rank}: {first}"
        log.error("%s", line)
        if self.store is None:
            self._write_note()
            self.state.updater.restore()  # BatchNorm's statistics have moved in this step
            self.state.save(scheduled=False)
            self.state.wait()
        else:
            self.store.set(CALL, "")
            time.sleep(LAST_SECONDS)  # the thread ends this process sooner
        raise OutOfMemoryStop(line) from None

    def follow(self) -> None:
        """Leave with another rank, if this one lost it because it ran out of memory."""
        with suppress(RuntimeError):  # the store may be lost, too
            if self.store is not None and self.store.check([CALL]):
                time.sleep(LAST_SECONDS)  # the thread ends this process sooner

    def _watch(self) -> None:
        try:
            while not self.store.check([CALL]):
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # the store is lost with its rank, which the main thread notices
            return
        if self.state.ranks.is_first:
            with suppress(OSError):  # without the note, run.sh does not retry
                self._write_note()
            time.sleep(LAST_SECONDS / 2)  # the store may end with this process
        process.leave(process.EXIT_MEMORY)

    def _write_note(self) -> None:
        write_text(self.exp_dir / NOTE, f"{self.micro_batch}\n")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU, one of its libraries, or torch's CPU allocator was out of memory."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    # The last is how oneDNN says that an allocation of its own failed.
    texts = "can't allocate memory", "out of memory", "ALLOC_FAILED", "could not create a primitive"
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
