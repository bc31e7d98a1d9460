"""Recovery from too many steps that are not finite: a report, and a return to a checkpoint.

The next attempt has another data order and half the learning rate.
"""

import logging
from collections.abc import Callable
from typing import Any

from speakerlab.training.nan_report import examine
from speakerlab.training.step import BACK_OFF, OptimizerStep
from speakerlab.training.task import Inputs
from speakerlab.training.update import NumericError

log = logging.getLogger(__name__)
# Numeric problems that survive two new data orders and a quarter of the learning rate will not go
# away by themselves.
MAX_ROLLBACKS = 2


class RollBack:
    """Return of a run to its last checkpoint, at most `MAX_ROLLBACKS` times.

    read_from: returns the micro-batches from a step on. report: called with the findings.
    """

    def __init__(
        self,
        optimizer_step: OptimizerStep,
        *,
        read_from: Callable[[int], Inputs],
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self.optimizer_step = optimizer_step
        self.state = optimizer_step.state
        self.read_from = read_from
        self.report = report

    def recover(self, error: NumericError) -> str:
        """Report the values that are not finite, and roll back; return a text for the log.

        Raises the error again if earlier roll-backs have not helped.
        """
        findings = self._examine(error.step)
        findings_of_ranks = self.state.ranks.gather_objects(findings)
        if self.state.ranks.is_first:
            self._report(error, findings_of_ranks)
        # After the report, because a user whose run ends here needs it, too.
        if self.state.attempt >= MAX_ROLLBACKS:
            raise error
        self.state.roll_back()
        share = BACK_OFF**self.state.attempt
        return f"rolled back (new data order, {share:g} of the learning rate) to"

    def _examine(self, step: int) -> list[dict[str, Any]]:
        """Compute a bad step again; return the findings in each micro-batch of this rank.

        Every rank must call it, because norms and heads may be joined.
        """
        optimizer_step = self.optimizer_step
        ranks = self.state.ranks
        margin = optimizer_step.schedule.margin_at(step)
        inputs = self.read_from(step)
        optimizer_step.begin(step)
        findings: list[dict[str, Any]] = []
        for index in range(optimizer_step.accumulation):
            micro_batch = next(inputs)
            # With the same data and seed, dropout and dither repeat the bad step.
            seed = optimizer_step.model_seed(step, index)
            facts = examine(self.state.task, micro_batch, margin, seed=seed)
            findings.append({"rank": ranks.rank, "index": index, **facts})
            # The pass has moved BatchNorm's statistics, maybe to NaN.
            self.state.updater.restore()
        inputs.close()
        return findings

    def _report(
        self,
        error: NumericError,
        findings_of_ranks: list[list[dict[str, Any]]],
    ) -> None:
        """Pass on the error and the micro-batches of all ranks, in the order of ranks."""
        step = error.step
        micro_batches: list[dict[str, Any]] = []
        for findings in findings_of_ranks:
            micro_batches += findings
        facts = {
            "error": str(error),
            "step": step,
            "attempt": self.state.attempt,
            "margin": self.optimizer_step.schedule.margin_at(step),
            "lr": self.optimizer_step.lr_at(step),
            "loss_scale": float(self.state.updater.loss_scale),
            "micro_batches": micro_batches,
        }
        self.report(facts)
