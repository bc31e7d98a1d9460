"""Metrics of a training, summed on the device between two rows, and a check of the learning.

A problem is reported if it lasts for `PATIENCE_STEPS` steps in a row after the warm-up:
- does not learn: loss and accuracy stay near the values of guessing, where the loss is ln(number of
  classes);
- diverges: the loss is three times its minimum at this margin (a larger margin raises the loss);
- collapses, in self-supervised training: all embeddings are alike, or all choose one prototype.
"""

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from speakerlab.training.distributed import Ranks
from speakerlab.training.task import MicroBatch, TaskOutput
from speakerlab.training.update import Update

log = logging.getLogger(__name__)
MAX_WAIT = 0.2  # share of the time that training may wait for data before a warning
WAIT_SECONDS = 30.0  # the share is taken over this time
WARNED_SECONDS = 600.0  # and over this time after a warning

# Signs that a model does not learn.
PATIENCE_STEPS = 1000
GUESSING_SHARE = 0.9  # of ln(classes), the loss of a model that guesses
GUESSING_ACCURACY = 0.1
DIVERGED_TIMES = 3.0
COLLAPSED_RANK = 2.0
LOWEST_LOSS = 0.1  # below it, three times as much is noise


class MetricSums:
    """Sums since the last row; saved with the run, so that a resumed run writes the same rows.

    The crops of bad steps are left out, because their loss may be NaN.
    """

    CROP_NAMES = ("loss", "correct", "crops", "silent")  # sums over crops
    STEP_NAMES = ("grad_norm", "clipped", "skipped", "steps")  # sums over steps
    NAMES = CROP_NAMES + STEP_NAMES

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        # On the device, so that adding to them does not wait for it. In fp64, so that long sums
        # lose no digits.
        self.sums = torch.zeros(
            len(self.NAMES),
            dtype=torch.float64,
            device=ranks.device,
        )
        # Views of the two parts of `sums`.
        num_crop_sums = len(self.CROP_NAMES)
        self.sums_of_crops = self.sums[:num_crop_sums]
        self.sums_of_steps = self.sums[num_crop_sums:]
        # The crops of the current step wait here until the step is known to be good or bad.
        self.step_sums = torch.zeros_like(self.sums_of_crops)
        self.started_at = time.monotonic()

        # Waiting time and total time since the last check of their ratio, and the total time after
        # which it is checked again.
        self.wait_seconds = 0.0
        self.seconds = 0.0
        self.judged_seconds = WAIT_SECONDS
        self.is_first_row = True

    def add_micro_batch(self, output: TaskOutput, inputs: MicroBatch) -> None:
        """Add the crops of a micro-batch, without waiting for the device."""
        num_crops = len(inputs.batch.label_B)
        loss = output.loss.detach() * num_crops
        crops = torch.full_like(loss, num_crops)
        # In the order of `CROP_NAMES`.
        values = [loss, output.num_correct, crops, inputs.silent]
        self.step_sums += torch.stack(values)

    def add_step(self, update: Update, clip_norm: float) -> None:
        """Add a step; a bad step only counts as skipped."""
        # A mask instead of a product: 0 * NaN is NaN.
        is_skipped = update.is_bad > 0
        self.step_sums.masked_fill_(is_skipped, 0.0)
        self.sums_of_crops.add_(self.step_sums)
        self.step_sums.zero_()

        # Steps are the same on every rank, and sums are added over ranks: rank 0 counts them.
        if self.ranks.rank == 0:
            norm = update.grad_norm.masked_fill(is_skipped, 0.0)
            is_clipped = norm > clip_norm
            steps = torch.ones_like(norm)
            # In the order of `STEP_NAMES`.
            values = [norm, is_clipped, update.is_bad, steps]
            self.sums_of_steps.add_(torch.stack(values))

    def load(self, sums: list[float]) -> None:
        """Restore the sums of all ranks from a checkpoint; rank 0 holds them."""
        self.step_sums.zero_()
        loaded = torch.tensor(sums, dtype=torch.float64)
        self.sums.copy_(loaded)
        # The sums are over all ranks. If each rank held them, the next row would count them again.
        if self.ranks.rank:
            self.sums.zero_()

    def take_row(self, step: int, wait_seconds: float) -> dict[str, Any]:
        """Return the means over all ranks since the last row, and begin the next row.

        A row in which every step was skipped has no loss, accuracy or gradient norm.
        """
        values = self.ranks.sum(self.sums).tolist()
        sums = dict(zip(self.NAMES, values))
        seconds = time.monotonic() - self.started_at
        self._warn_of_waiting(step, wait_seconds, seconds)
        self.sums.zero_()
        self.started_at = time.monotonic()

        row: dict[str, Any] = {}
        crops = sums["crops"]
        good_steps = sums["steps"] - sums["skipped"]
        if good_steps:
            row["loss"] = round(sums["loss"] / crops, 6)
            row["accuracy"] = round(sums["correct"] / crops, 6)
            row["grad_norm"] = round(sums["grad_norm"] / good_steps, 6)
        row["clipped"] = sums["clipped"] / sums["steps"]
        row["silent"] = int(sums["silent"])
        row["crops_per_second"] = round(crops / seconds, 1)
        row["data_wait"] = round(wait_seconds / seconds, 4)
        return row

    def _warn_of_waiting(self, step: int, wait_seconds: float, seconds: float) -> None:
        """Log a line, rarely, if training waits for data more than a fifth of the time."""
        # The time of the first row includes the start of the workers.
        if self.is_first_row:
            self.is_first_row = False
            return
        self.wait_seconds += wait_seconds
        self.seconds += seconds
        if self.seconds < self.judged_seconds:
            return
        share = self.wait_seconds / self.seconds
        self.judged_seconds = WAIT_SECONDS
        if share > MAX_WAIT:
            self.judged_seconds = WARNED_SECONDS
            log.warning(
                "step %d: training waited for data %.0f %% of the last %.0f s; give it"
                " more CPUs, raise runtime.num_workers or pack the audio"
                " (docs/hardware.md)",
                step,
                100 * share,
                self.seconds,
            )
        self.wait_seconds = 0.0
        self.seconds = 0.0


