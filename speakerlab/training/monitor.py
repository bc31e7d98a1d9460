"""Metrics of a run, written to `metrics.jsonl`, to TensorBoard and to the console.

`metrics.jsonl` has one row every `log_every_steps` and one per validation; console lines come by
time. A full disk delays rows and never ends a run.

TensorBoard's files are written here and not by its own writer, because that one loses what it holds
on the first write that fails, and its thread ends in a traceback.
"""

import io
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue] # made when it is imported
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.record_writer import RecordWriter

from speakerlab.training.appended import AppendedFile

log = logging.getLogger(__name__)
PREFIX = "events.out.tfevents"
FIRST_SECONDS = 10.0  # a step that takes longer logs its progress, ...
QUIET_SECONDS = 20.0  # ... and again after this time without a line of training


class Events:
    """One file of events; TensorBoard drops the steps after `start_step` from earlier ones."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        self.folder = folder
        # Files are read in the order of their names. The clock alone does not order them: a run
        # may resume within the second, or on a host whose clock is behind.
        times = [int(path.name.split(".")[3]) for path in folder.glob(f"{PREFIX}.*")]
        stamp = max([int(time.time()), *(before + 1 for before in times)])
        name = f"{PREFIX}.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self.file = AppendedFile(folder / name)
        self._append(Event(file_version="brain.Event:2"))
        restart = SessionLog(status=SessionLog.START)
        self._append(Event(step=start_step + 1, session_log=restart))

    def add_scalars(self, step: int, group: str, values: Mapping[str, float]) -> None:
        found = [Summary.Value(tag=f"{group}/{k}", simple_value=v) for k, v in values.items()]
        self._append(Event(step=step, summary=Summary(value=found)))

    def _append(self, event: Event) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self.file.append(record.getvalue())


@dataclass(eq=False)
class Monitor:
    """Writes rows; only rank 0 has one. Call `begin` first."""

    exp_dir: Path
    total_steps: int
    every_seconds: float  # between two log lines

    def begin(self, start_step: int) -> None:
        """Start at a step; later rows of an earlier run, or of a step rolled back, are cut."""
        self.rows = AppendedFile(self.exp_dir / "metrics.jsonl")
        _cut_rows(self.rows.path, start_step)
        self.events = Events(self.exp_dir / "tensorboard", start_step=start_step)
        self.start_step = start_step
        self.started_at = self.last_line_at = time.monotonic()
        self.quiet_until = self.started_at + FIRST_SECONDS

    def progress(self, step: float, doing: str = "") -> None:
        """Log how far a slow step is; call it from `quiet_until` on. step: with its done part."""
        now = time.monotonic()
        self.quiet_until = now + QUIET_SECONDS
        elapsed = timedelta(seconds=round(now - self.started_at))
        text = "step %.4g/%d %s%s elapsed, ETA %s"
        log.info(text, step, self.total_steps, doing, elapsed, self._left(step, now))

    def _left(self, step: float, now: float) -> timedelta | str:
        done = step - self.start_step
        if not done:
            return "unknown"
        return timedelta(seconds=round((now - self.started_at) / done * (self.total_steps - step)))

    def train_row(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row of training; log it when the last line is `every_seconds` old."""
        self._write(step, values, "train")
        now = time.monotonic()
        if now - self.last_line_at >= self.every_seconds or step == self.total_steps:
            self.last_line_at, self.quiet_until = now, now + QUIET_SECONDS
            text = f"step {step}/{self.total_steps} ETA {self._left(step, now)}"
            log.info("%s %s", text, " ".join(f"{k} {v:.4g}" for k, v in values.items()))

    def valid_row(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step, values, "valid")
        text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        log.info("step %d: validation: %s", step, text)

    def close(self) -> None:
        """Write what could not be written before, or log what is missing."""
        self.rows.close()
        self.events.file.close()

    def _write(self, step: int, values: Mapping[str, float], group: str) -> None:
        row = json.dumps({"kind": group, "step": step, **values})
        self.rows.append(f"{row}\n".encode())
        self.events.add_scalars(step, group, values)


def _cut_rows(path: Path, start_step: int) -> None:
    """Drop rows past the checkpoint that a run resumes from, and a last line cut by a kill.

    They are at the end of the file, which is shortened in place: a full disk has room for that.
    """
    if not path.exists():
        return
    size = 0
    with path.open("rb") as file:
        for line in file:
            try:
                is_kept = line.endswith(b"\n") and json.loads(line)["step"] <= start_step
            except (ValueError, LookupError, TypeError):  # damaged by a power loss
                is_kept = False
            if not is_kept:
                break
            size += len(line)
    os.truncate(path, size)
