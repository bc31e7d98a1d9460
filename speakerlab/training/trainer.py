"""The loop, from batches to a trained task. All state is (attempt, epoch, step) and state dicts.

In: a task, batches in order, schedules that are functions of the step. Out: the task, trained;
checkpoints and rows of metrics on the way. Resuming from a checkpoint repeats the run exactly.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speakerlab.batch import Batch
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.checkpoint import Checkpoints, load_state
from speakerlab.training.distributed import Ranks
from speakerlab.training.guard import Guard
from speakerlab.training.monitor import Monitor
from speakerlab.training.prefetch import Prefetcher, WaitTeller
from speakerlab.training.task import SpeakerTask, TaskOutput

log = logging.getLogger(__name__)
DRAWS_KEY = 0xD207  # keeps the model's own draws apart from those of the data


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When things happen, in steps, and the two functions of a step."""

    lr_at: Callable[[int], float]
    margin_at: Callable[[int], float]
    total_steps: int
    steps_per_epoch: int
    valid_every_steps: int
    checkpoint_every_steps: int
    log_every_steps: int
    frozen_steps: int = 0  # steps at the start in which only the head learns


class Window:
    """Sums since the last row of metrics; saved, so that a resumed run writes the same rows.

    Crops of skipped steps are left out: their loss may not be a number.
    """

    NAMES = ("loss", "correct", "crops", "silent", "grad_norm", "clipped", "skipped", "steps")

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(self.NAMES), dtype=torch.float64, device=device)
        self.started_at = time.monotonic()

    def add(self, name: str, value: Tensor | float) -> None:
        self.sums[self.NAMES.index(name)] += value


