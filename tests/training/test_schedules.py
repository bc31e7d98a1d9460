"""Schedules are functions of a step: tables of numbers."""

import pytest

from speakerlab.training.schedules import margin_ramp, warmup_cosine


@pytest.mark.parametrize(
    ("step", "lr"),
    [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (9, 0.55), (14, 0.1), (99, 0.1)],
)
def test_warmup_then_half_a_cosine(step, lr):
    # 4 steps of warm-up, then steps 4..14: step 9 is half-way, (1.0 + 0.1) / 2
    got = warmup_cosine(step, peak=1.0, final=0.1, warmup_steps=4, total_steps=15)
    assert got == pytest.approx(lr)
    assert warmup_cosine(0, peak=0.2, final=0.0, warmup_steps=0, total_steps=5) == 0.2


@pytest.mark.parametrize(
    ("step", "margin"),
    # half-way all but sqrt(1e-3) = 3.16 % of the way is closed
    [(0, 0.0), (9, 0.0), (10, 0.0), (15, 0.3 * (1 - 10**-1.5)), (20, 0.3), (100, 0.3)],
)
def test_margin_ramp(step, margin):
    got = margin_ramp(step, initial=0.0, final=0.3, start_step=10, end_step=20)
    assert got == pytest.approx(margin)
    # without a ramp it is final from the start
    assert margin_ramp(0, initial=0.0, final=0.5, start_step=0, end_step=0) == 0.5
