"""Metrics of a run, written to `metrics.jsonl`, to TensorBoard and to the console.

`metrics.jsonl` has one row every `log_every_steps` and one per validation; console lines follow the
clock. A full disk delays rows and never ends a run.

TensorBoard's files are written here, because its own writer loses its buffer at the first write
that fails, and its thread ends in a traceback. They hold the metrics, the configuration as text and
hyper-parameters, and after scoring the EERs and the plots of the report.
"""

import io
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue] # made when it is imported
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from speakerlab.training.appended import AppendedFile

log = logging.getLogger(__name__)
PREFIX = "events.out.tfevents"
# A slow step logs its progress: if the first step takes longer than `FIRST_SECONDS`, and later
# after `QUIET_SECONDS` without a line of training.
FIRST_SECONDS = 10.0
QUIET_SECONDS = 20.0
METRICS = "0"  # end of the name of a file with the metrics of a training
SCORES = "scores"  # end of the name of the file with the EERs and plots of the report
# Group of the metrics of the result. Of all metrics, the tab HPARAMS shows the first five by name,
# and this name comes before `train` and `valid`.
RESULTS = "results"
# Width and height of a PNG file, after its signature and the name of the first chunk.
PNG_SIZE = struct.Struct(">16xII")


class Events:
    """One file of events; its name ends with `kind`."""

    def __init__(self, folder: Path, *, kind: str = METRICS) -> None:
        self.folder = folder
        stamp = _next_stamp(folder)
        name = f"{PREFIX}.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.{kind}"
        self.file = AppendedFile(folder / name)
        # The first record of every file is the version of its format.
        self._append(Event(file_version="brain.Event:2"))

    def restart(self, step: int) -> None:
        """Make TensorBoard drop the values of this step and of later steps in earlier files.

        Otherwise it would draw two curves over each other after a roll-back.
        """
        restart = SessionLog(status=SessionLog.START)
        self._append(Event(step=step, session_log=restart))

    def add(self, step: int, summary: Summary) -> None:
        """Write an event with a summary of TensorBoard."""
        self._append(Event(step=step, summary=summary))

    def add_scalars(self, step: int, group: str, values: Mapping[str, float]) -> None:
        """Write an event with the values of a step; group: `train`, `valid` or `results`."""
        scalars: list[Summary.Value] = []
        for name, value in values.items():
            scalar = Summary.Value(tag=f"{group}/{name}", simple_value=value)
            scalars.append(scalar)
        self.add(step, Summary(value=scalars))

    def _append(self, event: Event) -> None:
        event.wall_time = time.time()
        # TensorBoard's format of a record: length, checksum, event, checksum.
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self.file.append(record.getvalue())


