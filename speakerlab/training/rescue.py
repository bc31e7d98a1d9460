"""Coordinated exit when one rank runs out of memory during a step.

The other ranks wait for it in a collective and cannot be reached there. A thread of each rank
watches the store that all ranks share, saves in place of the main thread and ends the process.
Parameters are still those from before the step, because no rank gets past its gradients without
the rank that failed. On a GPU it is the device that waits: the host queues the update, which is not
made, and may begin another step before it waits too.
"""

import json
import logging
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from speakerlab.core import process
from speakerlab.core.atomic import write_text
from speakerlab.training.distributed import Ranks, shared_store
from speakerlab.training.run_state import RunState

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
STUCK_SECONDS = 15.0  # for the other ranks to arrive at the same step
SAVE_SECONDS = 60.0
CALL, SUMS, SAVED = "rescue", "rescue/sums", "rescue/saved"


class OutOfMemoryStop(RuntimeError):
    """A step did not fit in memory; the state from before it is saved."""


class Rescue:
    """One rank's part in the exit. note: file for the micro-batch that did not fit."""

    def __init__(self, ranks: Ranks, state: RunState, *, note: Path, micro_batch: int) -> None:
        self.ranks, self.state = ranks, state
        self.note, self.micro_batch = note, micro_batch
        self.begun: dict[int, torch.cuda.Event | None] = {}  # the last two steps
        self.is_caller = False
        self.store: Any = shared_store(ranks)
        if self.store is not None:
            threading.Thread(target=self._watch, name="rescue", daemon=True).start()

    def begin(self, step: int) -> None:
        """Note a step; call it when what a bad step returns to is saved, or queued to be."""
        before = None
        if self.ranks.device.type == "cuda":
            before = torch.cuda.Event()
            before.record()
        self.begun = {**dict(list(self.begun.items())[-1:]), step: before}

    def leave(self, step: int, error: BaseException) -> NoReturn:
        """Save and leave with all ranks; raise OutOfMemoryStop if there is only one rank."""
        rank = self.ranks.rank
        line = f"step {step}: out of memory on rank {rank}: {str(error).splitlines()[0]}"
        log.error("%s", line)
        if self.store is None:
            self._save(step, self.state.sums.sums.tolist())
            raise OutOfMemoryStop(line)
        self.is_caller = True
        self.store.set(CALL, json.dumps(step))
        self._leave(step)

    def _watch(self) -> None:
        while not self.store.check([CALL]):
            time.sleep(POLL_SECONDS)
        if self.is_caller:
            return
        step = json.loads(self.store.get(CALL))
        deadline = time.monotonic() + STUCK_SECONDS
        while step not in self.begun:
            if time.monotonic() > deadline:  # this rank, or another one, failed too
                log.error("rank %d: not at step %d; exiting without saving", self.ranks.rank, step)
                process.leave(process.EXIT_MEMORY)
            time.sleep(POLL_SECONDS / 10)
        self._leave(step)

    def _leave(self, step: int) -> NoReturn:
        before = self.begun[step]
        if before is None:
            self._save_together(step)
        else:  # the main thread's stream waits for the rank that is out of memory
            before.synchronize()
            with torch.cuda.device(self.ranks.device), torch.cuda.stream(torch.cuda.Stream()):
                self._save_together(step)
        process.leave(process.EXIT_MEMORY)

    def _save_together(self, step: int) -> None:
        """Hand this rank's sums to rank 0; save, or wait for the end of saving."""
        rank, store = self.ranks.rank, self.store
        store.set(f"{SUMS}/{rank}", json.dumps(self.state.sums.sums.tolist()))
        try:
            if rank == 0:
                every = [json.loads(store.get(f"{SUMS}/{r}")) for r in range(self.ranks.world_size)]
                self._save(step, [sum(values) for values in zip(*every)])
                store.set(SAVED, "")
                time.sleep(2 * POLL_SECONDS)  # the store may end with this process
            else:
                self._save(step, [])
                store.wait([SAVED], timedelta(seconds=SAVE_SECONDS))
        except (OSError, RuntimeError) as error:  # the writer has logged what was not saved
            log.error("rank %d: %s", rank, error)

    def _save(self, step: int, sums: list[float]) -> None:
        if self.ranks.rank == 0:
            write_text(self.note, f"{self.micro_batch}\n")
        self.state.save_before_step(step, sums)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU, one of its libraries, or torch's CPU allocator was out of memory."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    # The last is how oneDNN says that an allocation of its own failed.
    texts = "can't allocate memory", "out of memory", "ALLOC_FAILED", "could not create a primitive"
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
