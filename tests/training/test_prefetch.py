"""Making features ahead changes no value, and waiting for data is told."""

import logging
import re
import time

import pytest
import torch
from torch import nn

from speakerlab.core.batch import Batch
from speakerlab.frontend.augment import Augment
from speakerlab.frontend.fbank import Fbank
from speakerlab.losses.head import Head
from speakerlab.training import prefetch
from speakerlab.training.precision import resolve_precision
from speakerlab.training.prefetch import Prefetcher, WaitTeller
from speakerlab.training.task import SpeakerTask, dummy_batch

SAMPLES = 8000
CPU = torch.device("cpu")
GPU = pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)


class Tiny(nn.Module):
    """An embedder of one layer with dropout, which draws after the front end's dither."""

    def __init__(self) -> None:
        super().__init__()
        self.fbank = Fbank(dither=0.01)
        self.backbone = nn.Sequential(nn.Dropout(0.5), nn.Linear(80, 4))


class MeanHead(Head):
    def forward(self, emb_BTD, label_B, margin):
        logits_BC = emb_BTD.mean(1)
        return nn.functional.cross_entropy(logits_BC, label_B), logits_BC


def make_task(device: torch.device) -> SpeakerTask:
    torch.manual_seed(0)
    task = SpeakerTask(
        augment=Augment({}, num_samples=SAMPLES),
        embedder=Tiny(),
        head=MeanHead(),
        precision=resolve_precision("fp32", device, None),
    )
    return task.to(device)


def make_batches(count: int, rows: int = 4) -> list[Batch]:
    """Micro-batches that differ in loudness, on the CPU."""
    batch = dummy_batch(num_rows=rows, num_samples=SAMPLES, device=CPU)
    return [
        batch.map(lambda t, n=number: t // (n + 1) if t.dtype == torch.int16 else t)
        for number in range(count)
    ]


def losses(
    device: torch.device, *, overlap: bool, count: int = 8, disturb: int = 0
) -> list[torch.Tensor]:
    """Loss, features and silent crops of each micro-batch, and the gradient of them all.

    disturb: size of matrices multiplied on the main stream, so that it is late.
    """
    task = make_task(device)
    begun: list[int] = []

    def begin(number: int) -> None:
        begun.append(number)
        task.train(number != 5)  # no dither in one of them
        torch.manual_seed(1000 + number)

    inputs = Prefetcher(
        task, make_batches(count), device=device, begin=begin, first=3, overlap=overlap
    )
    found = []
    load = torch.ones(disturb, disturb, device=device)
    for _ in range(count):
        feats_BTF, label_B, silent, *_ = inputs.take()
        for _ in range(20 if disturb else 0):
            load = load @ load / disturb
        output = task(feats_BTF, label_B, 0.0)
        output.loss.backward()
        inputs.look_ahead()
        torch.rand(5, device=device)  # what others draw, and set, in between
        task.eval()
        found += [output.loss.detach(), feats_BTF.clone(), silent]
        del feats_BTF, label_B
    with pytest.raises(StopIteration):
        inputs.take()
    assert sorted(set(begun)) == list(range(3, 3 + count))
    weight = task.get_submodule("embedder.backbone.1").get_parameter("weight")
    assert weight.grad is not None
    return [*found, weight.grad]


@pytest.mark.parametrize("device", [CPU, GPU])
def test_making_features_ahead_changes_no_bit(device):
    plain = losses(device, overlap=False)
    ahead = losses(device, overlap=True)
    assert len(plain) == 25
    for a, b in zip(plain, ahead):
        assert torch.equal(a, b)
    assert len({float(loss) for loss in plain[:-1:3]}) == 8


@pytest.mark.gpu
def test_the_streams_wait_for_one_another():
    """With the main stream seconds late, memory and counts are used in the order of a single one"""
    device = torch.device("cuda", 0)
    plain = losses(device, overlap=False, count=30)
    ahead = losses(device, overlap=True, count=30, disturb=4096)
    torch.cuda.synchronize()
    for a, b in zip(plain, ahead):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_on_a_gpu_only_idle_time_is_waiting():
    """While the device computes, a batch that is late costs nothing."""
    device = torch.device("cuda", 0)

    def slow_batches():
        for batch in make_batches(3):
            time.sleep(0.2)
            yield batch

    inputs = Prefetcher(make_task(device), slow_batches(), device=device, begin=torch.manual_seed)
    load = torch.ones(8192, 8192, device=device)
    load @ load  # kernels are chosen
    torch.cuda.synchronize()
    inputs.take()
    assert 0.19 < inputs.take_wait_seconds() < 1
    for _ in range(60):  # takes far longer than the 0.2 s of the batch
        load = load @ load / 8192
    inputs.look_ahead()
    assert inputs.take_wait_seconds() < 0.1
    torch.cuda.synchronize()
    inputs.take()
    inputs.look_ahead()
    assert 0.1 < inputs.take_wait_seconds() < 1


def test_nothing_is_made_ahead_on_a_cpu():
    task = make_task(CPU)
    asked: list[int] = []

    def batches():
        for number, batch in enumerate(make_batches(3)):
            asked.append(number)
            yield batch

    inputs = Prefetcher(task, batches(), device=CPU, begin=torch.manual_seed)
    for number in range(3):
        inputs.take()
        inputs.look_ahead()
        assert asked == list(range(number + 1))


def test_the_time_of_waiting_is_that_of_the_batches_alone():
    def batches():
        for batch in make_batches(2):
            time.sleep(0.05)
            yield batch

    inputs = Prefetcher(
        make_task(CPU), batches(), device=CPU, begin=lambda _number: time.sleep(0.2)
    )
    inputs.take()
    assert 0.05 <= inputs.take_wait_seconds() < 0.15
    assert inputs.take_wait_seconds() == 0.0


def test_waiting_is_told_beyond_a_fifth_and_seldom(caplog):
    teller = WaitTeller()
    teller.add(10, 60.0, 61.0)  # workers start
    assert caplog.records == []
    for step in range(20, 80, 10):  # 30 s of them: 4.8 s waited for
        teller.add(step, 0.8, 5.0)
    assert caplog.records == []
    for step in range(80, 140, 10):
        teller.add(step, 1.2, 5.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.match(
        r"step 130: training waits for data, got 24 % of the last 30 s; give it more CPUs, ",
        record.getMessage(),
    )
    for step in range(140, 1330, 10):  # not again within ten minutes
        teller.add(step, 5.0, 5.0)
    assert len(caplog.records) == 1
    teller.add(1330, 5.0, 5.0)
    assert len(caplog.records) == 2 and "got 100 % of the last 600 s" in caplog.text
    assert prefetch.MAX_WAIT == 0.2
