"""Exit of all ranks when one runs out of memory during a step.

The main thread of every other rank then waits in a collective for the rank that failed. So each
rank has a second thread, which watches the shared store for a request to exit.
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
POLL_SECONDS = 0.5
# Time for the watching threads of all ranks to see the request and end their processes.
LAST_SECONDS = 6.0
EXIT_REQUEST = "out of memory"  # key in the store, set by the rank that failed


class OutOfMemoryStop(RuntimeError):
    """A step did not fit in memory."""


class Rescue:
    """Exit of this rank together with all other ranks.

    micro_batch: its size is noted for the next attempt, which takes a smaller one.
    """

    def __init__(self, state: RunState, exp_dir: Path, micro_batch: int) -> None:
        self.state = state
        self.exp_dir = exp_dir
        self.micro_batch = micro_batch
        self.store: Any = shared_store(state.ranks)
        self.watcher = threading.Thread(target=self._watch, name="rescue", daemon=True)
        if self.store is not None:
            self.watcher.start()

    def handle(self, error: RuntimeError | MemoryError) -> None:
        """Exit with all ranks if this one, or another one, is out of memory; else return.

        The caller then raises the error again. Call it only for errors of forward and backward
        passes: once an update has begun, the state from before the step cannot be saved any more.
        """
        if is_out_of_memory(error):
            self._exit_all_ranks(error)
        self._exit_with_another_rank()

    def _exit_all_ranks(self, error: BaseException) -> NoReturn:
        """Exit with all ranks; a single rank, which waits for no other rank, saves first."""
        # torch's text has many lines; the size that did not fit is in the first.
        first_line, _, _ = str(error).partition("\n")
        line = (
            f"step {self.state.step}: out of memory on rank {self.state.ranks.rank}:"
            f" {first_line}"
        )
        log.error("%s", line)
        if self.store is None:
            self._write_note()
            # BatchNorm's statistics have moved in this step.
            self.state.updater.restore()
            self.state.save(scheduled=False)
            self.state.wait()
        else:
            self.store.set(EXIT_REQUEST, "")
            time.sleep(LAST_SECONDS)  # `_watch` ends this process sooner
        raise OutOfMemoryStop(line) from None

    def _exit_with_another_rank(self) -> None:
        """Exit if another rank has run out of memory, which can make a collective fail here."""
        if self.store is None:
            return
        with suppress(RuntimeError):  # the store may be lost, too
            if self.store.check([EXIT_REQUEST]):
                time.sleep(LAST_SECONDS)  # `_watch` ends this process sooner

    def _watch(self) -> None:
        """End this process when some rank has requested the exit of all ranks."""
        try:
            while not self.store.check([EXIT_REQUEST]):
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            # The store is lost with the rank that holds it; the main thread detects this loss.
            return
        if self.state.ranks.is_first:
            with suppress(OSError):  # without the note, the training is not retried
                self._write_note()
            time.sleep(LAST_SECONDS / 2)  # the store may end with this process
        process.leave(process.EXIT_MEMORY)

    def _write_note(self) -> None:
        write_text(self.exp_dir / process.MEMORY_NOTE, f"{self.micro_batch}\n")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU, one of its libraries, or torch's CPU allocator was out of memory."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    # Libraries such as cuBLAS, and torch's CPU allocator, raise a plain RuntimeError: only its text
    # shows the cause.
    texts = (
        "can't allocate memory",
        "out of memory",
        "alloc_failed",
        "could not create a primitive",  # of oneDNN, when an allocation of its own failed
        # Of cuDNN, when no algorithm gets the memory it needs.
        "unable to find an engine",
        "unable to find a valid cudnn algorithm",
        # Of cuBLAS, when its first call gets no memory for a handle.
        "cublas_status_not_initialized",
    )
    message = str(error).lower()
    is_named = any(text in message for text in texts)
    return isinstance(error, RuntimeError) and is_named
