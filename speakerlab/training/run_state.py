"""All that a checkpoint holds, saved and loaded in one place."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from speakerlab.training import checkpoint
from speakerlab.training.distributed import Ranks
from speakerlab.training.progress import LearningWatch, MetricSums
from speakerlab.training.task import Task
from speakerlab.training.update import NumericError, Updater
from speakerlab.training.writer import CheckpointWriter

Parts = Sequence[tuple[int, Mapping[str, Tensor]]]  # (first row, rows of a split head by name)


@dataclass(eq=False, kw_only=True)
class RunState:
    """State of a run."""

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
    initial: list[Any] | None = None  # state and parts, until there is a checkpoint
    saved_at: float = field(default_factory=time.monotonic)

    def resume(self) -> bool:
        """Load the newest checkpoint, which rank 0 reads; return False if there is none."""
        if not (is_resumed := self._load_latest()):  # a roll-back then returns to the beginning
            self.initial = checkpoint.snapshot(
                [self._state(self.sums.sums.tolist()), self._parts()]
            )
        return is_resumed

    def save(self, *, scheduled: bool, valid: Mapping[str, float] | None = None) -> None:
        """Begin to write a checkpoint; raise NumericError, on every rank, if it is not finite."""
        state = self._state(self.ranks.sum(self.sums.sums).tolist())
        watched = {"task": state["task"], "optimizer": state["optimizer"], "rows": self._rows()}
        bad = checkpoint.find_non_finite(watched, "state")
        found = [name for names in self.ranks.every(bad[:1]) for name in names]
        if found:
            raise NumericError(f"step {self.step}: {found[0]} is not finite", self.step - 1)
        self._write(state, scheduled=scheduled, valid=valid)

    def save_before_step(self, step: int, sums: list[float]) -> None:
        """Write the state from before a step whose update cannot be made, and wait for it.

        sums: the metric sums of all ranks. BatchNorm's statistics have moved already in this step;
        the updater remembers them. On a GPU the host may be a step further.
        """
        state = self._state(sums)
        state["step"] = step
        state["task"] = {name: self.updater.from_before(t) for name, t in state["task"].items()}
        self._write(state, scheduled=False)
        self.writer.wait()

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
            self._load(*self.initial)
        self.attempt = attempt
        self.updater.reset()
        self.learning.reset()
        self.save(scheduled=False)

    def _load_latest(self) -> bool:
        found = self.ranks.on_first(lambda: checkpoint.read_latest(self.writer.folder))
        if found is not None:
            folder, state = found
            self._load(checkpoint.load_state(state, where=folder), checkpoint.read_rows(folder))
        return found is not None

    def _state(self, sums: list[float]) -> dict[str, Any]:
        """Return all but the rows of a split head; sums: the metric sums of all ranks."""
        task, optimizer = self.task.state_dict(), self.updater.optimizer
        state = optimizer.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        split = {id(parameter) for parameter in self.updater.split}
        for index, values in state["state"].items():
            if id(parameters[index]) in split:
                rows = rows_in(values, parameters[index])
                state["state"][index] = {k: v for k, v in values.items() if k not in rows}
        return {
            "task": {name: task[name] for name in task if name not in self.task.split},
            "optimizer": state,
            "updater": self.updater.state(),
            "sums": sums,
            "learning": self.learning.state(),
            "attempt": self.attempt,
            "step": self.step,
            "best": self.best,
            "validated": self.validated,
        }

    def _rows(self) -> dict[str, Tensor]:
        """Return this rank's rows of a split head, and the optimizer's values for each row."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.task.split.items():
            found[name] = parameter.detach()
            values = rows_in(self.updater.optimizer.state[parameter], parameter)
            found |= {f"{name}.{key}": value for key, value in values.items()}
        return found

    def _parts(self) -> list[tuple[int, dict[str, Tensor]]]:
        """Return this rank's part of a split head as it is written; none if it is whole."""
        return [(self.task.head.row_range[0], self._rows())] if self.task.split else []

    def _write(self, state: dict[str, Any], **how: Any) -> None:
        self.saved_at, self.initial = time.monotonic(), None
        self.writer.save(state, *self._parts(), **how)

    def _load(self, state: dict[str, Any], parts: Parts = ()) -> None:
        """Restore the state; parts: of any number of ranks, none where the head was whole."""
        if self.task.split and not parts:
            parts = [(0, self._take_rows(state))]
        own = self.task.state_dict()
        missing = {name: own[name] for name in own.keys() - state["task"].keys()}
        self.task.load_state_dict({**missing, **state["task"]})
        self.updater.optimizer.load_state_dict(state["optimizer"])
        self._load_rows(parts)
        self.updater.load_state(state["updater"])
        self.sums.load(state["sums"])
        self.learning.load_state(state["learning"])
        self.attempt, self.step = state["attempt"], state["step"]
        self.best, self.validated = state["best"], state["validated"]

    def _take_rows(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Take out of the state of a whole head what `_rows` returns for a split one."""
        names = [name for name, _ in self.task.named_parameters()]  # in the optimizer's order
        taken: dict[str, Tensor] = {}
        for name in self.task.split:
            taken[name] = state["task"].pop(name)
            values = state["optimizer"]["state"].get(names.index(name), {})
            for key in rows_in(values, taken[name]):
                taken[f"{name}.{key}"] = values.pop(key)
        return taken

    def _load_rows(self, parts: Parts) -> None:
        parameters = dict(self.task.named_parameters())
        for key in parts[0][1] if parts else ():
            rows = self.task.head.own_rows((first, part[key]) for first, part in parts)
            name = key if key in parameters else key.rpartition(".")[0]
            parameter = parameters[name]
            if key == name:
                parameter.data.copy_(rows)
            else:
                state = self.updater.optimizer.state[parameter]
                state[key.removeprefix(f"{name}.")] = rows.to(parameter.device)


def rows_in(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return the values that an optimizer keeps for each row of a parameter."""
    shape = parameter.shape
    return {key: v for key, v in state.items() if isinstance(v, Tensor) and v.shape == shape}
