"""A training that guesses for a thousand steps, or whose loss triples, is told once."""

import math

import pytest

from speakerlab.training.progress import LearningWatch


def feed(watch, rows, *, first=10, every=10):
    """Lines told for (loss, accuracy, margin) rows."""
    lines = [
        watch.add(first + every * i, loss=loss, accuracy=accuracy, margin=margin)
        for i, (loss, accuracy, margin) in enumerate(rows)
    ]
    return [line for line in lines if line]


def watch(**more):
    return LearningWatch(**{"num_classes": 1000, "warmup_steps": 100, "stop": False, **more})


def test_guessing_for_a_thousand_steps_is_told_once():
    guess = math.log(1000)
    lines = feed(watch(), [(guess, 0.001, 0.0)] * 300)
    assert len(lines) == 1
    assert lines[0].startswith("step 1110: does not learn: ") and "6.91" in lines[0]


@pytest.mark.parametrize(
    "rows",
    [
        [(6.9, 0.001, 0.0)] * 110,  # too short: 1000 steps after a warm-up of 100
        [(6.9, 0.5, 0.2)] * 300,  # a margin raises the loss; it is right nonetheless
        [(6.0, 0.001, 0.0)] * 300,
        ([(6.9, 0.001, 0.0)] * 90 + [(5.0, 0.2, 0.0)]) * 4,
        [(1.0, 0.9, 0.0)] * 100 + [(4.0, 0.5, 0.2)] * 200,  # the margin came
        [(0.001, 1.0, 0.0)] * 100 + [(0.2, 1.0, 0.0)] * 200,  # nothing yet
    ],
)
def test_what_is_no_trouble_is_not_told(rows):
    assert feed(watch(), rows) == []


def test_a_loss_that_triples_is_told():
    lines = feed(watch(), [(1.0, 0.9, 0.2)] * 100 + [(3.1, 0.5, 0.2)] * 200)
    assert len(lines) == 1 and "diverges: loss 3.1 after 1, for 1000 steps" in lines[0]


def test_its_state_survives_a_resume():
    rows = [(1.0, 0.9, 0.2)] * 50 + [(3.1, 0.5, 0.2)] * 90
    whole, first, second = watch(), watch(), watch()
    lines = feed(whole, rows)
    told = feed(first, rows[:77])
    second.load_state(first.state())
    assert told + feed(second, rows[77:], first=10 + 770) == lines
