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


def test_an_extension_begins_a_new_cosine_at_the_present_value():
    kind = {"peak": 1.0, "final": 0.1, "warmup_steps": 4}

    def lrs(total, *extended):
        return [warmup_cosine(n, **kind, total_steps=total, extended=extended) for n in range(30)]

    begun, longer = lrs(15), lrs(30, (9, 15))
    assert longer[:10] == begun[:10] and longer[9] == pytest.approx(0.55)
    assert longer[19] == pytest.approx((0.55 + 0.1) / 2) and longer[29] == pytest.approx(0.1)
    assert lrs(12, (9, 15))[11] == pytest.approx(0.1)  # shortened
    assert lrs(30, (15, 15))[15:] == pytest.approx([0.1] * 15)  # finished
    # in the warm-up, and changed twice in one step: as if it had begun with the new length
    assert lrs(30, (2, 15)) == lrs(30, (4, 12), (4, 15)) == lrs(30)
    twice = lrs(30, (9, 15), (12, 20))
    assert twice[:12] == lrs(20, (9, 15))[:12]
    assert twice[12] == pytest.approx(lrs(20, (9, 15))[12])
    assert all(a >= b for a, b in zip(twice[4:], twice[5:]))


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
