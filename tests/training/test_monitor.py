"""Rows of metrics: written once, cut on resume, read back from TensorBoard's files."""

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.projector import projector_config_pb2

from speakerlab.training import monitor as monitor_module
from speakerlab.training.monitor import Monitor, Points


def make_monitor(folder, start_step=0, **more):
    monitor = Monitor(folder, total_steps=40, every_seconds=0.0, **more)
    monitor.begin(start_step)
    return monitor


def test_a_slow_step_logs_its_progress(tmp_path, caplog, monkeypatch):
    """A step of a minute in six micro-batches: a line within 10 s, then one every 30 s."""
    now = 0.0
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: now)
    monitor = Monitor(tmp_path, total_steps=40, every_seconds=10.0)
    monitor.begin(0)
    seen = [0.0]
    with caplog.at_level(logging.INFO):
        for micro_batch in range(1, 31):
            now += 10.0
            if now >= monitor.quiet_until:
                monitor.progress(micro_batch / 6)
            if micro_batch == 12:
                monitor.train_row(2, {"loss": 1.0})
            if len(caplog.records) >= len(seen):
                seen.append(now)
    monitor.close()
    assert seen[1] == 10.0 and max(b - a for a, b in zip(seen, seen[1:])) <= 30
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "step 0.1667/40 0:00:10 elapsed, ETA 0:39:50"
    assert any(line.startswith("step 2/40 ETA 0:38:00 loss 1") for line in lines)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0})
    found.Reload()
    return found


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_events(folder).Scalars(name)]


def points(first: int = 0, num_points: int = 3) -> Points:
    """Return points whose first coordinate is the row."""
    emb_ND = np.full((num_points, 2), first, dtype=np.float32)
    emb_ND[:, 0] = np.arange(num_points)
    ids = [f"utt{row}" for row in range(num_points)]
    return Points(emb_ND, ["ann"] * num_points, ids)


def read_projector(folder: Path) -> tuple[np.ndarray, list[str]]:
    """Return points and names, read like TensorBoard does."""
    log_dir = folder / "tensorboard"
    config = getattr(projector_config_pb2, "ProjectorConfig")()  # noqa: B009 # made at run time
    text_format.Parse((log_dir / "projector_config.pbtxt").read_text(), config)
    (info,) = config.embeddings
    points = np.loadtxt(log_dir / info.tensor_path, delimiter="\t", ndmin=2)
    return points, (log_dir / info.metadata_path).read_text().splitlines()


@pytest.mark.parametrize(
    "damage",
    [b'{"kind": "train", "st', b"\0" * 40 + b"\n", b"[]\n", b"{}\n", b'{"step": "20"}\n'],
)
def test_a_last_line_that_is_no_row_is_cut(tmp_path, damage):
    first = make_monitor(tmp_path)
    first.train_row(10, {"loss": 1.0})
    first.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    second = make_monitor(tmp_path, start_step=10)
    second.train_row(20, {"loss": 2.0})
    second.close()
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(10, 1), (20, 2)]


@pytest.mark.parametrize("clock", [0, -3600], ids=["the same second", "a host an hour behind"])
def test_no_step_is_there_twice_after_resumes(tmp_path, monkeypatch, clock):
    """Each attempt resumes from step 10 with another loss, as after a roll-back."""
    at = [2_000_000_000.0]
    monkeypatch.setattr(monitor_module.time, "time", lambda: at[0])
    for attempt in range(12):
        monitor = make_monitor(tmp_path, start_step=10 if attempt else 0)
        for step in (10, 20, 30)[bool(attempt) :]:
            monitor.train_row(step, {"loss": float(attempt)})
        if attempt < 11:
            monitor.valid_row(30, {"eer": 0.25})
        monitor.close()
        at[0] += clock
    assert scalars(tmp_path, "train/loss") == [(10, 0.0), (20, 11.0), (30, 11.0)]
    assert [row["loss"] for row in rows(tmp_path)] == [0.0, 11.0, 11.0]


def test_an_event_cut_by_a_loss_of_power_hides_no_later_one(tmp_path):
    first = make_monitor(tmp_path)
    for step in (10, 20, 30):
        first.train_row(step, {"loss": 1.0})
    (path,) = (tmp_path / "tensorboard").iterdir()
    os.truncate(path, path.stat().st_size - 5)
    second = make_monitor(tmp_path, start_step=10)
    second.train_row(20, {"loss": 2.0})
    assert scalars(tmp_path, "train/loss") == [(10, 1.0), (20, 2.0)]


def test_the_projector_has_the_points_of_the_last_validation(tmp_path):
    shown = iter([points(50), points(200)])
    monitor = make_monitor(tmp_path, points=lambda: next(shown))
    monitor.valid_row(10, {"eer": 0.5})
    before = {path for path in (tmp_path / "tensorboard").rglob("*") if path.is_file()}
    monitor.valid_row(20, {"eer": 0.25})
    monitor.close()
    assert before == {path for path in (tmp_path / "tensorboard").rglob("*") if path.is_file()}
    assert scalars(tmp_path, "valid/eer") == [(10, 0.5), (20, 0.25)]
    found, names = read_projector(tmp_path)
    assert found.tolist() == [[0, 200], [1, 200], [2, 200]]
    assert names == ["speaker\tutterance", "ann\tutt0", "ann\tutt1", "ann\tutt2"]


def test_a_projector_has_2000_points_from_first_to_last(tmp_path):
    monitor = make_monitor(tmp_path, points=lambda: points(0, 5001))
    monitor.valid_row(10, {"eer": 0.5})
    found, names = read_projector(tmp_path)
    assert len(found) == 2000 and len(names) == 2001
    assert names[1] == "ann\tutt0" and names[-1] == "ann\tutt5000"
    assert [f"ann\tutt{row:.0f}" for row in found[:, 0]] == names[1:]
