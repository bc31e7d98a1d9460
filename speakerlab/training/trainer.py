"""The loop, from batches to a trained task. All state is (attempt, epoch, step) and state dicts.

In: what makes gradients, schedules that are functions of the step. Out: the task, trained;
checkpoints and rows of metrics on the way. Resuming from a checkpoint repeats the run exactly.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from speakerlab.core.regions import region
from speakerlab.training.distributed import shared_store
from speakerlab.training.gradients import Gradients
from speakerlab.training.guard import NumericError
from speakerlab.training.learning import DivergedError
from speakerlab.training.metric_sums import Window, row_of
from speakerlab.training.monitor import Monitor
from speakerlab.training.nan_report import examine_step
from speakerlab.training.prefetch import Prefetcher, WaitTeller
from speakerlab.training.rescue import Rescue, is_out_of_memory
from speakerlab.training.run_state import Keeper
from speakerlab.training.schedules import Schedule
from speakerlab.training.signals import Signals, Stopped

log = logging.getLogger(__name__)
MAX_ROLLBACKS = 2
BACK_OFF = 0.5  # of the learning rate, at each


class Trainer:
    """Runs a task until the schedule's last step.

    validate: gives the keeper's figure by name, the EER say; its argument says, now and then, that
    there is no time: then None, on all ranks. report: called on rank 0 with what made a run roll
    back or end; note_memory: when a step did not fit.
    """

    def __init__(
        self,
        *,
        gradients: Gradients,
        keeper: Keeper,
        schedule: Schedule,
        validate: Callable[[Callable[[], bool]], dict[str, float] | None] | None,
        report: Callable[[dict[str, Any]], None],
        note_memory: Callable[[], None],
        signals: Signals,
    ) -> None:
        self.gradients, self.keeper, self.schedule = gradients, keeper, schedule
        self.validate, self.report, self.note_memory = validate, report, note_memory
        self.signals, self.ranks = signals, keeper.ranks
        self.updater, self.window = keeper.updater, keeper.window
        self.wait_teller = WaitTeller()
        self.before_step: Callable[[int], None] = lambda _step: None  # told its number, every rank
        self.rescue = Rescue(
            shared_store(self.ranks),
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            device=self.ranks.device,
            window=self.window.sums.tolist,
            save=self._save_before_step,
            step_at=lambda: gradients.at,
        )

    @property
    def step(self) -> int:
        """Steps that are done, and the number of the next."""
        return self.keeper.progress.step

    def fit(self, monitor: Callable[[int], Monitor]) -> int:
        """Resume from the newest checkpoint, if any, and train to the end; the steps taken.

        monitor: makes rank 0's monitor for a start step. Raises NumericError where nothing helps,
        DivergedError, Stopped after a signal, OutOfMemoryStop.
        """
        if self.keeper.resume():
            self._tell_where("resuming from")
        start_step = self.step
        self.gradients.join(self.updater.guard)
        while self.step < self.schedule.total_steps or self._is_validation_due():
            try:
                self._run(monitor)
            except NumericError as error:
                self._roll_back(error)
        self.keeper.wait()
        return self.step - start_step

    def inputs(self, start_step: int) -> Prefetcher:
        """The micro-batches of this rank from a step on, of this attempt."""
        return self.gradients.inputs(start_step, self.keeper.progress.attempt)

    def run_step(self, inputs: Prefetcher) -> None:
        """One optimizer step: forward and backward of each micro-batch, reduce, clip, step."""
        step, margin = self.step, self.schedule.margin_at(self.step)
        self.updater.guard.before_step()
        try:
            scaled = self.updater.scale.apply
            sums = self.gradients.make(step, inputs, margin=margin, scaled=scaled)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.rescue.leave(step, error)
        with region("step/optimizer"):
            update = self.updater.step(self._lr_at(step))
        self.window.add_crops(sums, update.is_bad)
        if self.ranks.is_first:  # the same on every rank, so counted by one
            self.window.add_step(update.grad_norm, update.is_bad, self.updater.clip_norm)
        with region("step/host sync/verdict"):
            self.updater.check(step, update)

    def _run(self, monitor: Callable[[int], Monitor]) -> None:
        """Step after step, to the last one or until something is raised."""
        watch = monitor(self.step) if self.ranks.is_first else None
        inputs = self.inputs(self.step)
        self.window.started_at = time.monotonic()
        try:
            # A run may have been stopped in the midst of its validation.
            valid = self._validate(watch) if self.step else None
            if valid is not None:
                self._checkpoint(asked=False, valid=valid)
            elif self.step and self._is_validation_due():  # and is asked to again
                raise Stopped(self._signal(), self.step)
            while self.step < self.schedule.total_steps:
                self.before_step(self.step)
                with region("step"):
                    self._take_step(watch, inputs)
        finally:
            inputs.close()
            if watch is not None:
                watch.close()

    def _take_step(self, watch: Monitor | None, inputs: Prefetcher) -> None:
        """A step and all that is due after it; raises Stopped where a rank is asked to leave."""
        # What any rank wants, known to all at the end of the step.
        with region("step/host sync/wishes of ranks"):
            wanted = self.ranks.begin_largest([self.signals.number, self._is_time_up()])
        self.run_step(inputs)
        self.keeper.progress.step += 1
        with region("step/host sync/row of metrics"):
            self._log(watch, inputs)
        valid = self._validate(watch)
        with region("step/host sync/wishes of ranks"):
            number, time_is_up = wanted()
        if self._is_validation_due():  # it has just been left
            number = self._signal()
        self._checkpoint(asked=bool(number or time_is_up), valid=valid)
        if number:
            self.keeper.wait()
            raise Stopped(number, self.step)

    def _roll_back(self, error: NumericError) -> None:
        """Find out what was not finite; go back to the last checkpoint, or give up."""
        step, attempt = error.step, self.keeper.progress.attempt
        margin = self.schedule.margin_at(step)
        found = examine_step(
            self.gradients.task,
            self.inputs(step),
            self.gradients.plan.accumulation,
            margin=margin,
            guard=self.updater.guard,
        )
        micro_batches = self.ranks.every([{"rank": self.ranks.rank, **one} for one in found])
        if self.ranks.is_first:
            facts = {"error": str(error), "step": step, "attempt": attempt, "margin": margin}
            facts |= {"lr": self._lr_at(step), "loss_scale": float(self.updater.scale.scale)}
            self.report({**facts, "micro_batches": [one for ones in micro_batches for one in ones]})
        if attempt >= MAX_ROLLBACKS:
            raise error
        self.keeper.roll_back()
        share = BACK_OFF ** (attempt + 1)
        self._tell_where(f"rolled back: another order, {share:g} of the learning rate, from")

    def _signal(self) -> int:
        """The signal that some rank was sent, known to all; 0 for none."""
        return self.ranks.begin_largest([self.signals.number])()[0]

    def _lr_at(self, step: int) -> float:
        return self.schedule.lr_at(step) * BACK_OFF**self.keeper.progress.attempt

    def _save_before_step(self, sums: list[float]) -> None:
        """What `rescue` calls, possibly from its thread."""
        if self.ranks.is_first:
            self.note_memory()
        self.keeper.save_before_step(sums)

    def _tell_where(self, why: str) -> None:
        epoch = self.step / self.schedule.steps_per_epoch
        log.info("%s step %d of %d (epoch %.2f)", why, self.step, self.schedule.total_steps, epoch)

    def _is_time_up(self) -> int:
        """Whether rank 0 saved so long ago that it is due again."""
        age = time.monotonic() - self.keeper.saved_at
        return int(self.ranks.is_first and age > self.schedule.checkpoint_seconds)

    def _log(self, watch: Monitor | None, inputs: Prefetcher) -> None:
        if self.step % self.schedule.log_every_steps and self.step != self.schedule.total_steps:
            return
        sums: dict[str, float] = dict(zip(Window.NAMES, self.ranks.sum(self.window.sums).tolist()))
        seconds = time.monotonic() - self.window.started_at
        wait = inputs.take_wait_seconds()
        self.wait_teller.add(self.step, wait, seconds)
        self.window.reset()
        row, step, progress = row_of(sums, seconds=seconds), self.step - 1, self.keeper.progress
        margin = self.schedule.margin_at(step)
        row |= {
            "epoch": round(self.step / self.schedule.steps_per_epoch, 3),
            "lr": self._lr_at(step),
            "margin": margin,
            "skipped": int(self.updater.guard.skipped),
            "attempt": progress.attempt,
            "data_wait": round(wait / seconds, 4),
        }
        if self.updater.scale.enabled:
            row["loss_scale"] = float(self.updater.scale.scale)
        if self.ranks.device.type == "cuda":
            row["gpu_memory_mb"] = torch.cuda.max_memory_allocated(self.ranks.device) >> 20
        if watch is not None:
            watch.train_row(self.step, row)
        if sums["crops"]:
            self._judge_learning(row["loss"], row["accuracy"], margin)

    def _judge_learning(self, loss: float, accuracy: float, margin: float) -> None:
        """Warn, on rank 0, or stop, on all, where the loss says that nothing is learned."""
        learning = self.keeper.learning
        line = learning.add(self.step, loss=loss, accuracy=accuracy, margin=margin)
        if line is None:
            return
        if self.ranks.is_first:
            log.warning("%s", line)
        if learning.stop:
            self._checkpoint(asked=True, valid=None)
            self.keeper.wait()
            raise DivergedError(line)

    def _validate(self, watch: Monitor | None) -> dict[str, float] | None:
        """The figures of this step, where due; None too where the run is asked to leave."""
        if self.validate is None or not self._is_validation_due():
            return None
        started_at = time.monotonic()
        try:
            values = self.validate(lambda: bool(self.signals.number))
        except FloatingPointError as error:
            raise NumericError(f"step {self.step}: {error}", self.step - 1) from None
        if values is None:
            return None
        self.keeper.progress.validated = self.step
        if watch is not None:
            watch.valid_row(self.step, values)
        self.window.started_at += time.monotonic() - started_at
        return values

    def _is_validation_due(self) -> bool:
        """At the end of this step, and not done yet."""
        is_last = self.step == self.schedule.total_steps
        due = is_last or self.step % self.schedule.valid_every_steps == 0
        return self.validate is not None and due and self.keeper.progress.validated != self.step

    def _checkpoint(self, *, asked: bool, valid: dict[str, float] | None) -> None:
        progress = self.keeper.progress
        best, now = progress.best, None if valid is None else valid[self.keeper.figure]
        is_best = now is not None and (best is None or now < best)
        if is_best:
            progress.best = now
        scheduled = self.step % self.schedule.checkpoint_every_steps == 0
        if scheduled and not asked and int(self.updater.guard.in_a_row):
            scheduled = False  # a roll-back is to repeat the bad steps, not to go on after them
        if asked or is_best or scheduled or self.step == self.schedule.total_steps:
            self.keeper.save(scheduled=scheduled, valid=valid)
