"""One step of a training: the optimizer step, and the actions after it.

`OptimizerStep`: forward and backward of the micro-batches, then the update. `AfterStep`: a row of
metrics, a validation, a checkpoint, a stop.

Every random draw of the model is a function of (seed, attempt, step, micro-batch). A step can
therefore be computed again: after a resume, or to find what was not finite.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

from speakerlab.training.distributed import Ranks
from speakerlab.training.monitor import Monitor
from speakerlab.training.progress import DivergedError
from speakerlab.training.run_state import RunState
from speakerlab.training.schedules import Schedule
from speakerlab.training.signals import Signals, Stopped
from speakerlab.training.task import MicroBatch
from speakerlab.training.update import NumericError, Update

log = logging.getLogger(__name__)
BACK_OFF = 0.5  # factor on the learning rate at each roll-back

# Parts of the seeds of two streams of random numbers: dither and dropout in the model, and the
# classes that a sampled head draws. They keep the two seeds different, or else the streams could be
# correlated. The values are arbitrary, but other values would change the results of every run.
MODEL_KEY = 0xD207
HEAD_KEY = 0x4EAD


class OptimizerStep:
    """Takes the optimizer step with the number `state.step`, which the trainer increases.

    accumulation: micro-batches of a step on this rank. on_failure: called with an error of loading
    data or of a forward or backward pass; it may exit, otherwise the error is raised again.
    report_progress: called after each micro-batch with the number of completed steps, which grows
    by 1 / accumulation per micro-batch.
    """

    def __init__(
        self,
        *,
        state: RunState,
        schedule: Schedule,
        accumulation: int,
        seed: int,
        on_failure: Callable[[RuntimeError | MemoryError], None] = lambda error: None,
        report_progress: Callable[[float], None] = lambda step: None,
    ) -> None:
        self.state = state
        self.task = state.task
        self.updater = state.updater
        self.schedule = schedule
        self.accumulation = accumulation
        self.seed = seed
        self.on_failure = on_failure
        self.report_progress = report_progress
        # The module that computes the loss: the task. Where several ranks train, `Trainer.start`
        # sets it to DDP around the task, once the weights are loaded.
        self.model: Any = state.task
        # Listed once, because walking through the tree of modules takes time in every step. Some
        # are never in training mode: a pretrained model sets the mode of its parts itself.
        state.task.train()
        self.modules: list[nn.Module] = []
        for module in state.task.modules():
            if module.training:
                self.modules.append(module)

    def take(self, micro_batches: Iterator[MicroBatch]) -> Update:
        """Take one step: forward and backward per micro-batch, then the update."""
        step = self.state.step
        lr = self.lr_at(step)
        margin = self.schedule.margin_at(step)
        frozen = step < self.schedule.frozen_steps  # only the head learns
        self.begin(step)

        # Each backward pass adds to the gradients, which `updater.step` cleared at its end.
        try:
            for index in range(self.accumulation):
                # Waits for data: waves (B, S) or stored features (B, T, F) in `micro_batch.x_B`; in
                # `micro_batch.batch` what the loader read: labels, positions and draws.
                micro_batch = next(micro_batches)
                seed = self.model_seed(step, index)
                torch.manual_seed(seed)

                with self._gradient_exchange(index):
                    with record_function("step/forward"):
                        output = self.model(
                            micro_batch.x_B,
                            micro_batch.batch.label_B,
                            margin,
                            batch=micro_batch.batch,  # for the draws of SpecAugment
                            frozen=frozen,
                        )
                    with record_function("step/backward"):
                        # A mean over all micro-batches, as if they were one batch.
                        loss = output.loss / self.accumulation
                        self.updater.scale_loss(loss).backward()

                self.state.sums.add_micro_batch(output, micro_batch)
                done = (index + 1) / self.accumulation  # share of this step
                self.report_progress(step + done)
        # The update is outside of this `try`: `on_failure` needs the weights from before the step,
        # which an update changes.
        except (RuntimeError, MemoryError) as error:
            self.on_failure(error)
            raise

        # Parameters that do not learn in this step lose their gradients, so that the optimizer
        # leaves them alone.
        self.task.drop_gradients(frozen=frozen)
        with record_function("step/optimizer"):
            # Unscales and clips the gradients; skips the step if they are not finite.
            update = self.updater.step(lr)
            # In self-supervised training, moves the teacher, unless the step was bad.
            self.task.end_step(is_bad=update.is_bad)
        self.state.sums.add_step(update, self.updater.clip_norm)
        return update

    def begin(self, step: int) -> None:
        """Set modes, draw the classes of a sampled head, save BatchNorm's statistics."""
        # `task.train()` would set the mode of hundreds of modules, which takes microseconds each,
        # although nearly all are in training mode already. So only the others are set.
        for module in self.modules:
            if not module.training:
                module.training = True
        # In training mode, BatchNorm would change the statistics of a frozen embedder.
        if step < self.schedule.frozen_steps:
            self.task.embedder.eval()
        head_key = self._key(step, HEAD_KEY)
        self.task.begin_step(step, self.schedule, head_key)
        # Saves BatchNorm's statistics, which are put back if the step turns out to be bad.
        self.updater.before_step()

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, lowered by each roll-back so far."""
        factor = BACK_OFF**self.state.attempt
        return self.schedule.lr_at(step) * factor

    def model_seed(self, step: int, index: int) -> int:
        """Return the seed of dither and dropout in a micro-batch of this rank."""
        ranks = self.state.ranks
        # Counted over all ranks: 2 ranks with 1 micro-batch each draw the same numbers as 1 rank
        # with 2 micro-batches.
        number = index * ranks.world_size + ranks.rank
        return self._key(step, number, MODEL_KEY)

    def _key(self, *numbers: int) -> int:
        """Return a hash of the run's seed, the attempt and `numbers`, from 0 to 2**63 - 1."""
        sequence = np.random.SeedSequence([self.seed, self.state.attempt, *numbers])
        (hash_64_bits,) = sequence.generate_state(1, np.uint64)
        # Without the lowest bit, it fits into a signed integer of 64 bits.
        return int(hash_64_bits) >> 1

    def _gradient_exchange(self, index: int) -> AbstractContextManager[None]:
        """Let DDP average the gradients over the ranks in the last backward pass only.

        Gradients add up on each rank before, so that a step sends them once.
        """
        is_last = index == self.accumulation - 1
        is_ddp = self.model is not self.task
        if is_last or not is_ddp:
            return nullcontext()
        return self.model.no_sync()


