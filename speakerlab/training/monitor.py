"""Numbers of a run, to a file, to TensorBoard and to people. In: one dict a row. Out: all three.

`metrics.jsonl` has one row each `log_every_steps` and one a validation; console lines come by time,
and on a terminal there is a bar. A full disk delays rows and never ends a run.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from speakerlab.training.appended import AppendedFile
from speakerlab.training.console import Bar
from speakerlab.training.events import Events, Pictures

log = logging.getLogger(__name__)
PICTURE_SECONDS = 60.0  # between two: to draw takes about one


class Monitor:
    """Writes rows; rank 0 alone has one. `start_step`: later rows of an earlier run are cut.

    pictures: makes those of the last validation, or None. They are shown when the last ones are
    `picture_seconds` old, and at the end of a run that took so long.
    """

    def __init__(
        self,
        exp_dir: Path,
        *,
        start_step: int,
        total_steps: int,
        every_seconds: float,
        pictures: Callable[[], Pictures | None] | None = None,
        picture_seconds: float = PICTURE_SECONDS,
    ) -> None:
        self.rows = AppendedFile(exp_dir / "metrics.jsonl")
        _cut_rows(self.rows.path, start_step)
        self.events = Events(exp_dir / "tensorboard", start_step=start_step)
        self.bar = Bar()
        self.start_step, self.total_steps = start_step, total_steps
        self.every_seconds = every_seconds
        self.pictures, self.picture_seconds = pictures, picture_seconds
        self.started_at = self.last_line_at = self.last_picture_at = time.monotonic()

    def train_row(self, step: int, values: Mapping[str, float]) -> None:
        """A row of training; printed when the last line is `every_seconds` old."""
        self._write(step, values, "train")
        now = time.monotonic()
        text = f"step {step}/{self.total_steps} ETA {_clock(self.eta_seconds(step))}"
        if now - self.last_line_at >= self.every_seconds or step == self.total_steps:
            self.last_line_at = now
            log.info("%s %s", text, " ".join(f"{k} {_text(v)}" for k, v in values.items()))
        loss = _text(values["loss"]) if "loss" in values else "none: every step was skipped"
        self.bar.draw(step / self.total_steps, f"{text} loss {loss}")

    def valid_row(self, step: int, values: Mapping[str, float]) -> None:
        """A row of validation; always printed."""
        self._write(step, values, "valid")
        text = ", ".join(f"{name} {_text(value)}" for name, value in values.items())
        log.info("step %d: validation: %s", step, text)
        if self.pictures is not None and self._wants_pictures(step):
            shown = self.pictures()
            self.last_picture_at = time.monotonic()
            if shown is not None:
                self.events.add_pictures(step, shown)

    def close(self) -> None:
        """Write what could not be written before, or say what is missing."""
        self.bar.close()
        self.rows.close()
        self.events.close()

    def eta_seconds(self, step: int) -> float:
        """Time left at the mean speed of this process."""
        done = step - self.start_step
        elapsed = time.monotonic() - self.started_at
        return elapsed / max(done, 1) * (self.total_steps - step)

    def _wants_pictures(self, step: int) -> bool:
        since = self.started_at if step == self.total_steps else self.last_picture_at
        return time.monotonic() - since >= self.picture_seconds

    def _write(self, step: int, values: Mapping[str, float], group: str) -> None:
        row = json.dumps({"kind": group, "step": step, **values})
        self.rows.append(f"{row}\n".encode())
        self.events.add_scalars(step, group, values)


def _cut_rows(path: Path, start_step: int) -> None:
    """Drop rows past the checkpoint that a run resumes from, and a last line cut by a kill.

    They are the end of the file: so it is shortened, for which there is room on a full disk too.
    """
    if not path.exists():
        return
    size = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or _step_of(line) > start_step:
                break
            size += len(line)
    os.truncate(path, size)


def _step_of(line: bytes) -> float:
    """The step of a row; of a damaged one, which a loss of power may leave, infinity."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


def _text(value: float) -> str:
    return f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
