"""Numbers of a run, to a file, to TensorBoard and to people. In: one dict a row. Out: all three.

`metrics.jsonl` has one row each `log_every_steps` and one a validation; console lines come by time.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from speakerlab.atomic import write_text

log = logging.getLogger(__name__)
BAR_CELLS = 24


class Monitor:
    """Writes rows; rank 0 alone has one. `start_step`: later rows of an earlier run are cut."""

    def __init__(
        self, exp_dir: Path, *, start_step: int, total_steps: int, every_seconds: float
    ) -> None:
        self.path = exp_dir / "metrics.jsonl"
        _cut_rows(self.path, start_step)
        self.writer = SummaryWriter(str(exp_dir / "tensorboard"), purge_step=start_step + 1)
        self.start_step, self.total_steps = start_step, total_steps
        self.every_seconds = every_seconds
        self.started_at = self.last_line_at = time.monotonic()

    def train_row(self, step: int, values: Mapping[str, float]) -> None:
        """A row of training; printed when the last line is `every_seconds` old."""
        self._write({"step": step, **values}, "train")
        now = time.monotonic()
        if now - self.last_line_at >= self.every_seconds or step == self.total_steps:
            self.last_line_at = now
            self._print(step, values)

    def valid_row(self, step: int, values: Mapping[str, float]) -> None:
        """A row of validation; always printed."""
        self._write({"step": step, **values}, "valid")
        text = ", ".join(f"{name} {_text(value)}" for name, value in values.items())
        log.info("step %d: validation: %s", step, text)

    def close(self) -> None:
        self.writer.close()

    def eta_seconds(self, step: int) -> float:
        """Time left at the mean speed of this process."""
        done = step - self.start_step
        elapsed = time.monotonic() - self.started_at
        return elapsed / max(done, 1) * (self.total_steps - step)

    def _write(self, row: Mapping[str, Any], group: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": group, **row}) + "\n")
        for name, value in row.items():
            if name != "step":
                self.writer.add_scalar(f"{group}/{name}", value, row["step"])
        self.writer.flush()

    def _print(self, step: int, values: Mapping[str, float]) -> None:
        eta = _clock(self.eta_seconds(step))
        shown = " ".join(f"{name} {_text(value)}" for name, value in values.items())
        bar = ""
        if sys.stderr.isatty():
            full = round(BAR_CELLS * step / self.total_steps)
            bar = f"[{'#' * full}{'.' * (BAR_CELLS - full)}] "
        log.info("%sstep %d/%d ETA %s %s", bar, step, self.total_steps, eta, shown)


def _cut_rows(path: Path, start_step: int) -> None:
    """Drop rows past the checkpoint that a run resumes from, and a last line cut by a kill."""
    if not path.exists():
        return
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["step"] <= start_step:
            kept.append(line + "\n")
    write_text(path, "".join(kept))


def _text(value: float) -> str:
    return f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
