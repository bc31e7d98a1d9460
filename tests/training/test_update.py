"""Bad steps change nothing and are counted; too many in a row are an error. Sums of metrics."""

import copy
import io
import math
from functools import partial

import pytest
import torch
from outside import args_of, names_of
from refusals import refuses
from torch import nn

from speakerlab.core.batch import Batch
from speakerlab.training import update as module
from speakerlab.training import waiting
from speakerlab.training.distributed import start_ranks
from speakerlab.training.optimizers import OPTIMIZERS
from speakerlab.training.task import MicroBatch, TaskOutput
from speakerlab.training.update import (
    MAX_BAD_STEPS,
    MetricSums,
    NumericError,
    Update,
    Updater,
)

CPU = torch.device("cpu")
# not fused, so it knows nothing of bad steps
PLAIN = partial(torch.optim.SGD, momentum=0.9)
every_optimizer = pytest.mark.parametrize(
    "name", ["plain", *names_of("optimizer", OPTIMIZERS)]
)


def make(name="sgd", *, scale_loss=False, clip_norm=1e9, seed=0):
    """Return a small model with BatchNorm and its updater."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.Linear(4, 1),
    )
    build = PLAIN if name == "plain" else OPTIMIZERS[name]
    optimizer = build(model.parameters(), lr=0.1, **args_of(name))
    updater = Updater(
        model,
        optimizer,
        device=CPU,
        clip_norm=clip_norm,
        scale_loss=scale_loss,
    )
    return model, updater


def step(model, updater, x, lr=0.1):
    updater.before_step()
    loss = model(x).square().mean()
    updater.scale_loss(loss).backward()
    return updater.step(lr)


def everything(model, updater):
    """Return copies of all tensors that a bad step must not change."""
    state = updater.optimizer.state_dict()["state"]
    tensors = list(model.state_dict().values())
    for state_of_parameter in state.values():
        tensors += state_of_parameter.values()
    return [tensor.clone() for tensor in tensors]


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@every_optimizer
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_step_keeps_parameters_momentum_and_statistics(name, first, poison):
    model, updater = make(name)
    x = torch.randn(8, 3)
    if not first:
        step(model, updater, x)
    before = everything(model, updater)
    bad = x.clone()
    bad[0, 0] = poison
    update = step(model, updater, bad)
    assert update.is_bad == 1
    assert int(updater.skipped) == 1
    # Adam has no state before its first step
    if before[-1].dim():
        after = everything(model, updater)
        assert_same(after[: len(before)], before)
    for tensor in everything(model, updater):
        assert tensor.isfinite().all()

    # the next good step equals that of a model without the bad one
    other, other_updater = make(name)
    for _ in range(1 if first else 2):
        step(other, other_updater, x)
    step(model, updater, x)
    expected = everything(other, other_updater)
    assert_same(everything(model, updater), expected)


@every_optimizer
def test_steps_follow_the_learning_rate(name):
    model, updater = make(name)
    x = torch.randn(8, 3)
    begun = everything(model, updater)[0]
    step(model, updater, x)
    moved = everything(model, updater)[0]
    assert not torch.equal(moved, begun)
    step(model, updater, x, lr=0.0)
    stayed = everything(model, updater)[0]
    assert torch.equal(stayed, moved)


@every_optimizer
def test_a_resumed_optimizer_takes_the_same_steps(name):
    model, updater = make(name)
    x = torch.randn(8, 3)
    file = io.BytesIO()
    for _ in range(3):
        step(model, updater, x)
    checkpoint = [model.state_dict(), updater.optimizer.state_dict()]
    torch.save(checkpoint, file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed, resumed_updater = make(name, seed=1)
    resumed.load_state_dict(weights)
    resumed_updater.optimizer.load_state_dict(state)
    step(model, updater, x)
    step(resumed, resumed_updater, x)
    expected = everything(model, updater)
    assert_same(everything(resumed, resumed_updater), expected)


def test_statistics_keep_their_names_and_are_restored_from_before_a_step():
    norms = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).double()
    plain = copy.deepcopy(norms)
    optimizer = OPTIMIZERS["sgd"](norms.parameters(), lr=0.1)
    updater = Updater(
        norms,
        optimizer,
        device=CPU,
        clip_norm=1.0,
        scale_loss=False,
    )
    # one flat tensor of the moments, one of the counts
    assert [flat.numel() for flat in updater.statistics] == [12, 2]

    updater.before_step()
    before = copy.deepcopy(plain.state_dict())
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 3, dtype=torch.float64, generator=generator)
        expected = plain(x)
        assert torch.equal(norms(x), expected)
    after = plain.state_dict()
    assert_same(norms.state_dict(), after)

    updater.restore()
    assert_same(norms.state_dict(), before)
    name = "1.running_var"
    assert not torch.equal(before[name], after[name])


def test_good_steps_are_those_of_the_plain_optimizer():
    model, updater = make(clip_norm=0.5)
    twin, _ = make()
    plain = torch.optim.SGD(
        twin.parameters(),
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
    )
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 3, generator=generator)
        update = step(model, updater, x)

        loss = twin(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        plain.step()
        plain.zero_grad()

        assert update.is_bad == 0
        torch.testing.assert_close(norm, update.grad_norm)
        torch.testing.assert_close(
            model.state_dict(),
            twin.state_dict(),
            rtol=0,
            atol=1e-7,
        )


def test_twenty_bad_steps_in_a_row_are_an_error_and_a_good_one_ends_the_row():
    model, updater = make()
    bad = torch.full((8, 3), math.nan)

    def take(x, number):
        update = step(model, updater, x)
        updater.check(number, update)

    for number in range(MAX_BAD_STEPS - 1):
        take(bad, number)
    take(torch.randn(8, 3), 19)
    for number in range(20, 20 + MAX_BAD_STEPS - 1):
        take(bad, number)
    with refuses("step 39", "20 steps", math.nan, error=NumericError) as error:
        take(bad, 39)
    assert error.value.step == 39
    assert int(updater.skipped) == 2 * MAX_BAD_STEPS - 1
    updater.reset()
    take(bad, 40)


def test_split_parameters_count_in_the_norm_by_their_sum_over_ranks():
    """Norms 3 on this rank and 4 on the other give 5, by which all is clipped."""
    rows = nn.Parameter(torch.zeros(1))
    shared = nn.Parameter(torch.zeros(1))
    module = nn.ParameterList([shared, rows])
    updater = Updater(
        module,
        torch.optim.SGD(
            module.parameters(),
            lr=1.0,
            fused=True,
        ),
        device=CPU,
        clip_norm=1.0,
        scale_loss=False,
        split=[rows],
        sum_over_ranks=lambda square: square + 16.0,
    )
    shared.grad = torch.zeros(1)
    rows.grad = torch.tensor([3.0])
    update = updater.step(1.0)
    assert update.grad_norm == 5.0
    expected = torch.tensor([-0.6])
    torch.testing.assert_close(rows.detach(), expected)


def test_the_loss_scale_halves_doubles_and_has_a_floor():
    model, updater = make(scale_loss=True)
    x = torch.randn(8, 3)
    bad = torch.full((8, 3), math.inf)
    assert float(updater.loss_scale) == 65536
    plain, plain_updater = make()
    step(model, updater, x)
    # a power of two: the same bits
    step(plain, plain_updater, x)
    expected = everything(plain, plain_updater)
    assert_same(everything(model, updater), expected)

    step(model, updater, bad)
    assert float(updater.loss_scale) == 32768
    updater.good_steps.fill_(1999)
    step(model, updater, x)
    assert float(updater.loss_scale) == 65536
    assert int(updater.good_steps) == 0
    with refuses("step 16", "loss scale", 0.5, error=NumericError):
        for number in range(17):
            update = step(model, updater, bad)
            updater.check(number, update)
            # only the floor is tested
            updater.bad_in_a_row.zero_()
    updater.reset()
    assert float(updater.loss_scale) == 65536


def test_a_loss_scale_below_the_floor_is_never_loaded():
    _, updater = make(scale_loss=True)
    counts = {"good_steps": 3, "skipped": 2, "bad_in_a_row": 1}
    updater.load_state(counts | {"loss_scale": 0.0})
    assert updater.state() == counts | {"loss_scale": 1.0}


@pytest.mark.gpu
@pytest.mark.parametrize("scale_loss", [False, True])
def test_on_a_gpu_nothing_waits_and_the_verdict_comes_one_step_late(scale_loss):
    gpu = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.Linear(4, 1),
    )
    model = model.to(gpu)
    optimizer = OPTIMIZERS["sgd"](model.parameters(), lr=0.1)
    updater = Updater(
        model,
        optimizer,
        device=gpu,
        clip_norm=1.0,
        scale_loss=scale_loss,
    )
    x = torch.randn(8, 3, device=gpu)
    bad = torch.full((8, 3), math.nan, device=gpu)
    step(model, updater, x)
    before = everything(model, updater)
    torch.cuda.set_sync_debug_mode("error")
    try:
        updates = [step(model, updater, bad) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(everything(model, updater), before)
    assert int(updater.skipped) == 2
    updater.bad_in_a_row.fill_(MAX_BAD_STEPS)
    updater.check(1, updates[0])
    with refuses("step 1", "20 steps", error=NumericError):
        updater.check(2, updates[1])


def make_sums():
    return MetricSums(start_ranks(timeout_minutes=1))


def add_step(sums, *, loss, norm, bad):
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
    add_step(sums, loss=2.0, norm=10.0, bad=False)
    add_step(sums, loss=nan, norm=nan, bad=True)
    add_step(sums, loss=4.0, norm=2.0, bad=False)
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
    add_step(sums, loss=infinity, norm=infinity, bad=True)
    row = sums.take_row(1, 0.0)
    assert row == {
        "clipped": 0.0,
        "silent": 0,
        "crops_per_second": 0.0,
        "data_wait": 0.0,
    }


def test_waiting_is_reported_beyond_a_fifth_and_rarely(caplog, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    # Other programs may use the cores while this runs.
    monkeypatch.setattr(waiting, "thread_seconds", lambda threads: {})
    sums = make_sums()

    def take_row(step, wait, seconds):
        add_step(sums, loss=1.0, norm=1.0, bad=False)
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
