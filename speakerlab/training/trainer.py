"""The training loop.

All state is (attempt, step) and state dicts, and every random draw is a function of (seed, attempt,
step, micro-batch), so resuming from a checkpoint repeats the run exactly.
"""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.graphs import GraphedTask
from speakerlab.training.monitor import Monitor
from speakerlab.training.nan_report import examine
from speakerlab.training.progress import DivergedError
from speakerlab.training.rescue import Rescue, is_out_of_memory
from speakerlab.training.run_state import RunState
from speakerlab.training.schedules import Schedule
from speakerlab.training.signals import Signals, Stopped
from speakerlab.training.task import Inputs
from speakerlab.training.update import NumericError

log = logging.getLogger(__name__)
MAX_ROLLBACKS = 2
BACK_OFF = 0.5  # factor on the learning rate at each roll-back
DRAWS_KEY = 0xD207  # separates the model's own draws (dither, dropout) from those of the data ...
HEAD_KEY = 0x4EAD  # ... and from those of the classes that a sampled head uses


@dataclass(eq=False)
class Trainer:
    """Runs a task until the last step of the schedule.

    validation: `run(embedder, ranks, stop)` returns {metric: value}, or None on all ranks if
    `stop()` was true on any.
    """

    exp_dir: Path
    state: RunState
    source: Any  # `read_from(step, attempt)` iterates over this rank's batches
    plan: BatchPlan
    schedule: Schedule
    validation: Any
    monitor: Monitor | None  # only rank 0 has one
    report: Callable[[dict[str, Any]], None]  # takes what was not finite, before a roll-back
    signals: Signals
    crop_samples: int
    seed: int
    graphed: GraphedTask | None = None  # takes micro-batches, except of frozen steps

    def __post_init__(self) -> None:
        state = self.state
        self.task, self.ranks, self.updater = state.task, state.ranks, state.updater
        self.sums, self.learning = state.sums, state.learning
        self.modules = list(self.task.modules())
        self.model: Any = self.task  # DDP's wrapper from `start` on
        self.rescue = Rescue(state, self.exp_dir, self.plan.micro_batch)
        self.inputs: Inputs

    def fit(self) -> int:
        """Resume from the newest checkpoint, train to the end; return the number of steps taken.

        Raises NumericError if roll-backs do not help, DivergedError, OutOfMemoryStop, and Stopped
        after a signal.
        """
        self.start()
        first = self.state.step
        while self.state.step < self.schedule.total_steps or self._is_validation_due():
            try:
                self._run()
            except NumericError as error:
                self._roll_back(error)
        self.state.wait()
        return self.state.step - first

    def start(self) -> None:
        """Resume, and join the ranks."""
        self._log_position("resuming from" if self.state.resume() else "training from")
        self.model = self.ranks.wrap(self.task)
        if self.model is not self.task:
            self._warm_up_ddp()

    def open(self) -> None:
        """Begin to read and to report at the current step."""
        if self.monitor is not None:
            self.monitor.begin(self.state.step)
        self.inputs = self._read_from(self.state.step)
        self.sums.started_at = time.monotonic()

    def close(self) -> None:
        """End what reads ahead; write the last rows."""
        self.inputs.close()
        if self.monitor is not None:
            self.monitor.close()

    def _run(self) -> None:
        self.open()
        try:
            if self.state.step and self._is_validation_due():  # a signal has interrupted it
                valid = self._validate()
                if valid is None:
                    raise Stopped(self._requests()[0], self.state.step)
                self._checkpoint(now=False, valid=valid)
            while self.state.step < self.schedule.total_steps:
                with record_function("step"):
                    self.take_step()
        finally:
            self.close()

    def take_step(self) -> None:
        """Take a step and do what is due after it; raise Stopped if a rank received a signal."""
        self.train_step()
        with record_function("step/host sync/row of metrics"):
            self._log()
        valid = self._validate()
        with record_function("step/host sync/stop requests"):
            number, is_overdue = self._requests()
        self._checkpoint(now=bool(number or is_overdue), valid=valid)
        if number:
            self.state.wait()
            raise Stopped(number, self.state.step)

    def train_step(self) -> None:
        """Take one optimizer step: forward and backward per micro-batch, reduce, clip, step."""
        step, count = self.state.step, self.plan.accumulation
        margin, frozen = self.schedule.margin_at(step), step < self.schedule.frozen_steps
        self._begin_step(step)
        try:
            for index in range(count):
                inputs = next(self.inputs)  # waits for data
                number = index * self.ranks.world_size + self.ranks.rank
                torch.manual_seed(self._key(step, number, DRAWS_KEY))  # for dither and dropout
                # DDP averages the gradients over ranks during the last backward pass.
                is_reduced = index == count - 1 or self.model is self.task
                if self.graphed is not None and not frozen:
                    output = self.graphed(inputs, margin)
                else:
                    with nullcontext() if is_reduced else self.model.no_sync():
                        with record_function("step/forward"):
                            x_B, label_B = inputs.x_B, inputs.batch.label_B
                            how = {"batch": inputs.batch, "frozen": frozen}
                            output = self.model(x_B, label_B, margin, **how)
                        with record_function("step/backward"):
                            self.updater.scale_loss(output.loss / count).backward()
                self.sums.add_micro_batch(output, inputs)
                self._progress(step + (index + 1) / count)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                self.rescue.leave(error)
            self.rescue.follow()
            raise
        self.task.drop_gradients(frozen=frozen)
        with record_function("step/optimizer"):  # unscale, clip, skip if not finite, step
            update = self.updater.step(self._lr_at(step))
            self.task.end_step(update.is_bad)
        self.sums.add_step(update, self.updater.clip_norm)
        with record_function("step/host sync/verdict"):
            self.updater.check(step, update)  # NumericError after too many bad steps
        self.state.step += 1

    def _progress(self, step: float, doing: str = "") -> None:
        if self.monitor is not None and time.monotonic() >= self.monitor.quiet_until:
            self.monitor.progress(step, doing)

    def _begin_step(self, step: int) -> None:
        """Set modes, the classes that a sampled head uses, and what a bad step returns to."""
        for module in self.modules:
            if not module.training:  # setting an attribute of a module takes microseconds
                module.training = True
        if step < self.schedule.frozen_steps:
            self.task.embedder.eval()  # BatchNorm keeps its statistics
        self.task.begin_step(step, self.schedule, self._key(step, HEAD_KEY))
        self.updater.before_step()

    def _key(self, *numbers: int) -> int:
        """Return 63 bits that belong to this attempt and these numbers alone."""
        words = np.random.SeedSequence([self.seed, self.state.attempt, *numbers])
        return int(words.generate_state(1, np.uint64)[0]) >> 1

    def _lr_at(self, step: int) -> float:
        return self.schedule.lr_at(step) * BACK_OFF**self.state.attempt

    def _warm_up_ddp(self) -> None:
        """Throw away one pass, because DDP regroups its gradients after the first.

        The first step after a resume would otherwise add them up in another order than before.
        """
        self.task.train()
        self.updater.before_step()
        device = self.ranks.device
        wave_BS = torch.randn(2 * self.task.crops_each, self.crop_samples, device=device)
        label_B = torch.zeros(len(wave_BS), dtype=torch.int64, device=device)
        self.model(wave_BS, label_B, 0.0).loss.backward()
        self.updater.restore()
        self.task.zero_grad(set_to_none=True)

    def _read_from(self, step: int) -> Inputs:
        batches = self.source.read_from(step, self.state.attempt)
        return Inputs(batches, self.task.augment, device=self.ranks.device)

    def _roll_back(self, error: NumericError) -> None:
        """Report what was not finite; return to the last checkpoint, or give up."""
        step, attempt = error.step, self.state.attempt
        margin, inputs = self.schedule.margin_at(step), self._read_from(step)
        self._begin_step(step)
        found = []
        for index in range(self.plan.accumulation):  # on every rank: norms and heads may be joined
            number = index * self.ranks.world_size + self.ranks.rank
            seed = self._key(step, number, DRAWS_KEY)
            one = examine(self.task, next(inputs), margin, seed=seed)
            found.append({"rank": self.ranks.rank, "index": index, **one})
            self.updater.restore()
        inputs.close()
        every = self.ranks.every(found)
        if self.ranks.is_first:
            facts = {"error": str(error), "step": step, "attempt": attempt, "margin": margin}
            facts |= {"lr": self._lr_at(step), "loss_scale": float(self.updater.loss_scale)}
            self.report({**facts, "micro_batches": sum(every, [])})
        if attempt >= MAX_ROLLBACKS:
            raise error
        self.state.roll_back()
        share = BACK_OFF ** (attempt + 1)
        self._log_position(f"rolled back (new data order, {share:g} of the learning rate) to")

    def _log_position(self, why: str) -> None:
        step, epoch = self.state.step, self.state.step / self.schedule.steps_per_epoch
        log.info("%s step %d of %d (epoch %.2f)", why, step, self.schedule.total_steps, epoch)

    def _requests(self) -> list[int]:
        """Return the signal that some rank received, 0 for none, and whether saving is overdue."""
        overdue = time.monotonic() - self.state.saved_at > self.schedule.checkpoint_seconds
        own = [self.signals.number, int(self.ranks.is_first and overdue)]
        return self.ranks.max(torch.tensor(own)).tolist()

    def _log(self) -> None:
        """Write a row of metrics when due; warn or stop if the model does not learn."""
        step, schedule = self.state.step, self.schedule
        if step % schedule.log_every_steps and step != schedule.total_steps:
            return
        row = self.sums.take_row(step, self.inputs.take_wait_seconds())
        row |= {
            "epoch": round(step / schedule.steps_per_epoch, 3),
            "lr": self._lr_at(step - 1),
            "margin": schedule.margin_at(step - 1),
            "skipped": int(self.updater.skipped),
            "attempt": self.state.attempt,
        }
        if self.updater.scales_loss:
            row["loss_scale"] = float(self.updater.loss_scale)
        row |= self.task.measure(self.ranks)
        if self.ranks.device.type == "cuda":
            row["gpu_memory_mb"] = torch.cuda.max_memory_allocated(self.ranks.device) >> 20
        if self.monitor is not None:
            self.monitor.train_row(step, row)
        line = self.learning.add(step, row)
        if line is not None and self.ranks.is_first:
            log.warning("%s", line)
        if line is not None and self.learning.stop:
            self._checkpoint(now=True, valid=None)
            self.state.wait()
            raise DivergedError(line)

    def _is_validation_due(self) -> bool:
        step = self.state.step
        due = step == self.schedule.total_steps or step % self.schedule.valid_every_steps == 0
        return self.validation is not None and due and self.state.validated != step

    def _validate(self) -> dict[str, float] | None:
        """Return the metric of this step when due; None also if a signal interrupted it."""
        if self.validation is None or not self._is_validation_due():
            return None
        step, started_at = self.state.step, time.monotonic()

        def stop() -> bool:
            self._progress(step, "validation, ")
            return bool(self.signals.number)

        try:
            values = self.validation.run(self.task.embedder, self.ranks, stop)
        except FloatingPointError as error:
            raise NumericError(f"step {step}: {error}", step - 1) from None
        if values is None:
            return None
        self.state.validated = step
        if self.monitor is not None:
            self.monitor.valid_row(step, values)
        self.sums.started_at += time.monotonic() - started_at
        return values

    def _checkpoint(self, *, now: bool, valid: dict[str, float] | None) -> None:
        """Save on schedule, at the best metric so far, after the last step, or `now`."""
        state, schedule = self.state, self.schedule
        value = None if valid is None else valid[state.metric]
        is_best = value is not None and (state.best is None or value < state.best)
        if is_best:
            state.best = value
        scheduled = state.step % schedule.checkpoint_every_steps == 0
        if scheduled and not now and int(self.updater.bad_in_a_row):
            scheduled = False  # a roll-back must repeat the bad steps, not resume after them
        if now or is_best or scheduled or state.step == schedule.total_steps:
            state.save(scheduled=scheduled, valid=valid)
