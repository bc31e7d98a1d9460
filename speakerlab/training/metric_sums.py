"""Metrics summed between two rows, on the device, over micro-batches, steps and ranks."""

import logging
import time
from typing import Any

import torch

from speakerlab.training.distributed import Ranks
from speakerlab.training.prefetch import MicroBatch
from speakerlab.training.task import TaskOutput
from speakerlab.training.update import Update

log = logging.getLogger(__name__)
MAX_WAIT = 0.2  # share of the time that training may wait for data before a warning
WAIT_SECONDS = 30.0  # the share is taken over this time
WARNED_SECONDS = 600.0  # and over this time after a warning
OF_CROPS = 4  # the first of `NAMES` count crops, the others steps


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
        """Add the crops of a micro-batch to those of its step."""
        rows = len(inputs.batch.label_B)
        self.step_sums[0] += output.loss.detach() * rows
        self.step_sums[1] += output.num_correct
        self.step_sums[2] += rows
        self.step_sums[3] += inputs.silent

    def add_step(self, update: Update, clip_norm: float) -> None:
        """Add a step; of a bad one only that it was skipped."""
        norm, is_bad = update
        self.sums[:OF_CROPS] += torch.where(is_bad > 0, 0.0, self.step_sums)
        self.step_sums.zero_()
        if self.ranks.rank == 0:  # the same on every rank
            clipped = (norm > clip_norm) & (is_bad == 0)
            good_norm = torch.where(is_bad > 0, 0.0, norm).double()
            one = torch.ones_like(good_norm)
            self.sums[OF_CROPS:] += torch.stack([good_norm, clipped.double(), is_bad.double(), one])

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
        share, over = self.wait_seconds / self.seconds, self.seconds
        self.wait_seconds = self.seconds = 0.0
        self.judged_seconds = WARNED_SECONDS if share > MAX_WAIT else WAIT_SECONDS
        if share > MAX_WAIT:
            log.warning(
                "step %d: training waited for data %.0f %% of the last %.0f s; give it more CPUs, "
                "raise runtime.num_workers or pack the audio (docs/hardware.md)",
                *(step, 100 * share, over),
            )
