"""Detect a training that does not learn, or no longer does.

Both are judged after the warm-up, over `PATIENCE_STEPS` steps in a row:
- not learning: loss and accuracy stay near those of guessing, ln(number of classes);
- diverged: the loss is three times its minimum at this margin (a larger margin raises the loss).
"""

import math
from collections.abc import Mapping
from typing import Any

PATIENCE_STEPS = 1000
GUESSING_SHARE = 0.9  # of ln(classes)
GUESSING_ACCURACY = 0.1
DIVERGED_TIMES = 3.0
LOWEST_LOSS = 0.1  # below it, three times as much is noise


class DivergedError(RuntimeError):
    """The training does not learn, and was configured to stop then."""


class LearningWatch:
    """Judges the rows of training metrics; its state is saved with the run."""

    def __init__(self, *, num_classes: int, warmup_steps: int, stop: bool) -> None:
        self.guessing_loss = GUESSING_SHARE * math.log(max(num_classes, 2))
        self.warmup_steps, self.stop = warmup_steps, stop
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self.bad_since: int | None = None  # step
        self.best_loss, self.margin = math.inf, 0.0
        self.reported = ""

    def add(self, step: int, *, loss: float, accuracy: float, margin: float) -> str | None:
        """Return a line to log, once per problem; None otherwise."""
        if step <= self.warmup_steps:
            return None
        if margin != self.margin:
            self.best_loss, self.margin = math.inf, margin
        self.best_loss = min(self.best_loss, max(loss, LOWEST_LOSS))
        problem = self._problem(loss, accuracy)
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
        """Return plain values."""
        return {
            "bad_since": self.bad_since,
            "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
            "margin": self.margin,
            "reported": self.reported,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.bad_since, self.reported = state["bad_since"], state["reported"]
        self.margin, best = state["margin"], state["best_loss"]
        self.best_loss = math.inf if best is None else best

    def _problem(self, loss: float, accuracy: float) -> str:
        if loss > self.guessing_loss and accuracy < GUESSING_ACCURACY:
            return f"does not learn: loss {loss:.3g}, accuracy {accuracy:.2%}, as by guessing"
        if loss > DIVERGED_TIMES * self.best_loss:
            return f"diverges: loss {loss:.3g} after {self.best_loss:.3g}"
        return ""
