"""Metrics of a training, summed on the device between two rows, and whether the model learns.

A training that does not learn, or no longer does, is detected after the warm-up, over
`PATIENCE_STEPS` steps in a row:
- not learning: loss and accuracy stay near those of guessing, ln(number of classes);
- diverged: the loss is three times its minimum at this margin (a larger margin raises the loss);
- collapsed, in self-supervised training: all embeddings are alike, or all choose one prototype.
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
OF_CROPS = 4  # the first of `NAMES` count crops, the others steps
PATIENCE_STEPS = 1000
GUESSING_SHARE = 0.9  # of ln(classes)
GUESSING_ACCURACY = 0.1
DIVERGED_TIMES = 3.0
COLLAPSED_RANK = 2.0
WATCHED = ("bad_since", "best_loss", "margin", "reported")  # the state of `LearningWatch`
LOWEST_LOSS = 0.1  # below it, three times as much is noise


class MetricSums:
    """Sums since the last row; saved with the run, so that a resumed run writes the same rows.

    The crops of bad steps are left out, because their loss may be NaN.
    """

    NAMES = ("loss", "correct", "crops", "silent", "grad_norm", "clipped", "skipped", "steps")

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sums = torch.zeros(len(self.NAMES), dtype=torch.float64, device=ranks.device)
        self.step_sums = torch.zeros_like(self.sums[:OF_CROPS])  # of the step being computed
        self.started_at = time.monotonic()
        self.wait_seconds = self.seconds = 0.0  # since the share of waiting was last judged
        self.judged_seconds = WAIT_SECONDS
        self.is_first_row = True

    def add_micro_batch(self, output: TaskOutput, inputs: MicroBatch) -> None:
        rows = len(inputs.batch.label_B)
        loss = output.loss.detach() * rows
        crops = torch.full_like(loss, rows)
        self.step_sums += torch.stack([loss, output.num_correct, crops, inputs.silent])

    def add_step(self, update: Update, clip_norm: float) -> None:
        """Add a step; of a bad one only that it was skipped."""
        norm, is_skipped = update.grad_norm, update.is_bad > 0
        self.sums[:OF_CROPS].add_(self.step_sums.masked_fill_(is_skipped, 0.0))
        self.step_sums.zero_()
        if self.ranks.rank == 0:  # the same on every rank
            good_norm = norm.masked_fill(is_skipped, 0.0)
            counts = (good_norm, good_norm > clip_norm, update.is_bad, torch.ones_like(norm))
            self.sums[OF_CROPS:].add_(torch.stack(counts))

    def load(self, sums: list[float]) -> None:
        """Restore the sums of all ranks from a checkpoint; rank 0 holds them."""
        self.step_sums.zero_()
        self.sums.copy_(torch.tensor(sums, dtype=torch.float64))
        if self.ranks.rank:
            self.sums.zero_()

    def take_row(self, step: int, wait_seconds: float) -> dict[str, Any]:
        """Return the means over all ranks since the last row, and begin the next row.

        A row in which every step was skipped has no loss, accuracy or gradient norm.
        """
        sums = dict(zip(self.NAMES, self.ranks.sum(self.sums).tolist()))
        seconds = time.monotonic() - self.started_at
        self._warn_of_waiting(step, wait_seconds, seconds)
        self.sums.zero_()
        self.started_at = time.monotonic()
        row, crops, good = dict[str, Any](), sums["crops"], sums["steps"] - sums["skipped"]
        if good:
            row["loss"] = round(sums["loss"] / crops, 6)
            row["accuracy"] = round(sums["correct"] / crops, 6)
            row["grad_norm"] = round(sums["grad_norm"] / good, 6)
        row["clipped"] = sums["clipped"] / sums["steps"]
        row["silent"] = int(sums["silent"])
        row["crops_per_second"] = round(crops / seconds, 1)
        row["data_wait"] = round(wait_seconds / seconds, 4)
        return row

    def _warn_of_waiting(self, step: int, wait_seconds: float, seconds: float) -> None:
        """Log a line, rarely, if training waits for data more than a fifth of the time."""
        if self.is_first_row:  # its time includes the start of the workers
            self.is_first_row = False
            return
        self.wait_seconds += wait_seconds
        self.seconds += seconds
        if self.seconds < self.judged_seconds:
            return
        share = self.wait_seconds / self.seconds
        self.judged_seconds = WARNED_SECONDS if share > MAX_WAIT else WAIT_SECONDS
        if share > MAX_WAIT:
            log.warning(
                "step %d: training waited for data %.0f %% of the last %.0f s; give it more CPUs, "
                "raise runtime.num_workers or pack the audio (docs/hardware.md)",
                *(step, 100 * share, self.seconds),
            )
        self.wait_seconds = self.seconds = 0.0


class DivergedError(RuntimeError):
    """The training does not learn, and was configured to stop then."""


class LearningWatch:
    """Judges the rows of training metrics; its state is saved with the run."""

    def __init__(self, *, num_classes: int, warmup_steps: int, stop: bool) -> None:
        self.guessing_loss = GUESSING_SHARE * math.log(max(num_classes, 2))
        self.warmup_steps, self.stop = warmup_steps, stop
        self.reset()

    def reset(self) -> None:
        self.bad_since: int | None = None  # step
        self.best_loss, self.margin = math.inf, 0.0
        self.reported = ""

    def add(self, step: int, row: Mapping[str, Any]) -> str | None:
        """Return a line to log, once per problem; None otherwise, as for a row without a loss."""
        if step <= self.warmup_steps or "loss" not in row:
            return None
        if row["margin"] != self.margin:
            self.best_loss, self.margin = math.inf, row["margin"]
        self.best_loss = min(self.best_loss, max(row["loss"], LOWEST_LOSS))
        problem = self._problem(row)
        if not problem:
            self.bad_since, self.reported = None, ""
            return None
        if self.bad_since is None:
            self.bad_since = step
        kind = problem.partition(":")[0]
        if step - self.bad_since < PATIENCE_STEPS or self.reported == kind:
            return None
        self.reported = kind
        return f"step {step}: {problem}, for {PATIENCE_STEPS} steps; lower training.lr"

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in WATCHED}

    def load_state(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: state[name] for name in WATCHED})

    def _problem(self, row: Mapping[str, Any]) -> str:
        if row.get("effective_rank", math.inf) < COLLAPSED_RANK:
            return f"collapses: effective rank {row['effective_rank']:.3g} of the embeddings"
        if row.get("prototypes") == 1:
            return "collapses: one prototype is used"
        loss, accuracy = row["loss"], row["accuracy"]
        if loss > self.guessing_loss and accuracy < GUESSING_ACCURACY:
            return f"does not learn: loss {loss:.3g}, accuracy {accuracy:.2%}, like guessing"
        if loss > DIVERGED_TIMES * self.best_loss:
            return f"diverges: loss {loss:.3g} after {self.best_loss:.3g}"
        return ""
