"""The loop, from batches to a trained task. All state is (attempt, epoch, step) and state dicts.

In: a task, batches in order, schedules that are functions of the step. Out: the task, trained;
checkpoints and rows of metrics on the way. Resuming from a checkpoint repeats the run exactly.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speakerlab.batch import Batch
from speakerlab.training.autopsy import examine_step
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.distributed import Ranks, shared_store
from speakerlab.training.guard import NumericError
from speakerlab.training.keeper import Keeper
from speakerlab.training.learning import DivergedError
from speakerlab.training.monitor import Monitor
from speakerlab.training.prefetch import Prefetcher, WaitTeller
from speakerlab.training.rescue import Rescue, is_out_of_memory
from speakerlab.training.schedules import Schedule
from speakerlab.training.signals import Signals, Stopped
from speakerlab.training.task import SpeakerTask, TaskOutput
from speakerlab.training.window import Window, row_of

log = logging.getLogger(__name__)
DRAWS_KEY = 0xD207  # keeps the model's own draws apart from those of the data ...
HEAD_KEY = 0x4EAD  # ... and those of the classes that take part apart from both
MAX_ROLLBACKS = 2
BACK_OFF = 0.5  # of the learning rate, at each


class Trainer:
    """Runs `task` over batches(first step, attempt) until the schedule's last step.

    report: called on rank 0 with what made a run roll back or end; note_memory: when a step did not
    fit.
    """

    def __init__(
        self,
        *,
        task: SpeakerTask,
        keeper: Keeper,
        schedule: Schedule,
        plan: BatchPlan,
        ranks: Ranks,
        batches: Callable[[int, int], Iterable[Batch]],
        throw_away_batch: Batch,
        validate: Callable[[], dict[str, float]] | None,
        report: Callable[[dict[str, Any]], None],
        note_memory: Callable[[], None],
        signals: Signals,
        seed: int,
    ) -> None:
        self.task, self.keeper, self.schedule = task, keeper, schedule
        self.plan, self.ranks, self.batches = plan, ranks, batches
        self.throw_away_batch, self.validate, self.report = throw_away_batch, validate, report
        self.note_memory, self.signals, self.seed = note_memory, signals, seed
        self.updater, self.window = keeper.updater, keeper.window
        self.wait_teller = WaitTeller()
        self.making_gradients_of: int | None = None  # the step, while it lasts
        self.rescue = Rescue(
            shared_store(ranks),
            rank=ranks.rank,
            world_size=ranks.world_size,
            window=self.window.sums.tolist,
            save=self._save_before_step,
            step_at=lambda: self.making_gradients_of,
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
        module = self.ranks.wrap(self.task)
        self._settle_buckets(module)
        while self.step < self.schedule.total_steps:
            try:
                self._run(module, monitor)
            except NumericError as error:
                self._roll_back(error)
        self.keeper.wait()
        return self.step - start_step

    def prefetch(self, start_step: int) -> Prefetcher:
        """The micro-batches of this rank from a step on, ready for the forward pass."""
        return Prefetcher(
            self.task,
            self.batches(start_step, self.keeper.progress.attempt),
            device=self.ranks.device,
            begin=self._begin,
            first=start_step * self.plan.accumulation,
        )

    def run_step(self, module: nn.Module, inputs: Prefetcher) -> None:
        """One optimizer step: forward and backward of each micro-batch, reduce, clip, step."""
        step = self.step
        frozen = step < self.schedule.frozen_steps
        self.updater.guard.before_step()
        self.making_gradients_of = step
        try:
            sums = self.accumulate(module, inputs, self.schedule.margin_at(step), frozen=frozen)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.rescue.leave(step, error)
        self.making_gradients_of = None
        if frozen:  # no gradient, unlike one of zero: no momentum and no weight decay either
            self.task.embedder.zero_grad(set_to_none=True)
        update = self.updater.step(self._lr_at(step))
        self.window.add_crops(sums, update.is_bad)
        if self.ranks.is_first:  # the same on every rank, so counted by one
            self.window.add_step(update.grad_norm, update.is_bad, self.updater.clip_norm)
        self.updater.check(step, update)

    def accumulate(
        self, module: nn.Module, inputs: Prefetcher, margin: float, *, frozen: bool = False
    ) -> Tensor:
        """Gradients of this step's loss, meaned over the global batch, into `.grad`.

        Returns this rank's sums over crops: loss, right ones, crops (the first of `Window.NAMES`).
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
        for index in range(self.plan.accumulation):
            feats_BTF, label_B, silent, *_ = inputs.take()
            last = index == self.plan.accumulation - 1
            with self._reducing(module, now=last):
                output: TaskOutput = module(feats_BTF, label_B, margin, frozen=frozen)
                self.updater.scale.apply(output.loss / self.plan.accumulation).backward()
            inputs.look_ahead()
            rows = len(label_B)
            sums[0] += output.loss.detach() * rows
            sums[1] += output.num_correct
            sums[2] += rows
            self.window.add("silent", silent)
        return sums

    def _run(self, module: nn.Module, monitor: Callable[[int], Monitor]) -> None:
        """Step after step, to the last one or until something is raised."""
        watch = monitor(self.step) if self.ranks.is_first else None
        inputs = self.prefetch(self.step)
        self.window.started_at = time.monotonic()
        try:
            while self.step < self.schedule.total_steps:
                # What any rank wants, known to all at the end of the step.
                wanted = self.ranks.begin_largest([self.signals.number, self._is_time_up()])
                self.run_step(module, inputs)
                self.keeper.progress.step += 1
                self._log(watch, inputs)
                valid_eer = self._validate(watch)
                number, time_is_up = wanted()
                self._checkpoint(asked=bool(number or time_is_up), valid_eer=valid_eer)
                if number and self.step < self.schedule.total_steps:
                    self.keeper.wait()
                    raise Stopped(number, self.step)
        finally:
            inputs.close()
            if watch is not None:
                watch.close()

    def _roll_back(self, error: NumericError) -> None:
        """Find out what was not finite; go back to the last checkpoint, or give up."""
        step, attempt = error.step, self.keeper.progress.attempt
        margin = self.schedule.margin_at(step)
        found = examine_step(
            self.task,
            self.prefetch(step),
            self.plan.accumulation,
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

    def _settle_buckets(self, module: nn.Module) -> None:
        """One pass whose result is thrown away: DDP regroups its gradients after the first.

        Without it the first step after a resume would add up in another order than it did before.
        """
        if not isinstance(module, DistributedDataParallel):
            return
        self.task.train()
        self.updater.guard.before_step()
        batch = self.throw_away_batch
        output: TaskOutput = module(self.task.features(batch), batch.label_B, 0.0)
        output.loss.backward()
        self.updater.guard.restore()
        self.updater.optimizer.zero_grad(set_to_none=True)

    def _reducing(self, module: nn.Module, *, now: bool) -> AbstractContextManager[None]:
        """Gradients are averaged over ranks in the last micro-batch only."""
        is_alone = not isinstance(module, DistributedDataParallel)
        return nullcontext() if is_alone or now else module.no_sync()

    def _begin(self, number: int) -> None:
        """Modes and generators for this rank's micro-batch `number`, counted over all steps.

        Dropout and dither draw from a generator seeded by what they are drawn for.
        """
        step, index = divmod(number, self.plan.accumulation)
        if index == 0:
            self.task.train()
            self.task.head.begin_step(self._key_of(step, HEAD_KEY))
            if step < self.schedule.frozen_steps:
                self.task.embedder.eval()  # BatchNorm keeps its statistics
        micro_batch = index * self.ranks.world_size + self.ranks.rank
        torch.manual_seed(self._key_of(step, micro_batch, DRAWS_KEY))

    def _key_of(self, *numbers: int) -> int:
        """63 bits that are those of this attempt and these numbers alone."""
        key = [self.seed, self.keeper.progress.attempt, *numbers]
        return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1

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
            self._checkpoint(asked=True, valid_eer=None)
            self.keeper.wait()
            raise DivergedError(line)

    def _validate(self, watch: Monitor | None) -> float | None:
        """The EER of this step, where it is due."""
        due = self.step % self.schedule.valid_every_steps == 0
        if self.validate is None or not (due or self.step == self.schedule.total_steps):
            return None
        started_at = time.monotonic()
        values = self.validate()
        if watch is not None:
            watch.valid_row(self.step, values)
        self.window.started_at += time.monotonic() - started_at
        return values["eer"]

    def _checkpoint(self, *, asked: bool, valid_eer: float | None) -> None:
        progress = self.keeper.progress
        best = progress.best_eer
        is_best = valid_eer is not None and (best is None or valid_eer < best)
        if is_best:
            progress.best_eer = valid_eer
        scheduled = self.step % self.schedule.checkpoint_every_steps == 0
        if scheduled and not asked and int(self.updater.guard.in_a_row):
            scheduled = False  # a roll-back is to repeat the bad steps, not to go on after them
        if asked or is_best or scheduled or self.step == self.schedule.total_steps:
            self.keeper.save(scheduled=scheduled, valid_eer=valid_eer)