class Validation(Protocol):
    """Computes metrics of an embedder on held-out speech (see experiments/validation.py)."""

    def run(
        self, embedder: Any, ranks: Ranks, stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Return {metric: value}; None on all ranks if `stop()` was true on any.

        Raises FloatingPointError, on every rank, for embeddings that are not finite.
        """
        ...


class Requests(NamedTuple):
    """Requests of any rank after a step."""

    signal_number: int  # a rank received it; 0 for none
    is_save_overdue: bool


class AfterStep:
    """Actions after a step: logs, validates, saves and stops. No other code decides when.

    validation: None where no speech is held out. monitor: only rank 0 has one. lr_at: the
    learning rate of a step.
    """

    def __init__(
        self,
        *,
        state: RunState,
        schedule: Schedule,
        validation: Validation | None,
        monitor: Monitor | None,
        signals: Signals,
        lr_at: Callable[[int], float],
        report_progress: Callable[[float, str], None],
    ) -> None:
        self.state = state
        self.schedule = schedule
        self.validation = validation
        self.monitor = monitor
        self.signals = signals
        self.lr_at = lr_at
        self.report_progress = report_progress

    def run(self, take_wait_seconds: Callable[[], float]) -> None:
        """Take the actions that are due; raise Stopped, with the state saved, after a signal.

        take_wait_seconds: returns how long training waited for data since the last call. It is a
        function, because measuring this waits for a GPU, and is done only if a row is due.
        """
        with record_function("step/host sync/row of metrics"):
            if self._is_row_due():
                wait_seconds = take_wait_seconds()
                self._write_row(wait_seconds)
        metrics = None
        if self.is_validation_due():
            metrics = self.validate()
        # Gathered after the validation, because a signal may have interrupted it.
        with record_function("step/host sync/stop requests"):
            requests = self._gather_requests()
        has_request = bool(requests.signal_number or requests.is_save_overdue)
        self.save_if_due(now=has_request, metrics=metrics)
        # A run that is stopped must first have its checkpoint on disk.
        if requests.signal_number:
            self.state.wait()
            raise Stopped(requests.signal_number, self.state.step)

    def make_up_for_validation(self) -> None:
        """Validate the step of the resumed checkpoint, if a signal interrupted its validation."""
        # Step 0 means a new run: nothing was interrupted.
        if not self.state.step or not self.is_validation_due():
            return
        metrics = self.validate()
        if metrics is None:
            # The state has not changed since the checkpoint: there is nothing to save.
            requests = self._gather_requests()
            raise Stopped(requests.signal_number, self.state.step)
        self.save_if_due(now=False, metrics=metrics)

    def is_validation_due(self) -> bool:
        """Return whether the current step must be validated and has not been."""
        if self.validation is None:
            return False
        step = self.state.step
        is_last = step == self.schedule.total_steps
        is_due = is_last or step % self.schedule.valid_every_steps == 0
        # A run may resume at a step that it validated before it was interrupted.
        return is_due and self.state.validated != step

    def validate(self) -> dict[str, float] | None:
        """Return and log the metrics of this step; None if a signal interrupted it."""
        assert self.validation is not None
        state = self.state
        step = state.step
        started_at = time.monotonic()

        def is_stopped() -> bool:
            self.report_progress(step, "validation, ")
            return bool(self.signals.number)

        embedder = state.task.embedder
        try:
            metrics = self.validation.run(embedder, state.ranks, is_stopped)
        except FloatingPointError as error:
            # The last step, which changed the weights, is `step - 1`.
            raise NumericError(f"step {step}: {error}", step - 1) from None
        if metrics is None:
            return None
        state.validated = step
        if self.monitor is not None:
            self.monitor.valid_row(step, metrics)
        # The speed in the next row is crops over the time since `sums.started_at`. Validation must
        # not count in this time, so it seems to begin later.
        seconds = time.monotonic() - started_at
        state.sums.started_at += seconds
        return metrics

    def save_if_due(self, *, now: bool, metrics: dict[str, float] | None) -> None:
        """Save on schedule, at the best metric so far, after the last step, or `now`.

        metrics: of the validation of this step; None if there was none.
        """
        state = self.state
        is_best = metrics is not None and self._note_if_best(metrics[state.metric])
        is_scheduled = self._is_checkpoint_scheduled(saves_anyway=now)
        is_last = state.step == self.schedule.total_steps
        if now or is_best or is_scheduled or is_last:
            state.save(scheduled=is_scheduled, valid=metrics)

    def _note_if_best(self, value: float) -> bool:
        """Return whether the metric is the lowest so far, and if so, remember it."""
        best = self.state.best
        is_best = best is None or value < best
        if is_best:
            self.state.best = value
        return is_best

    def _is_checkpoint_scheduled(self, *, saves_anyway: bool) -> bool:
        """Return whether a checkpoint of this step is one of the scheduled ones.

        saves_anyway: the step is saved for another reason, too.
        """
        if self.state.step % self.schedule.checkpoint_every_steps:
            return False
        # Bad steps cannot prevent this checkpoint, so they are not counted: to read their number
        # would wait for a GPU.
        if saves_anyway:
            return True
        # After a bad step, a scheduled checkpoint is left out: a roll-back should return to a
        # checkpoint from before the bad steps.
        has_bad_steps = bool(int(self.state.updater.bad_in_a_row))
        return not has_bad_steps

    def _is_row_due(self) -> bool:
        step = self.state.step
        is_last = step == self.schedule.total_steps
        return is_last or step % self.schedule.log_every_steps == 0

    def _write_row(self, wait_seconds: float) -> None:
        """Write a row of metrics; warn or stop if the model does not learn."""
        state = self.state
        schedule = self.schedule
        step = state.step
        row = state.sums.take_row(step, wait_seconds)
        epoch = step / schedule.steps_per_epoch
        row["epoch"] = round(epoch, 3)
        # Steps are numbered from 0, and `step` steps are complete: the last one is `step - 1`.
        row["lr"] = self.lr_at(step - 1)
        row["margin"] = schedule.margin_at(step - 1)
        row["skipped"] = int(state.updater.skipped)
        row["attempt"] = state.attempt
        if state.updater.scales_loss:
            row["loss_scale"] = float(state.updater.loss_scale)
        # Metrics of the task, such as the effective rank of the embeddings; a collective.
        row |= state.task.measure(state.ranks)
        device = state.ranks.device
        if device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(device)
            row["gpu_memory_mb"] = peak_bytes >> 20
        if self.monitor is not None:
            self.monitor.train_row(step, row)
        self._judge(row)

    def _judge(self, row: dict[str, Any]) -> None:
        """Warn if the model does not learn; if so configured, save and stop."""
        state = self.state
        # A row has sums over all ranks, so every rank finds the same problem.
        problem = state.learning.add(state.step, row)
        if problem is None:
            return
        if state.ranks.is_first:
            log.warning("%s", problem)
        if state.learning.stop:
            self.save_if_due(now=True, metrics=None)
            state.wait()
            raise DivergedError(problem)

    def _gather_requests(self) -> Requests:
        """Return the requests of any rank; the result is the same on all ranks."""
        state = self.state
        seconds = time.monotonic() - state.saved_at
        # Clocks differ between ranks: rank 0 decides when a checkpoint is overdue.
        is_overdue = False
        if state.ranks.is_first:
            is_overdue = seconds > self.schedule.checkpoint_seconds
        # A signal may reach one rank only. Saving and stopping are collective, so all ranks must
        # take the same decision in the same step. The tensor is on the CPU and travels by gloo, so
        # that nothing waits for a GPU.
        rank_requests = torch.tensor([self.signals.number, int(is_overdue)])
        requests = state.ranks.max(rank_requests)
        signal_number, overdue = requests.tolist()
        return Requests(signal_number, is_save_overdue=bool(overdue))
