"""Warnings about models that do not learn."""

import math

import pytest

from speakerlab.training.progress import LearningWatch


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
