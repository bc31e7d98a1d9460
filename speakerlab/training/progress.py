"""Check of the metrics of a training for signs that the model does not learn.

A problem is reported if it lasts for `PATIENCE_STEPS` steps in a row after the warm-up:
- does not learn: loss and accuracy stay near the values of guessing, where the loss is ln(number of
  classes);
- diverges: the loss is three times its minimum at this margin (a larger margin raises the loss);
- collapses, in self-supervised training: all embeddings are alike, or all choose one prototype.
"""

import math
from collections.abc import Mapping
from typing import Any

PATIENCE_STEPS = 1000
GUESSING_SHARE = 0.9  # of ln(classes), the loss of a model that guesses
GUESSING_ACCURACY = 0.1
DIVERGED_TIMES = 3.0
COLLAPSED_RANK = 2.0
LOWEST_LOSS = 0.1  # below it, three times as much is noise


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
