"""Rows of metrics: written once, cut on resume, read back from TensorBoard's files."""

import json
import logging

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from speakerlab.training.monitor import Monitor


def make_monitor(folder, start_step=0):
    return Monitor(folder, start_step=start_step, total_steps=40, every_seconds=0.0)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_beyond_the_checkpoint_are_cut_on_resume(tmp_path):
    first = make_monitor(tmp_path)
    for step in (10, 20, 30):
        first.train_row(step, {"loss": step / 10})
    first.valid_row(30, {"eer": 0.25})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # a kill in the middle of a line
    second = make_monitor(tmp_path, start_step=20)
    second.train_row(30, {"loss": 7.0})
    second.close()
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(10, 1), (20, 2), (30, 7)]


def test_tensorboard_has_the_same_numbers_and_purges_the_rest(tmp_path):
    first = make_monitor(tmp_path)
    first.train_row(10, {"loss": 1.0})
    first.train_row(20, {"loss": 2.0})
    first.close()
    second = make_monitor(tmp_path, start_step=10)
    second.train_row(20, {"loss": 5.0})
    second.valid_row(20, {"eer": 0.125})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(10, 1.0), (20, 5.0)]
    assert events.Scalars("valid/eer")[0].value == 0.125


def test_lines_tell_the_step_and_the_time_left(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    monitor = make_monitor(tmp_path)
    monitor.train_row(40, {"loss": 1.23456})
    assert "step 40/40 ETA 0:00:00 loss 1.235" in caplog.text