class DivergedError(RuntimeError):
    """The training does not learn, and is configured to stop in this case."""


class LearningWatch:
    """Check of the rows of training metrics for problems; its state is saved with the run."""

    def __init__(self, *, num_classes: int, warmup_steps: int, stop: bool) -> None:
        # At least 2: training without labels has no classes, and the logarithm of 1 is 0.
        num_choices = max(num_classes, 2)
        self.guessing_loss = GUESSING_SHARE * math.log(num_choices)
        self.warmup_steps = warmup_steps
        self.stop = stop
        self.reset()

    def reset(self) -> None:
        """Forget all rows so far."""
        self.bad_since: int | None = None  # first step with the current problem
        self.best_loss = math.inf  # at the current margin
        self.margin = 0.0
        self.reported = ""  # kind of the problem that was last reported

    def add(self, step: int, row: Mapping[str, Any]) -> str | None:
        """Return a line to log, once per problem; None otherwise.

        A row without a loss, in which all steps were skipped, is not judged.
        """
        if step <= self.warmup_steps or "loss" not in row:
            return None
        # A larger margin raises the loss of the same model: compare losses only at one margin.
        if row["margin"] != self.margin:
            self.best_loss = math.inf
            self.margin = row["margin"]
        loss = max(row["loss"], LOWEST_LOSS)
        self.best_loss = min(self.best_loss, loss)
        problem = self._find_problem(row)
        if not problem:
            self.bad_since = None
            self.reported = ""
            return None
        if self.bad_since is None:
            self.bad_since = step
        # The details differ from row to row: two problems are the same if their kinds are equal.
        kind, _, _ = problem.partition(":")
        bad_steps = step - self.bad_since
        if bad_steps < PATIENCE_STEPS or self.reported == kind:
            return None
        self.reported = kind
        return f"step {step}: {problem}, for {PATIENCE_STEPS} steps; lower training.lr"

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {
            "bad_since": self.bad_since,
            "best_loss": self.best_loss,
            "margin": self.margin,
            "reported": self.reported,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the values that `state` returned."""
        self.bad_since = state["bad_since"]
        self.best_loss = state["best_loss"]
        self.margin = state["margin"]
        self.reported = state["reported"]

    def _find_problem(self, row: Mapping[str, Any]) -> str:
        """Return the problem of a row as `kind: details`; "" if there is none."""
        # Only self-supervised training has an effective rank and prototypes.
        rank = row.get("effective_rank", math.inf)
        if rank < COLLAPSED_RANK:
            return f"collapses: effective rank {rank:.3g} of the embeddings"
        if row.get("prototypes") == 1:
            return "collapses: one prototype is used"
        loss = row["loss"]
        accuracy = row["accuracy"]
        if loss > self.guessing_loss and accuracy < GUESSING_ACCURACY:
            return (
                f"does not learn: loss {loss:.3g}, accuracy {accuracy:.2%}, like"
                " guessing"
            )
        if loss > DIVERGED_TIMES * self.best_loss:
            return f"diverges: loss {loss:.3g} after {self.best_loss:.3g}"
        return ""
