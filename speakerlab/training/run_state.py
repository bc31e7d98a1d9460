"""All of a run that a resume needs: gathered, handed to the writer, and put back.

In: the parts of a run. Out: dictionaries of tensors and plain values, the same on every rank.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speakerlab.training.checkpoint import (
    Found,
    find_non_finite,
    load_state,
    read_rows,
    snapshot,
)
from speakerlab.training.distributed import Ranks
from speakerlab.training.guard import NumericError
from speakerlab.training.learning import LearningWatch
from speakerlab.training.metric_sums import Window
from speakerlab.training.task import SpeakerTask
from speakerlab.training.update import Updater
from speakerlab.training.writer import CheckpointWriter

log = logging.getLogger(__name__)
Parts = Sequence[tuple[int, Mapping[str, Tensor]]]  # (first row, this and others' rows by name)


@dataclass
class Progress:
    """Where a run is."""

    attempt: int = 0  # grows at a roll-back: another order, other draws
    step: int = 0
    best: float | None = None  # figure of validation; lower is better
    validated: int = 0  # the last step that was


class Keeper:
    """Saves and loads a run.

    read_latest: finds the newest intact checkpoint, called on rank 0. facts: plain values
    saved along. figure: the name of what validation gives and the best checkpoint has least of.
    """

    def __init__(
        self,
        *,
        task: SpeakerTask,
        updater: Updater,
        window: Window,
        learning: LearningWatch,
        ranks: Ranks,
        writer: CheckpointWriter,
        read_latest: Callable[[], Found | None],
        facts: Mapping[str, Any],
        figure: str = "eer",
    ) -> None:
        self.task, self.updater, self.window, self.learning = task, updater, window, learning
        self.ranks, self.writer, self.read_latest = ranks, writer, read_latest
        self.facts, self.figure = facts, figure
        self.progress = Progress()
        self.saved_at = time.monotonic()
        self.initial: list[Any] | None = None  # state and parts, until there is a checkpoint

    def state(self, sums: list[float]) -> dict[str, Any]:
        """All that a resume needs but rows of the head that only one rank has.

        sums: the window's, of all ranks.
        """
        progress = self.progress
        task = self.task.state_dict()
        return {
            "task": {name: task[name] for name in task if name not in self.task.split},
            "optimizer": without_rows(self.updater.optimizer, self.updater.split),
            "scale": self.updater.scale.state(),
            "skipped": int(self.updater.guard.skipped),
            "bad_in_a_row": int(self.updater.guard.in_a_row),
            "window": sums,
            "learning": self.learning.state(),
            "attempt": progress.attempt,
            "step": progress.step,
            f"best_{self.figure}": progress.best,
            "validated": progress.validated,
        }

    def rows(self) -> dict[str, Tensor]:
        """This rank's rows of a split head, and what the optimizer has for each of them."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.task.split.items():
            found[name] = parameter.detach()
            for key, value in rows_in(self.updater.optimizer.state[parameter], parameter).items():
                found[f"{name}.{key}"] = value
        return found

    def load(self, state: Mapping[str, Any], parts: Parts = ()) -> None:
        """The reverse of `state` and `rows`.

        The parts may be those of any number of ranks; there are none where the head was whole.
        """
        if self.task.split and not parts:
            names = [name for name, _ in self.task.named_parameters()]
            parts = [(0, take_rows(state, names, list(self.task.split)))]
        own = self.task.state_dict()
        missing = own.keys() - state["task"].keys()
        self.task.load_state_dict({**{name: own[name] for name in missing}, **state["task"]})
        self.updater.optimizer.load_state_dict(state["optimizer"])
        self._load_rows(parts)
        self.updater.scale.load_state(state["scale"])
        self.updater.guard.skipped.fill_(state["skipped"])
        self.updater.guard.in_a_row.fill_(state["bad_in_a_row"])
        sums = torch.tensor(state["window"], dtype=torch.float64)
        self.window.sums.copy_(sums if self.ranks.is_first else torch.zeros_like(sums))
        self.learning.load_state(state["learning"])
        names = ("attempt", "step", f"best_{self.figure}", "validated")
        self.progress = Progress(*(state[name] for name in names))

    def resume(self) -> bool:
        """Rank 0 reads the newest checkpoint and hands it to the others; False where is none."""
        found = self.ranks.on_first(self.read_latest)
        if found is None:
            # There is nothing to roll back to yet but what the run begins with.
            self.initial = snapshot([self.state(self.window.sums.tolist()), self._parts()])
            return False
        self.load(load_state(found.state), read_rows(found.folder))
        return True

    def save(self, *, scheduled: bool, valid: Mapping[str, float] | None = None) -> None:
        """Begin to write a checkpoint; raises NumericError, on every rank, if it is not finite."""
        state = self.state(self.ranks.sum(self.window.sums).tolist())
        watched = {"task": state["task"], "optimizer": state["optimizer"], "rows": self.rows()}
        bad = find_non_finite(watched, "state")
        found = [name for names in self.ranks.every(bad[:1]) for name in names]
        if found:
            step = self.progress.step
            raise NumericError(f"step {step}: state is not finite, got {found[0]}", step - 1)
        self._write(state, scheduled=scheduled, valid=valid)

    def wait(self) -> None:
        """Until the last checkpoint is on the disk; no rank goes on before all are here.

        A rank that left earlier would have the others stopped while they write.
        """
        self.writer.wait()
        self.ranks.barrier("checkpoint written")

    def save_before_step(self, sums: list[float]) -> None:
        """Write the state from before the step that is being computed, and wait for it.

        BatchNorm's statistics have moved in the step already; the guard remembers them.
        """
        guard = self.updater.guard
        before = {now.data_ptr(): old for now, old in zip(guard.buffers, guard.saved)}
        state = self.state(sums)
        state["task"] = {name: before.get(t.data_ptr(), t) for name, t in state["task"].items()}
        self._write(state, scheduled=False, valid=None)
        self.writer.wait()

    def roll_back(self) -> None:
        """Load the newest checkpoint as another attempt, and save that there is one."""
        attempt = self.progress.attempt + 1
        self.writer.wait()
        found = self.ranks.on_first(self.read_latest)
        if found is not None:
            self.load(load_state(found.state), read_rows(found.folder))
        else:
            assert self.initial is not None, "a run that was resumed has a checkpoint"
            self.load(*self.initial)
        self.progress.attempt = attempt
        self.updater.begin_anew()
        self.learning.reset()
        self.save(scheduled=False)

    def _write(
        self, state: dict[str, Any], *, scheduled: bool, valid: Mapping[str, float] | None
    ) -> None:
        self.saved_at, self.initial = time.monotonic(), None
        self.writer.save(
            {**state, **self.facts},
            rows=self._parts()[0] if self.task.split else None,
            scheduled=scheduled,
            valid=valid,
        )

    def _parts(self) -> list[tuple[int, dict[str, Tensor]]]:
        """This rank's part of a split head as it is written; none of one that is not split."""
        return [(self.task.head.row_range[0], self.rows())] if self.task.split else []

    def _load_rows(self, parts: Parts) -> None:
        """Rows of the head and what the optimizer has for them, from parts of any ranks."""
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
    """Those of an optimizer's values for a parameter that have a row for each of its rows."""
    shape = parameter.shape
    return {key: v for key, v in state.items() if isinstance(v, Tensor) and v.shape == shape}


def without_rows(optimizer: torch.optim.Optimizer, split: Sequence[nn.Parameter]) -> dict[str, Any]:
    """An optimizer's state without what has a row for each row of the parameters `split`."""
    state = optimizer.state_dict()
    ids = {id(parameter): parameter for parameter in split}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = {}
    for index, values in state["state"].items():
        parameter = ids.get(id(parameters[index]))
        left_out = {} if parameter is None else rows_in(values, parameter)
        kept[index] = {key: value for key, value in values.items() if key not in left_out}
    return {**state, "state": kept}


def take_rows(
    state: Mapping[str, Any], parameters: Sequence[str], split: Sequence[str]
) -> dict[str, Tensor]:
    """Take out of the state of a run with a whole head what `Keeper.rows` has of a split one.

    parameters: names in the order of the optimizer's.
    """
    taken: dict[str, Tensor] = {}
    for name in split:
        taken[name] = state["task"].pop(name)
        values = state["optimizer"]["state"].get(parameters.index(name), {})
        for key in rows_in(values, taken[name]):
            taken[f"{name}.{key}"] = values.pop(key)
    return taken
