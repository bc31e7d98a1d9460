"""Schedules are functions of a step: tables of numbers."""

import pytest

from speakerlab.training.schedules import margin_ramp, warmup_and_decay


@pytest.mark.parametrize(
    ("step", "lr"),
    [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (9, 0.55), (14, 0.1), (99, 0.1)],
)
def test_warmup_then_half_a_cosine(step, lr):
    # 4 steps of warm-up, then steps 4..14: step 9 is half-way, (1.0 + 0.1) / 2
    got = warmup_and_decay(step, peak=1.0, final=0.1, warmup_steps=4, total_steps=15)
    assert got == pytest.approx(lr)
    assert warmup_and_decay(0, peak=0.2, final=0.0, warmup_steps=0, total_steps=5) == 0.2


@pytest.mark.parametrize(
    ("step", "lr"),
    # from 1 to 0.01 in ten equal factors; times 1/4 to 4/4 in the warm-up
    [(0, 0.25), (3, 10**-0.6), (4, 10**-0.8), (5, 0.1), (10, 0.01), (99, 0.01)],
)
def test_exponential_decay_from_the_first_step(step, lr):
    kind = {"peak": 1.0, "final": 0.01, "warmup_steps": 4, "decay": "exponential"}
    assert warmup_and_decay(step, **kind, total_steps=11) == pytest.approx(lr)
    # from 0.1 in step 5 to 0.01 in step 15 instead of step 10
    longer = warmup_and_decay(step, **kind, total_steps=16, extended=[(5, 11)])
    assert longer == pytest.approx(lr if step < 5 else max(10 ** (-1 - (step - 5) / 10), 0.01))


def test_an_extension_begins_a_new_cosine_at_the_present_value():
    kind = {"peak": 1.0, "final": 0.1, "warmup_steps": 4}

    def lrs(total, *extended):
        return [
            warmup_and_decay(n, **kind, total_steps=total, extended=extended) for n in range(30)
        ]

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
