"""All that a checkpoint holds, saved and loaded in one place."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from speakerlab.training import checkpoint
from speakerlab.training.distributed import Ranks
from speakerlab.training.progress import LearningWatch, MetricSums
from speakerlab.training.task import Task
from speakerlab.training.update import NumericError, Updater
from speakerlab.training.writer import CheckpointWriter


@dataclass(eq=False, kw_only=True)
class RunState:
    """State of a run. A checkpoint is that of a head with all rows, also where they are split."""

    task: Task
    updater: Updater
    sums: MetricSums
    learning: LearningWatch
    ranks: Ranks
    writer: CheckpointWriter
    metric: str = "eer"  # name of the validation metric; lower is better
    step: int = 0  # number of completed steps
    attempt: int = 0  # number of roll-backs; each has another data order and other draws
    validated: int = 0  # the last step that was validated
    best: float | None = None  # the lowest metric
    initial: dict[str, Any] | None = None  # this rank's state, until there is a checkpoint
    saved_at: float = field(default_factory=time.monotonic)

    def resume(self) -> bool:
        """Load the newest checkpoint, which rank 0 reads; return False if there is none."""
        if not (is_resumed := self._load_latest()):  # a roll-back then returns to the beginning
            self.initial = checkpoint.snapshot(self._state())
        return is_resumed

    def save(self, *, scheduled: bool, valid: Mapping[str, float] | None = None) -> None:
        """Begin to write a checkpoint; raise NumericError, on every rank, if it is not finite."""
        state = self._state()
        bad = [name for name, value in state["task"].items() if not bool(value.isfinite().all())]
        if found := sum(self.ranks.every(bad[:1]), []):
            raise NumericError(f"step {self.step}: {found[0]} is not finite", self.step - 1)
        self.saved_at, self.initial = time.monotonic(), None
        if self.task.split:
            self._change_rows(state, self.task.head.gather_rows)
        if self.ranks.is_first:
            self.writer.save(state, scheduled=scheduled, valid=valid)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk, on every rank.

        A rank that left earlier would have the others killed while they write.
        """
        self.writer.wait()
        self.ranks.barrier("checkpoint written")

    def roll_back(self) -> None:
        """Load the newest checkpoint as the next attempt, and save that it has begun."""
        attempt = self.attempt + 1
        self.writer.wait()
        if not self._load_latest():
            assert self.initial is not None, "a run that was resumed has a checkpoint"
            self._load(self.initial)
        self.attempt = attempt
        self.updater.reset()
        self.learning.reset()
        self.save(scheduled=False)

    def _load_latest(self) -> bool:
        found = self.ranks.on_first(lambda: checkpoint.read_latest(self.writer.folder))
        if found is not None:
            folder, data = found
            state = checkpoint.load_state(data, where=folder)
            if self.task.split:
                first, last = self.task.head.row_range
                self._change_rows(state, lambda rows: rows[first:last].clone())
            self._load(state)
        return found is not None

    def _state(self) -> dict[str, Any]:
        """Return the state, of a split head this rank's. Every rank must call it."""
        return {
            "task": self.task.state_dict(),
            "optimizer": self.updater.optimizer.state_dict(),
            "updater": self.updater.state(),
            "sums": self.ranks.sum(self.sums.sums).tolist(),
            "learning": self.learning.state(),
            "attempt": self.attempt,
            "step": self.step,
            "best": self.best,
            "validated": self.validated,
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.task.load_state_dict(state["task"])
        self.updater.optimizer.load_state_dict(state["optimizer"])
        self.updater.load_state(state["updater"])
        self.sums.load(state["sums"])
        self.learning.load_state(state["learning"])
        self.attempt, self.step = state["attempt"], state["step"]
        self.best, self.validated = state["best"], state["validated"]

    def _change_rows(self, state: dict[str, Any], change: Callable[[Tensor], Any]) -> None:
        """Change the rows of a split head in a state, and what the optimizer keeps for each row."""
        groups = self.updater.optimizer.param_groups
        place_of = {id(p): at for at, p in enumerate(p for one in groups for p in one["params"])}
        for name, parameter in self.task.split.items():
            rows, kept = state["task"][name], state["optimizer"]["state"]
            state["task"][name] = change(rows)
            place = place_of[id(parameter)]
            if place in kept:
                kept[place] = {
                    key: change(value) if getattr(value, "shape", None) == rows.shape else value
                    for key, value in kept[place].items()
                }
