"""All that a checkpoint holds, saved and loaded in one place."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from speakerlab.training import checkpoint
from speakerlab.training.distributed import Ranks
from speakerlab.training.progress import LearningWatch
from speakerlab.training.task import Task
from speakerlab.training.update import MetricSums, NumericError, Updater
from speakerlab.training.writer import CheckpointWriter


@dataclass(eq=False, kw_only=True)
class RunState:
    """State of a run. A checkpoint holds all rows of the head, even if ranks have split them."""

    task: Task
    updater: Updater
    sums: MetricSums  # since the last line of metrics.jsonl
    learning: LearningWatch  # notices a training that learns nothing
    ranks: Ranks
    writer: CheckpointWriter
    metric: str = "eer"  # name of the validation metric; lower is better
    step: int = 0  # number of completed steps
    # Number of roll-backs; each attempt has another data order and other draws.
    attempt: int = 0
    validated: int = 0  # the last step that was validated
    best: float | None = None  # the lowest metric so far
    # This rank's state at the start. A roll-back returns to it until there is a checkpoint.
    initial: dict[str, Any] | None = None
    # When the last checkpoint was begun; `runtime.checkpoint_minutes` later the next one is due.
    saved_at: float = field(default_factory=time.monotonic)

    def resume(self) -> bool:
        """Load the newest checkpoint, which rank 0 reads.

        If there is none, remember this state as the start, and return False.
        """
        is_resumed = self._load_latest()
        if not is_resumed:
            state = self._state()
            self.initial = checkpoint.snapshot(state)
        return is_resumed

    def save(
        self, *, scheduled: bool, valid: Mapping[str, float] | None = None
    ) -> None:
        """Begin to write a checkpoint. Every rank must call it.

        scheduled: one of the checkpoints every `checkpoint_every_steps`, which are kept longer and
        can be averaged. valid: the metrics of this step. Raises NumericError, on every rank, if a
        weight or statistic of any rank is not finite: a run that resumes from such a checkpoint
        could never recover.
        """
        state = self._state()
        self._check_finite(state["task"])
        self.saved_at = time.monotonic()
        self.initial = None  # a roll-back now waits for this checkpoint, and loads it
        # The file has the rows of all ranks, so that any number of ranks can resume from it.
        if self.task.split_parameters:
            gather_rows = self.task.head.gather_rows
            self._change_rows(state, gather_rows)
        if self.ranks.is_first:
            self.writer.save(state, scheduled=scheduled, valid=valid)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk, on every rank."""
        self.writer.wait()
        # A launcher may kill the other ranks as soon as one has exited: rank 0 could be killed in
        # the middle of writing.
        self.ranks.barrier("checkpoint written")

    def roll_back(self) -> None:
        """Load the newest checkpoint as the next attempt, and save that it has begun."""
        next_attempt = self.attempt + 1  # loading sets the attempt of the checkpoint
        self.writer.wait()
        if not self._load_latest():
            assert self.initial is not None, "without a checkpoint, the start is kept"
            self._load(self.initial)
        self.attempt = next_attempt
        # Bad steps that were counted before the checkpoint must not soon cause another roll-back.
        self.updater.reset()
        self.learning.reset()
        # If the run is interrupted now, it must resume as the new attempt, not repeat the old one.
        self.save(scheduled=False)

    def _check_finite(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise NumericError, on every rank, if a tensor of any rank is not finite."""
        not_finite: list[str] = []
        for name, value in tensors.items():
            is_finite = bool(value.isfinite().all())
            if not is_finite:
                not_finite.append(name)

        # Ranks differ in their rows of a split head, and in BatchNorm's statistics. If only one of
        # them raised, the others would wait for it in the next collective.
        # The message has room for one name, so each rank sends only its first.
        names_of_ranks = self.ranks.gather_objects(not_finite[:1])
        names = list(chain.from_iterable(names_of_ranks))
        if names:
            text = f"step {self.step}: {names[0]} is not finite"
            # Steps are numbered from 0, so the last completed one is `self.step - 1`. The class
            # RollBack (roll_back.py) computes it again to find the cause.
            raise NumericError(text, self.step - 1)

    def _load_latest(self) -> bool:
        """Load the newest checkpoint; return False if there is none."""
        # Rank 0 reads for all: another rank might see an older folder on a network file system.
        root = self.writer.folder
        latest = self.ranks.on_first(lambda: checkpoint.read_latest(root))
        if latest is None:
            return False
        folder, data = latest
        state = checkpoint.load_state(data, where=folder)

        # The file has the rows of all ranks. This rank holds a block of them, [start, end).
        if self.task.split_parameters:
            start_row, end_row = self.task.head.row_range

            def select_rows(all_rows: Tensor) -> Tensor:
                # A copy: a slice would keep the memory of all rows.
                return all_rows[start_row:end_row].clone()

            self._change_rows(state, select_rows)
        self._load(state)
        return True

    def _state(self) -> dict[str, Any]:
        """Return the state of this rank; of a split head, only this rank's rows.

        Every rank must call it, because the sums are added up over the ranks.
        """
        metric_sums = self.ranks.sum(self.sums.sums)
        return {
            "task": self.task.state_dict(),
            "optimizer": self.updater.optimizer.state_dict(),
            "updater": self.updater.state(),
            "sums": metric_sums.tolist(),
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
        # The saved sums are over all ranks, and would else count once per rank: `load` takes them
        # on rank 0 alone, and zeros on the others.
        self.sums.load(state["sums"])
        self.learning.load_state(state["learning"])
        self.attempt = state["attempt"]
        self.step = state["step"]
        self.best = state["best"]
        self.validated = state["validated"]

    def _change_rows(
        self, state: dict[str, Any], change: Callable[[Tensor], Any]
    ) -> None:
        """Replace the rows of a split head in `state` by `change(rows)`.

        The optimizer's values for each weight, such as the momentum, are replaced in the same way.
        change: gathers the rows of all ranks (None on ranks other than 0), or selects this rank's.
        """
        numbers = _parameter_numbers(self.updater.optimizer)
        optimizer_states = state["optimizer"]["state"]

        for name, parameter in self.task.split_parameters.items():
            rows = state["task"][name]
            shape_before = rows.shape
            state["task"][name] = change(rows)
            number = numbers[id(parameter)]
            # Before the first step, the optimizer may have no values yet.
            if number not in optimizer_states:
                continue
            # A copy: `state_dict()` makes new outer dicts, but a parameter's own dict is still that
            # of the optimizer.
            changed_values = dict(optimizer_states[number])
            for key, value in changed_values.items():
                # Momentum and the like have a value per weight; others are single numbers.
                shape = getattr(value, "shape", None)
                if shape == shape_before:
                    changed_values[key] = change(value)
            optimizer_states[number] = changed_values


def _parameter_numbers(optimizer: Optimizer) -> dict[int, int]:
    """Return the key of each parameter in the state of an optimizer, by the parameter's `id`."""
    # Keys are numbers, counted over all groups.
    numbers: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers[id(parameter)] = len(numbers)
    return numbers
