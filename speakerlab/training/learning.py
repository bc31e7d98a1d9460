"""Tells that a training does not learn, or no longer does. In: rows of metrics. Out: a warning.

Both are judged after the warm-up, on `PATIENCE_STEPS` steps in a row:
- not learning: the loss stays near ln(number of classes), that of guessing, and so does accuracy;
- diverged: the loss is three times the lowest it has been at this margin (a larger margin raises
  it, which is no sign of anything).
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
    """The training does not learn, and was to stop then."""


class LearningWatch:
    """Judges one row of training metrics after the other; its state is saved with the run's."""

    def __init__(self, *, num_classes: int, warmup_steps: int, stop: bool) -> None:
        self.guessing_loss = GUESSING_SHARE * math.log(max(num_classes, 2))
        self.warmup_steps, self.stop = warmup_steps, stop
        self.reset()

    def reset(self) -> None:
        """Judge from here on."""
        self.bad_since: int | None = None  # step
        self.best_loss, self.margin = math.inf, 0.0
        self.told = ""

    def add(self, step: int, *, loss: float, accuracy: float, margin: float) -> str | None:
        """A line to tell, once for each trouble; None where all is well or is told already."""
        if step <= self.warmup_steps:
            return None
        if margin != self.margin:
            self.best_loss, self.margin = math.inf, margin
        self.best_loss = min(self.best_loss, max(loss, LOWEST_LOSS))
        trouble = self._trouble(loss, accuracy)
        kind = trouble.partition(",")[0]
        if not trouble:
            self.bad_since, self.told = None, ""
            return None
        if self.bad_since is None:
            self.bad_since = step
        if step - self.bad_since < PATIENCE_STEPS or self.told == kind:
            return None
        self.told = kind
        return f"step {step}: {trouble}, for {PATIENCE_STEPS} steps; lower training.lr"

    def state(self) -> dict[str, Any]:
        """Plain values."""
        best = self.best_loss if math.isfinite(self.best_loss) else None
        return {"bad_since": self.bad_since, "best": best, "margin": self.margin, "told": self.told}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The reverse of `state`."""
        self.bad_since, self.margin, self.told = (
            state[name] for name in ("bad_since", "margin", "told")
        )
        self.best_loss = math.inf if state["best"] is None else state["best"]

    def _trouble(self, loss: float, accuracy: float) -> str:
        if loss > self.guessing_loss and accuracy < GUESSING_ACCURACY:
            return (
                f"does not learn, got a loss of {loss:.3g} and an accuracy of {accuracy:.2%}, "
                "as by guessing"
            )
        if loss > DIVERGED_TIMES * self.best_loss:
            return f"diverges, got a loss of {loss:.3g} after {self.best_loss:.3g}"
        return ""
