"""The training loop: steps until the end of the schedule, and the actions after each step.

All state is (attempt, step) and state dicts, and every random draw is a function of (seed,
attempt, step, micro-batch), so resuming from a checkpoint repeats the run exactly.

- step.py takes an optimizer step, then logs, validates, saves and stops when due;
- rescue.py exits with all ranks when one is out of memory;
- roll_back.py returns to the last checkpoint when steps are not finite.
"""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from speakerlab.core.batch import Batch
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.monitor import Monitor
from speakerlab.training.rescue import Rescue
from speakerlab.training.roll_back import RollBack
from speakerlab.training.run_state import RunState
from speakerlab.training.schedules import Schedule
from speakerlab.training.signals import Signals
from speakerlab.training.step import AfterStep, OptimizerStep, Validation
from speakerlab.training.task import Inputs
from speakerlab.training.update import NumericError

log = logging.getLogger(__name__)


class BatchSource(Protocol):
    """Batches of this rank, which can be read from any step on."""

    def read_from(self, step: int, attempt: int) -> Iterator[Batch]:
        """Yield the micro-batches from a step of an attempt on, without end."""
        ...


class Trainer:
    """Training of a task until the last step of the schedule.

    validation: None where no speech is held out. monitor: only rank 0 has one. report: called with
    the findings about bad steps, before a roll-back. crop_samples: samples of a crop.
    crop_targets: see `Inputs`.
    """

    def __init__(
        self,
        exp_dir: Path,
        *,
        state: RunState,
        source: BatchSource,
        plan: BatchPlan,
        schedule: Schedule,
        validation: Validation | None,
        monitor: Monitor | None,
        report: Callable[[dict[str, Any]], None],
        signals: Signals,
        crop_samples: int,
        seed: int,
        crop_targets: Callable[[Batch, Tensor], Batch] | None = None,
    ) -> None:
        self.state = state
        self.task = state.task
        self.ranks = state.ranks
        self.source = source
        self.plan = plan
        self.schedule = schedule
        self.monitor = monitor
        self.crop_samples = crop_samples
        self.crop_targets = crop_targets
        # Micro-batches on the device; read from `open` on, because a roll-back changes their order.
        self.inputs: Inputs

        # All parts share `state`, so that each sees the step that a roll-back returns to.
        self.rescue = Rescue(state, exp_dir, plan.micro_batch)
        self.optimizer_step = OptimizerStep(
            state=state,
            schedule=schedule,
            accumulation=plan.accumulation,
            seed=seed,
            on_failure=self.rescue.handle,
            report_progress=self._report_progress,
        )
        self.after_step = AfterStep(
            state=state,
            schedule=schedule,
            validation=validation,
            monitor=monitor,
            signals=signals,
            lr_at=self.optimizer_step.lr_at,
            report_progress=self._report_progress,
        )
        self.roll_back = RollBack(
            self.optimizer_step, read_from=self._read_from, report=report
        )

    def fit(self) -> int:
        """Resume from the newest checkpoint, train to the end; return the number of steps taken.

        Raises NumericError if roll-backs do not help, DivergedError, OutOfMemoryStop, and Stopped
        after a signal.
        """
        self.start()
        first_step = self.state.step
        while not self._is_finished():
            try:
                self._run()
            except NumericError as error:
                event = self.roll_back.recover(error)
                self._log_position(event)
        # The last checkpoint is written in the background.
        self.state.wait()
        return self.state.step - first_step

    def start(self) -> None:
        """Resume, and join the ranks."""
        is_resumed = self.state.resume()
        self._log_position("resuming from" if is_resumed else "training from")
        # Only now: DDP sends rank 0's weights to the other ranks when it is made.
        model = self.ranks.wrap(self.task)
        self.optimizer_step.model = model
        if model is not self.task:
            self._warm_up_ddp(model)

    def open(self) -> None:
        """Begin to read and to report at the current step."""
        step = self.state.step
        if self.monitor is not None:
            self.monitor.begin(step)
        self.inputs = self._read_from(step)
        # The time before the first step does not count as training.
        self.state.sums.started_at = time.monotonic()

    def close(self) -> None:
        """Stop reading ahead, and write the last rows."""
        self.inputs.close()
        if self.monitor is not None:
            self.monitor.close()

    def take_step(self) -> None:
        """Take a step and the actions after it; raise Stopped if a rank received a signal."""
        self.train_step()
        self.after_step.run(self.inputs.take_wait_seconds)

    def train_step(self) -> None:
        """Take one optimizer step; raise NumericError after too many bad ones in a row."""
        step = self.state.step
        update = self.optimizer_step.take(self.inputs)
        # On a GPU this reads the verdict on the step before, so that the host can run ahead.
        with record_function("step/host sync/verdict"):
            self.state.updater.check(step, update)
        self.state.step = step + 1

    def _run(self) -> None:
        """Train from the current step to the last one."""
        self.open()
        try:
            self.after_step.make_up_for_validation()
            while self.state.step < self.schedule.total_steps:
                with record_function("step"):
                    self.take_step()
        # Also after an error: workers must stop reading, and rows must not be lost.
        finally:
            self.close()

    def _is_finished(self) -> bool:
        # A signal may have interrupted the validation of the last step: it is then still due.
        is_last = self.state.step >= self.schedule.total_steps
        return is_last and not self.after_step.is_validation_due()

    def _read_from(self, step: int) -> Inputs:
        batches = self.source.read_from(step, self.state.attempt)
        return Inputs(
            batches,
            self.task.augment,
            device=self.ranks.device,
            crop_targets=self.crop_targets,
        )

    def _warm_up_ddp(self, model: torch.nn.Module) -> None:
        """Run and discard one pass, because DDP regroups its gradients after the first pass.

        The first step after a resume would otherwise sum them in another order than before.
        """
        updater = self.state.updater
        self.task.train()
        updater.before_step()
        device = self.ranks.device
        # Two utterances: BatchNorm needs more than one value per channel.
        num_crops = 2 * self.task.crops_each
        wave_BS = torch.randn(num_crops, self.crop_samples, device=device)
        label_B = torch.zeros(num_crops, dtype=torch.int64, device=device)
        margin = 0.0
        output = model(wave_BS, label_B, margin)
        output.loss.backward()
        # The pass has changed BatchNorm's statistics and left gradients.
        updater.restore()
        self.task.zero_grad(set_to_none=True)

    def _report_progress(self, step: float, activity: str = "") -> None:
        """Log the position if nothing was logged for a while."""
        if self.monitor is None:
            return
        if time.monotonic() >= self.monitor.quiet_until:
            self.monitor.progress(step, activity)

    def _log_position(self, event: str) -> None:
        step = self.state.step
        epoch = step / self.schedule.steps_per_epoch
        total_steps = self.schedule.total_steps
        log.info("%s step %d of %d (epoch %.2f)", event, step, total_steps, epoch)