@dataclass(eq=False)
class Monitor:
    """Writer of rows of metrics; only rank 0 has one. Call `begin` first."""

    exp_dir: Path
    total_steps: int
    every_seconds: float  # between two log lines
    config: str = ""  # as text, in YAML
    settings: Mapping[str, Any] = field(default_factory=dict)  # by key

    def begin(self, start_step: int) -> None:
        """Start at a step; cut the later rows of an earlier run, or of a roll-back."""
        self.rows = AppendedFile(self.exp_dir / "metrics.jsonl")
        # Otherwise the steps that are taken again would have two rows.
        _cut_rows(self.rows.path, start_step)
        self._begin_events(start_step)
        self.start_step = start_step
        self.started_at = time.monotonic()
        self.last_line_at = self.started_at
        self.quiet_until = self.started_at + FIRST_SECONDS

    def _begin_events(self, start_step: int) -> None:
        """Begin a file of events with the configuration and, unless written, hyper-parameters."""
        folder = self.exp_dir / "tensorboard"
        earlier_files = list(folder.glob(f"{PREFIX}.*.{METRICS}"))
        self.events = Events(folder)
        first_step = start_step + 1
        self.events.restart(first_step)
        # Written as values of the first step: if the run starts from this step again, TensorBoard
        # drops them for those of the later start.
        text = text_pb("config", _as_code(self.config))
        self.events.add(first_step, text)

        # TensorBoard keeps the first hyper-parameters that it reads. A run that resumes has written
        # them already. A run that begins again may have other settings, so it removes the earlier
        # files.
        if start_step == 0:
            for path in earlier_files:
                path.unlink(missing_ok=True)
        if start_step == 0 or not earlier_files:
            values = {key: _as_parameter(value) for key, value in self.settings.items()}
            parameters = hparams_pb(values, trial_id=self.exp_dir.name)
            self.events.add(first_step, parameters)

    def progress(self, step: float, activity: str = "") -> None:
        """Log the progress of a slow step; call it once `quiet_until` has passed.

        step: number of completed steps, including the completed part of the current step.
        activity: what the step does now, with ", " behind it.
        """
        now = time.monotonic()
        self.quiet_until = now + QUIET_SECONDS
        # Whole seconds, because a timedelta would be printed with microseconds.
        elapsed_seconds = round(now - self.started_at)
        elapsed = timedelta(seconds=elapsed_seconds)
        remaining = self._estimate_remaining(step, now)
        log.info(
            "step %.4g/%d %s%s elapsed, ETA %s",
            step,
            self.total_steps,
            activity,
            elapsed,
            remaining,
        )

    def _estimate_remaining(self, step: float, now: float) -> timedelta | str:
        """Return the time until the last step, at the mean speed since the start."""
        steps_done = step - self.start_step
        if not steps_done:
            return "unknown"
        seconds_per_step = (now - self.started_at) / steps_done
        remaining_steps = self.total_steps - step
        remaining_seconds = round(seconds_per_step * remaining_steps)
        return timedelta(seconds=remaining_seconds)

    def train_row(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row of training; log it when the last line is `every_seconds` old."""
        self._write(step, values, "train")
        now = time.monotonic()
        is_due = now - self.last_line_at >= self.every_seconds
        if is_due or step == self.total_steps:
            self.last_line_at = now
            self.quiet_until = now + QUIET_SECONDS
            remaining = self._estimate_remaining(step, now)
            progress = f"step {step}/{self.total_steps} ETA {remaining}"
            metrics = " ".join(_format_metrics(values))
            log.info("%s %s", progress, metrics)

    def valid_row(self, step: int, values: Mapping[str, float]) -> None:
        """Write and log a row of validation."""
        self._write(step, values, "valid")
        # Without the metrics of single corpora, `eer/NAME`.
        results: dict[str, float] = {}
        for name, value in values.items():
            if "/" not in name:
                results[f"valid_{name}"] = value
        self.events.add_scalars(step, RESULTS, results)
        metrics = ", ".join(_format_metrics(values))
        log.info("step %d: validation: %s", step, metrics)

    def close(self) -> None:
        """Write rows that could not be written before, or log how many are missing."""
        self.rows.close()
        self.events.file.close()

    def _write(self, step: int, values: Mapping[str, float], group: str) -> None:
        """Write a row to `metrics.jsonl` and to TensorBoard."""
        row = {"kind": group, "step": step, **values}
        line = json.dumps(row) + "\n"
        self.rows.append(line.encode())
        self.events.add_scalars(step, group, values)


def write_scores(
    folder: Path,
    step: int,
    eers: Mapping[str, float],
    images: Mapping[str, Path],
) -> None:
    """Write the results of a scoring for TensorBoard, in place of earlier ones.

    step: of the scored model. eers: trial list -> EER, a fraction. images: tag -> PNG file.
    """
    for path in folder.glob(f"{PREFIX}.*.{SCORES}"):
        path.unlink(missing_ok=True)
    values: list[Summary.Value] = []
    for tag, path in images.items():
        content = path.read_bytes()
        width, height = PNG_SIZE.unpack_from(content)
        image = Summary.Image(
            width=width,
            height=height,
            colorspace=4,  # red, green, blue, opacity
            encoded_image_string=content,
        )
        values.append(Summary.Value(tag=tag, image=image))
    events = Events(folder, kind=SCORES)
    events.add_scalars(step, f"{RESULTS}/eer", eers)
    if values:
        events.add(step, Summary(value=values))
    events.file.close()


def _next_stamp(folder: Path) -> int:
    """Return the time for the name of the next file of events, in seconds since 1970."""
    # Files are read in the order of their names. The clock alone does not order them: a run may
    # resume within the second, or on a host whose clock is behind.
    stamp = int(time.time())
    for path in folder.glob(f"{PREFIX}.*"):
        parts = path.name.split(".")
        earlier_stamp = int(parts[3])
        stamp = max(stamp, earlier_stamp + 1)
    return stamp


def _as_code(text: str) -> str:
    """Return text in Markdown that TensorBoard shows as it is, with its line breaks."""
    lines = [f"    {line}" for line in text.splitlines()]
    return "\n".join(lines)


def _as_parameter(value: Any) -> float | str | bool:
    """Return a setting as a value that TensorBoard accepts as a hyper-parameter."""
    return value if isinstance(value, bool | int | float | str) else str(value)


def _format_metrics(values: Mapping[str, float]) -> list[str]:
    """Return each metric as `name value`."""
    return [f"{name} {value:.4g}" for name, value in values.items()]


def _cut_rows(path: Path, start_step: int) -> None:
    """Drop rows past the checkpoint that a run resumes from, and a last line cut by a kill.

    All of these lines are at the end of the file. So it is shortened in place, for which even a
    full disk has room.
    """
    if not path.exists():
        return
    size_to_keep = 0
    with path.open("rb") as file:
        for line in file:
            if not _is_row_until(line, start_step):
                break
            size_to_keep += len(line)
    os.truncate(path, size_to_keep)


def _is_row_until(line: bytes, last_step: int) -> bool:
    """Return whether a line is a whole row of a step up to `last_step`."""
    # A kill may cut the last line anywhere, even where the rest is valid JSON.
    if not line.endswith(b"\n"):
        return False
    # A power loss may leave a line of other bytes, such as zeros.
    try:
        row = json.loads(line)
        return row["step"] <= last_step
    except (ValueError, LookupError, TypeError):
        return False