class Trainer:
    """Runs `task` over `batches(start_step)` until the schedule's last step."""

    def __init__(
        self,
        *,
        task: SpeakerTask,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        plan: BatchPlan,
        ranks: Ranks,
        batches: Callable[[int], Iterable[Batch]],
        throw_away_batch: Batch,
        validate: Callable[[], dict[str, float]] | None,
        clip_norm: float,
        seed: int,
    ) -> None:
        self.task, self.optimizer, self.schedule = task, optimizer, schedule
        self.plan, self.ranks, self.batches = plan, ranks, batches
        self.throw_away_batch, self.validate = throw_away_batch, validate
        self.clip_norm, self.seed = clip_norm, seed
        self.parameters = [p for p in task.parameters() if p.requires_grad]
        self.scaler = task.precision.scaler()
        self.guard = Guard(task)
        self.window = Window(ranks.device)
        self.wait_teller = WaitTeller()
        self.attempt, self.step = 0, 0
        self.best_eer: float | None = None

    def fit(
        self, checkpoints: Checkpoints, monitor: Callable[[int], Monitor], facts: dict[str, Any]
    ) -> int:
        """Resume from the newest checkpoint, if any, and train to the end; the steps taken.

        monitor: makes rank 0's monitor for a start step. facts: plain values saved along.
        """
        self._resume(checkpoints)
        start_step = self.step
        watch = monitor(self.step) if self.ranks.is_first else None
        module = self.ranks.wrap(self.task)
        self._settle_buckets(module)
        inputs = self.prefetch(self.step)
        self.window.started_at = time.monotonic()
        while self.step < self.schedule.total_steps:
            self.run_step(module, inputs)
            self.step += 1
            self._log(watch, inputs)
            self._validate(watch)
            self._checkpoint(checkpoints, facts)
        if watch is not None:
            watch.close()
        return self.step - start_step

    def prefetch(self, start_step: int) -> Prefetcher:
        """The micro-batches of this rank from a step on, ready for the forward pass."""
        return Prefetcher(
            self.task,
            self.batches(start_step),
            device=self.ranks.device,
            begin=self._begin,
            first=start_step * self.plan.accumulation,
        )

    def run_step(self, module: nn.Module, inputs: Prefetcher) -> None:
        """One optimizer step: forward and backward of each micro-batch, reduce, clip, step."""
        lr = self.schedule.lr_at(self.step)
        margin = self.schedule.margin_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        frozen = self.step < self.schedule.frozen_steps
        self.guard.before_step()
        sums = self.accumulate(module, inputs, margin, frozen=frozen)
        if frozen:  # no gradient, unlike one of zero: no momentum and no weight decay either
            self.task.embedder.zero_grad(set_to_none=True)
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.clip_norm).item()
        accepted = self.guard.accepts(norm, self.step)
        if accepted:
            self.scaler.step(self.optimizer)
            self.window.sums[: len(sums)] += sums
        if self.ranks.is_first:  # the same on every rank, so counted by one
            self.window.add("grad_norm", norm if accepted else 0.0)
            self.window.add("clipped", accepted and norm > self.clip_norm)
            self.window.add("skipped", not accepted)
            self.window.add("steps", 1)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate(
        self, module: nn.Module, inputs: Prefetcher, margin: float, *, frozen: bool = False
    ) -> Tensor:
        """Gradients of this step's loss, meaned over the global batch, into `.grad`.

        Returns this rank's sums over crops: loss, right ones, crops (the first of `Window.NAMES`).
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
        for index in range(self.plan.accumulation):
            feats_BTF, label_B, silent, _ = inputs.take()
            last = index == self.plan.accumulation - 1
            with self._reducing(module, now=last):
                output: TaskOutput = module(feats_BTF, label_B, margin, frozen=frozen)
                self.scaler.scale(output.loss / self.plan.accumulation).backward()
            inputs.look_ahead()
            rows = len(label_B)
            sums[0] += output.loss.detach() * rows
            sums[1] += output.num_correct
            sums[2] += rows
            self.window.add("silent", silent)
        return sums

    def state(self) -> dict[str, Any]:
        """All that a resume needs; identical on every rank but for `window`, summed over ranks."""
        return {
            "task": self.task.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "window": self.ranks.sum(self.window.sums).tolist(),
            "attempt": self.attempt,
            "step": self.step,
            "skipped": self.guard.skipped,
            "best_eer": self.best_eer,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""
        self.task.load_state_dict(state["task"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        sums = torch.tensor(state["window"], dtype=torch.float64)
        self.window.sums.copy_(sums if self.ranks.is_first else torch.zeros_like(sums))
        self.attempt, self.step = state["attempt"], state["step"]
        self.guard.skipped, self.best_eer = state["skipped"], state["best_eer"]

    def _resume(self, checkpoints: Checkpoints) -> None:
        """Rank 0 reads the newest checkpoint and hands it to the others."""
        data = self.ranks.on_first(checkpoints.read_latest)
        if data is None:
            return
        self.load_state(load_state(data))
        epoch = self.step / self.schedule.steps_per_epoch
        log.info(
            "resuming from step %d of %d (epoch %.2f)",
            self.step,
            self.schedule.total_steps,
            epoch,
        )

    def _settle_buckets(self, module: nn.Module) -> None:
        """One pass whose result is thrown away: DDP regroups its gradients after the first.

        Without it the first step after a resume would add up in another order than it did before.
        """
        if not isinstance(module, DistributedDataParallel):
            return
        self.task.train()
        self.guard.before_step()
        batch = self.throw_away_batch
        output: TaskOutput = module(self.task.features(batch), batch.label_B, 0.0)
        output.loss.backward()
        self.guard.restore()
        self.optimizer.zero_grad(set_to_none=True)

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
            if step < self.schedule.frozen_steps:
                self.task.embedder.eval()  # BatchNorm keeps its statistics
        micro_batch = index * self.ranks.world_size + self.ranks.rank
        key = [self.seed, self.attempt, step, micro_batch, DRAWS_KEY]
        words = np.random.SeedSequence(key).generate_state(1, np.uint64)
        torch.manual_seed(int(words[0]) >> 1)

    def _log(self, watch: Monitor | None, inputs: Prefetcher) -> None:
        if self.step % self.schedule.log_every_steps and self.step != self.schedule.total_steps:
            return
        sums = dict(zip(Window.NAMES, self.ranks.sum(self.window.sums).tolist()))
        seconds = time.monotonic() - self.window.started_at
        wait = inputs.take_wait_seconds()
        self.wait_teller.add(self.step, wait, seconds)
        self.window = Window(self.ranks.device)
        if watch is None:
            return
        steps = sums["steps"]
        watch.train_row(
            self.step,
            {
                "epoch": round(self.step / self.schedule.steps_per_epoch, 3),
                "loss": round(sums["loss"] / max(sums["crops"], 1), 6),
                "accuracy": round(sums["correct"] / max(sums["crops"], 1), 6),
                "lr": self.schedule.lr_at(self.step - 1),
                "margin": self.schedule.margin_at(self.step - 1),
                "grad_norm": round(sums["grad_norm"] / max(steps - sums["skipped"], 1), 6),
                "clipped": sums["clipped"] / steps,
                "skipped": self.guard.skipped,
                "silent": int(sums["silent"]),
                "crops_per_second": round(sums["crops"] / seconds, 1),
                "data_wait": round(wait / seconds, 4),
            },
        )

    def _validate(self, watch: Monitor | None) -> None:
        due = self.step % self.schedule.valid_every_steps == 0
        if self.validate is None or not (due or self.step == self.schedule.total_steps):
            return
        started_at = time.monotonic()
        values = self.ranks.on_first(self.validate)
        self.window.started_at += time.monotonic() - started_at
        if self.best_eer is None or values["eer"] < self.best_eer:
            self.best_eer = values["eer"]
        if watch is not None:
            watch.valid_row(self.step, values)

    def _checkpoint(self, checkpoints: Checkpoints, facts: dict[str, Any]) -> None:
        due = self.step % self.schedule.checkpoint_every_steps == 0
        if due or self.step == self.schedule.total_steps:
            state = {**self.state(), **facts}
            self.ranks.on_first(lambda: str(checkpoints.save(self.step, state)))
