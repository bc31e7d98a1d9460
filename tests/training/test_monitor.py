"""Rows of metrics: written once, cut on resume, read back from TensorBoard's files."""

import json
import logging
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import (
    HParamsPluginData,  # pyright: ignore[reportAttributeAccessIssue] # made when imported
)

from speakerlab.training import monitor as monitor_module
from speakerlab.training.monitor import Monitor


def make_monitor(folder, start_step=0, **options):
    monitor = Monitor(folder, total_steps=40, every_seconds=0.0, **options)
    monitor.begin(start_step)
    return monitor


def test_a_slow_step_logs_its_progress(tmp_path, caplog, monkeypatch):
    """A step of a minute in six micro-batches: a line within 10 s, then one every 30 s."""
    now = 0.0
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: now)
    monitor = Monitor(
        tmp_path,
        total_steps=40,
        every_seconds=10.0,
    )
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
    assert seen[1] == 10.0
    gaps = [b - a for a, b in zip(seen, seen[1:])]
    assert max(gaps) <= 30
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "step 0.1667/40 0:00:10 elapsed, ETA 0:39:50"
    after_a_row = "step 2/40 ETA 0:38:00 loss 1"
    assert any(line.startswith(after_a_row) for line in lines)


def rows(folder):
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(
        str(folder / "tensorboard"),
        size_guidance={"images": 0},
    )
    events.Reload()
    return events


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    events = read_events(folder).Scalars(name)
    return [(event.step, event.value) for event in events]


@pytest.mark.parametrize(
    "damage",
    [
        b'{"kind": "train", "st',
        b"\0" * 40 + b"\n",
        b"[]\n",
        b"{}\n",
        b'{"step": "20"}\n',
    ],
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
    first_row, second_row = rows(tmp_path)
    assert first_row["step"] == 10
    assert first_row["loss"] == 1
    assert second_row["step"] == 20
    assert second_row["loss"] == 2


@pytest.mark.parametrize(
    "clock",
    [0, -3600],
    ids=["the same second", "a host an hour behind"],
)
def test_no_step_is_there_twice_after_resumes(tmp_path, monkeypatch, clock):
    """Each attempt resumes from step 10 with another loss, as after a roll-back."""
    # TensorBoard's files are named by the time
    at = [2_000_000_000.0]
    monkeypatch.setattr(monitor_module.time, "time", lambda: at[0])
    for attempt in range(12):
        start_step = 10 if attempt else 0
        monitor = make_monitor(tmp_path, start_step=start_step)
        steps = (20, 30) if attempt else (10, 20, 30)
        for step in steps:
            monitor.train_row(step, {"loss": float(attempt)})
        if attempt < 11:
            monitor.valid_row(30, {"eer": 0.25})
        monitor.close()
        at[0] += clock
    expected = [(10, 0.0), (20, 11.0), (30, 11.0)]
    assert scalars(tmp_path, "train/loss") == expected
    losses = [row["loss"] for row in rows(tmp_path)]
    assert losses == [0.0, 11.0, 11.0]


def test_an_event_cut_by_a_loss_of_power_hides_no_later_one(tmp_path):
    first = make_monitor(tmp_path)
    for step in (10, 20, 30):
        first.train_row(step, {"loss": 1.0})
    # the last bytes of the event of step 30 are missing
    (path,) = (tmp_path / "tensorboard").iterdir()
    size = path.stat().st_size
    os.truncate(path, size - 5)

    second = make_monitor(tmp_path, start_step=10)
    second.train_row(20, {"loss": 2.0})
    expected = [(10, 1.0), (20, 2.0)]
    assert scalars(tmp_path, "train/loss") == expected


def test_the_configuration_is_shown_as_text_and_as_hyper_parameters(tmp_path):
    exp = tmp_path / "campplus_tiny_s0"
    settings = {"training.lr": 0.1, "seed": 3, "augment.speeds": [1.0, 0.9]}
    settings |= {"data.noise": None, "runtime.deterministic": False}
    options = {"config": "training:\n  lr: 0.1\n", "settings": settings}
    for start_step in (0, 0, 20):
        monitor = make_monitor(exp, start_step=start_step, **options)
        monitor.train_row(start_step + 10, {"loss": 1.0})
        monitor.close()

    # The reader of the server, which also drops texts of an earlier start.
    events = plugin_event_accumulator.EventAccumulator(str(exp / "tensorboard"))
    events.Reload()
    texts = events.Tensors("config")
    # Twice from the beginning, of which TensorBoard keeps the last, and once from step 20.
    assert [text.step for text in texts] == [1, 21]
    shown = texts[0].tensor_proto.string_val[0].decode()
    assert shown == "    training:\n      lr: 0.1"

    content = events.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    start = HParamsPluginData.FromString(content).session_start_info
    assert start.group_name == exp.name
    assert start.hparams["training.lr"].number_value == 0.1
    assert start.hparams["seed"].number_value == 3
    assert start.hparams["augment.speeds"].string_value == "[1.0, 0.9]"
    assert start.hparams["data.noise"].string_value == "None"
    assert start.hparams["runtime.deterministic"].bool_value is False
    assert len(start.hparams) == len(settings)
