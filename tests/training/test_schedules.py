"""Schedules are functions of a step: tables of numbers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from outside import args_of, names_of
from torch.optim import lr_scheduler

from speakerlab.training.schedules import SCHEDULES, LearningRate, margin_ramp

STORED = Path(__file__).with_name("schedules.json")
PEERS = json.loads(STORED.read_text(encoding="utf-8"))
# of PEERS
PER_EPOCH = 8
NUM_STEPS = 40


def lr_of(
    name,
    args=None,
    *,
    peak=1.0,
    final=0.1,
    warmup=4,
    total=15,
    per_epoch=5,
    extended=(),
):
    return LearningRate(
        schedule=SCHEDULES[name],
        args=args or args_of(name),
        peak=peak,
        final=final,
        warmup_steps=warmup,
        total_steps=total,
        steps_per_epoch=per_epoch,
        extended=extended,
    )


@pytest.mark.parametrize(
    ("step", "lr"),
    [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (9, 0.55), (14, 0.1), (99, 0.1)],
)
def test_warmup_then_half_a_cosine(step, lr):
    # 4 steps of warm-up, then steps 4..14: step 9 is half-way, (1.0 + 0.1) / 2
    assert lr_of("cosine")(step) == pytest.approx(lr)
    without_warmup = lr_of("cosine", peak=0.2, final=0.0, warmup=0, total=5)
    assert without_warmup(0) == 0.2


@pytest.mark.parametrize(
    ("step", "lr"),
    # from 1 to 0.01 in ten equal factors; times 1/4 to 4/4 in the warm-up
    [(0, 0.25), (3, 10**-0.6), (4, 10**-0.8), (5, 0.1), (10, 0.01), (99, 0.01)],
)
def test_exponential_decay_from_the_first_step(step, lr):
    lr_at = lr_of("exponential", final=0.01, total=11)
    assert lr_at(step) == pytest.approx(lr)

    # from 0.1 in step 5 to 0.01 in step 15 instead of step 10
    lr_at = lr_of("exponential", final=0.01, total=16, extended=[(5, 11)])
    if step < 5:
        expected = lr
    else:
        exponent = -1 - (step - 5) / 10
        expected = max(10**exponent, 0.01)
    assert lr_at(step) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "args", "lrs"),
    # Steps 0, 3 (end of the warm-up), 4, 9, 14 and 19, with 5 steps per epoch, from 1 to 0.1.
    [
        ("constant", {}, [0.25, 1, 1, 1, 1, 1]),
        ("step", {"every_epochs": 1, "gamma": 0.5}, [0.25, 1, 1, 0.5, 0.25, 0.125]),
        ("step", {"every_epochs": 1, "gamma": 0.2}, [0.25, 1, 1, 0.2, 0.1, 0.1]),
        # cycles of 10 steps, 1 and then 0.55 high
        ("cyclic", {}, [0.025, 0.64, 0.82, 0.28, 0.1 + 0.45 * 0.8, 0.1 + 0.45 * 0.2]),
        (
            "one_cycle",
            {"initial": 0.2},
            [0.2, 1, 0.1 + 0.9 * 0.9829629, 0.55, 0.1153334, 0.1],
        ),
    ],
)
def test_other_schedules(name, args, lrs):
    # then steps 3 to 15 of one_cycle: step 9 is half-way
    total = 16 if name == "one_cycle" else 20
    lr_at = lr_of(name, args, total=total)
    rates = [lr_at(step) for step in (0, 3, 4, 9, 14, 19)]
    assert rates == pytest.approx(lrs)


@pytest.mark.parametrize(
    ("peer", "name", "args"),
    [
        ("wespeaker.ExponentialDecrease", "exponential", {}),
        ("wespeaker.TriAngular2 without warm-up", "cyclic", {}),
        ("wespeaker.WarmupCosineScheduler", "cosine", {}),
        ("wespeaker.WarmupLR_withStepDecay", "step", {"every_epochs": 2}),
        ("3dspeaker.WarmupCosineScheduler", "cosine", {}),
        ("3dspeaker.StepScheduler without warm-up", "step", {"every_epochs": 2}),
        ("speechbrain.CyclicLRScheduler without warm-up", "cyclic", {"gamma": 1.0}),
    ],
)
def test_schedules_are_those_of_other_toolkits(peer, name, args):
    warmup = 0 if peer.endswith("without warm-up") else PER_EPOCH
    # they end one step after the last
    lr_at = lr_of(
        name,
        args,
        peak=0.1,
        final=1e-3,
        warmup=warmup,
        total=NUM_STEPS + 1,
        per_epoch=PER_EPOCH,
    )
    rates = [lr_at(step) for step in range(NUM_STEPS)]
    expected = PEERS[peer]
    assert rates[warmup:] == pytest.approx(expected[warmup:])
    # They warm up from another first value, at most one step away.
    tolerance = 0.101 / PER_EPOCH
    assert rates[:warmup] == pytest.approx(expected[:warmup], abs=tolerance)


def test_one_cycle_is_that_of_torch():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    # from 0.1 / 25 to 0.1 / 25 / 4
    ends: dict[str, Any] = {"div_factor": 25, "final_div_factor": 4}
    torchs = lr_scheduler.OneCycleLR(
        optimizer,
        0.1,
        total_steps=20,
        pct_start=0.3,
        **ends,
    )
    lrs = [torchs.get_last_lr()[0]]
    for _ in range(19):
        optimizer.step()
        torchs.step()
        lrs += torchs.get_last_lr()
    lr_at = lr_of(
        "one_cycle",
        peak=0.1,
        final=1e-3,
        warmup=6,
        total=20,
    )
    rates = [lr_at(step) for step in range(20)]
    assert rates == pytest.approx(lrs)


def lrs_of(total, *extended, name="cosine"):
    lr_at = lr_of(name, total=total, extended=extended)
    return [lr_at(step) for step in range(30)]


def test_an_extension_begins_a_new_cosine_at_the_present_value():
    begun = lrs_of(15)
    longer = lrs_of(30, (9, 15))
    assert longer[:10] == begun[:10]
    assert longer[9] == pytest.approx(0.55)
    assert longer[19] == pytest.approx((0.55 + 0.1) / 2)
    assert longer[29] == pytest.approx(0.1)

    shortened = lrs_of(12, (9, 15))
    assert shortened[11] == pytest.approx(0.1)
    after_the_end = lrs_of(30, (15, 15))
    assert after_the_end[15:] == pytest.approx([0.1] * 15)

    # in the warm-up, and changed twice in one step: as if it had begun with the new length
    whole = lrs_of(30)
    in_warmup = lrs_of(30, (2, 15))
    assert in_warmup == whole
    in_one_step = lrs_of(30, (4, 12), (4, 15))
    assert in_one_step == whole

    once = lrs_of(20, (9, 15))
    twice = lrs_of(30, (9, 15), (12, 20))
    assert twice[:12] == once[:12]
    assert twice[12] == pytest.approx(once[12])
    falling = twice[4:]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("name", names_of("schedule", SCHEDULES))
def test_the_rate_is_a_function_of_the_step(name):
    lr_at = lr_of(name, total=30)
    rates = [lr_at(step) for step in range(30)]
    for rate in rates:
        assert 0 <= rate < math.inf
    backwards = [lr_at(step) for step in reversed(range(30))]
    assert backwards == rates[::-1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_extension_never_makes_the_rate_jump(name):
    begun = lrs_of(15, name=name)
    longer = lrs_of(30, (9, 15), name=name)
    assert longer[:10] == pytest.approx(begun[:10])
    # these do not depend on the length
    if name in ("step", "cyclic", "constant"):
        assert longer == begun
    else:
        falling = longer[9:]
        assert falling == sorted(falling, reverse=True)
        assert longer[29] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("step", "margin"),
    # half-way all but sqrt(1e-3) = 3.16 % of the way is closed
    [(0, 0.0), (9, 0.0), (10, 0.0), (15, 0.3 * (1 - 10**-1.5)), (20, 0.3), (100, 0.3)],
)
def test_margin_ramp(step, margin):
    actual = margin_ramp(
        step,
        initial=0.0,
        final=0.3,
        start_step=10,
        end_step=20,
    )
    assert actual == pytest.approx(margin)

    # without a ramp it is final from the start
    actual = margin_ramp(
        0,
        initial=0.0,
        final=0.5,
        start_step=0,
        end_step=0,
    )
    assert actual == 0.5
