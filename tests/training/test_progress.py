"""Sums of metrics between rows, and warnings about slow data and models that do not learn."""

import math

import pytest
import torch

from speakerlab.core.batch import Batch
from speakerlab.training import progress
from speakerlab.training.distributed import start_ranks
from speakerlab.training.progress import LearningWatch, MetricSums
from speakerlab.training.task import MicroBatch, TaskOutput
from speakerlab.training.update import Update


def make_sums():
    return MetricSums(start_ranks(timeout_minutes=1))


def add(sums, *, loss, norm, bad):
    """Add a step of two micro-batches of two crops, one right and one silent each."""
    count = torch.tensor(1)
    batch = Batch(*[torch.zeros(2)] * 5, draws={})
    inputs = MicroBatch(batch.wave_BS, count, batch)
    output = TaskOutput(torch.tensor(loss), count)
    for _ in range(2):
        sums.add_micro_batch(output, inputs)
    is_bad = torch.tensor(float(bad))
    update = Update(torch.tensor(norm), is_bad)
    sums.add_step(update, clip_norm=5.0)


def test_means_are_over_the_good_steps(monkeypatch):
    sums = make_sums()
    nan = float("nan")
    add(sums, loss=2.0, norm=10.0, bad=False)
    add(sums, loss=nan, norm=nan, bad=True)
    add(sums, loss=4.0, norm=2.0, bad=False)
    sums.started_at -= 2.0
    row = sums.take_row(3, 1.0)
    assert row["loss"] == 3.0
    assert row["accuracy"] == 0.5
    assert row["grad_norm"] == 6.0
    assert row["clipped"] == 1 / 3
    assert row["silent"] == 4
    assert abs(row["crops_per_second"] - 4.0) < 0.2
    assert abs(row["data_wait"] - 0.5) < 0.02
    assert not sums.sums.any()


def test_a_row_of_skipped_steps_has_no_loss():
    sums = make_sums()
    infinity = float("inf")
    add(sums, loss=infinity, norm=infinity, bad=True)
    row = sums.take_row(1, 0.0)
    assert row == {
        "clipped": 0.0,
        "silent": 0,
        "crops_per_second": 0.0,
        "data_wait": 0.0,
    }


def test_waiting_is_reported_beyond_a_fifth_and_rarely(caplog, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    sums = make_sums()

    def take_row(step, wait, seconds):
        add(sums, loss=1.0, norm=1.0, bad=False)
        clock[0] += seconds
        sums.take_row(step, wait)

    # workers start
    take_row(10, 60.0, 61.0)
    # 30 s, of which 4.8 s are waited for
    for step in range(20, 80, 10):
        take_row(step, 0.8, 5.0)

    assert caplog.records == []
    for step in range(80, 140, 10):
        take_row(step, 1.2, 5.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("step 130: ")
    assert "24 %" in record.getMessage()

    # not again within ten minutes
    for step in range(140, 1330, 10):
        take_row(step, 5.0, 5.0)
    assert len(caplog.records) == 1
    take_row(1330, 5.0, 5.0)
    assert len(caplog.records) == 2
    assert "100 % of the last 600 s" in caplog.text


def make_watch():
    return LearningWatch(num_classes=1000, warmup_steps=100, stop=False)


def feed(watch, rows, *, first=10):
    """Return the warnings for (loss, accuracy, margin) rows, one every ten steps."""
    lines = []
    for number, (loss, accuracy, margin) in enumerate(rows):
        row = {"loss": loss, "accuracy": accuracy, "margin": margin}
        line = watch.add(first + 10 * number, row)
        if line:
            lines.append(line)
    return lines


@pytest.mark.parametrize(
    ("rows", "warning"),
    [
        ([(math.log(1000), 0.001, 0.0)] * 300, "step 1110: does not learn: loss 6.91"),
        (
            [(1.0, 0.9, 0.2)] * 100 + [(3.1, 0.5, 0.2)] * 200,
            "diverges: loss 3.1 after 1, for 1000",
        ),
        # shorter than 1000 steps after a warm-up of 100
        ([(6.9, 0.001, 0.0)] * 110, ""),
        # a margin raises the loss, but not the errors
        ([(6.9, 0.5, 0.2)] * 300, ""),
        ([(6.0, 0.001, 0.0)] * 300, ""),
        (([(6.9, 0.001, 0.0)] * 90 + [(5.0, 0.2, 0.0)]) * 4, ""),
        # the margin grew
        ([(1.0, 0.9, 0.0)] * 100 + [(4.0, 0.5, 0.2)] * 200, ""),
        # still a low loss
        ([(0.001, 1.0, 0.0)] * 100 + [(0.2, 1.0, 0.0)] * 200, ""),
    ],
)
def test_a_model_that_does_not_learn_is_reported_once(rows, warning):
    lines = feed(make_watch(), rows)
    assert len(lines) == bool(warning)
    assert all(warning in line for line in lines)


def test_the_watch_continues_after_a_resume():
    rows = [(1.0, 0.9, 0.2)] * 50 + [(3.1, 0.5, 0.2)] * 90
    whole = make_watch()
    first = make_watch()
    second = make_watch()
    before = feed(first, rows[:77])
    second.load_state(first.state())
    after = feed(second, rows[77:], first=10 + 770)
    assert before + after == feed(whole, rows)
