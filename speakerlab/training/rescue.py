"""Leaving together in the midst of a step that one rank cannot finish: it is out of memory.

In: the step, and how to save what was before it. Out: the process, with the exit code of memory.
The others wait for that rank in a collective and cannot be told there; a thread of each looks at
the store that all ranks share, saves in the main thread's place, and ends the process. Parameters
are those from before the step, because no rank gets past its gradients without the one that is out.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch

from speakerlab.core import process

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.5
STUCK_SECONDS = 15.0  # in which the others are to arrive at the same step
SAVE_SECONDS = 60.0
CALL, WINDOW, SAVED = "rescue", "rescue/window", "rescue/saved"


class OutOfMemoryStop(RuntimeError):
    """A step did not fit; the state from before it is saved."""


class Store(Protocol):
    """Strings that all ranks share, as torch's stores have them."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class Rescue:
    """One rank's part in leaving together.

    window: this rank's sums. save: writes what was before the step, given the sums of all ranks,
    and waits for it. step_at: the step whose gradients are being made, or None between two.
    """

    def __init__(
        self,
        store: Store | None,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        window: Callable[[], list[float]],
        save: Callable[[list[float]], None],
        step_at: Callable[[], int | None],
    ) -> None:
        self.store, self.rank, self.world_size, self.device = store, rank, world_size, device
        self.window, self.save, self.step_at = window, save, step_at
        self.is_caller = False
        if store is not None:
            threading.Thread(target=self._look, name="rescue", daemon=True).start()

    def leave(self, step: int, error: BaseException) -> NoReturn:
        """Call it on the rank that is out of memory; raises OutOfMemoryStop where it is alone."""
        line = f"step {step}: out of memory on rank {self.rank}: {str(error).splitlines()[0]}"
        log.error("%s", line)
        if self.store is None:
            self.save(self.window())
            raise OutOfMemoryStop(line)
        self.is_caller = True
        self.store.set(CALL, json.dumps(step))
        self._leave()

    def _look(self) -> None:
        assert self.store is not None
        while not self.store.check([CALL]):
            time.sleep(LOOK_SECONDS)
        if self.is_caller:
            return
        step = json.loads(self.store.get(CALL))
        deadline = time.monotonic() + STUCK_SECONDS
        while self.step_at() != step:
            if time.monotonic() > deadline:  # it has failed here too, or elsewhere
                log.error("rank %d: is not at step %d; leaving without saving", self.rank, step)
                process.leave(process.EXIT_MEMORY)
            time.sleep(LOOK_SECONDS / 10)
        self._leave()

    def _leave(self) -> NoReturn:
        """Save with the others, and end."""
        if self.device.type != "cuda":
            self._save_together()
        else:  # the main thread's stream waits for the rank that is out of memory
            with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream()):
                self._save_together()
        process.leave(process.EXIT_MEMORY)

    def _save_together(self) -> None:
        """Hand over this rank's sums; save, or wait for it."""
        store: Any = self.store
        store.set(f"{WINDOW}/{self.rank}", json.dumps(self.window()))
        try:
            if self.rank == 0:
                windows = [json.loads(store.get(f"{WINDOW}/{r}")) for r in range(self.world_size)]
                self.save([sum(each) for each in zip(*windows)])
                store.set(SAVED, "")
                time.sleep(2 * LOOK_SECONDS)  # the store may end with this process
            else:
                store.wait([SAVED], timedelta(seconds=SAVE_SECONDS))
        except (OSError, RuntimeError) as error:  # what could not be saved was told
            log.error("rank %d: %s", self.rank, error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU, one of its libraries, or torch's allocator on a CPU had no memory left."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    told = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in told)
