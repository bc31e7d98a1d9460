"""Making micro-batches ahead changes no value; only idle time counts as waiting for data."""

import time

import pytest
import torch
from torch import nn

from speakerlab.core.batch import Batch
from speakerlab.training.task import Prefetcher

SAMPLES = 8000
CPU = torch.device("cpu")
GPU = pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)


class Halving(nn.Module):
    """An augmentation to [-1, 1] in many small operations; counts quiet rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, batch):
        wave_BS = batch.wave_BS.float()
        for _ in range(15):
            wave_BS = wave_BS / 2
        self.count += (wave_BS.abs().amax(1) < 0.02).sum()
        return wave_BS

    def take_silent(self):
        taken = self.count.clone()
        self.count.zero_()
        return taken


def make_batches(count: int) -> list[Batch]:
    """Return micro-batches that differ in loudness, on the CPU."""
    generator, empty = torch.Generator().manual_seed(0), torch.empty(0, 0, 0)
    shape = (4, SAMPLES)
    loud = torch.randint(-3000, 3000, shape, dtype=torch.int16, generator=generator)
    return [Batch(loud // (number + 1), *[empty] * 4, draws={}) for number in range(count)]


def waves(
    device: torch.device, *, overlap: bool, count: int = 8, disturb: int = 0
) -> list[torch.Tensor]:
    """Return the augmented waves and the silent crops of each micro-batch.

    disturb: size of matrices multiplied on the main stream, so that it is late.
    """
    augment = Halving().to(device)
    inputs = Prefetcher(iter(make_batches(count)), augment, device=device, overlap=overlap)
    load, found = torch.ones(disturb, disturb, device=device), []
    for _ in range(count):
        micro_batch = next(inputs)
        for _ in range(20 if disturb else 0):
            load = load @ load / disturb
        inputs.prefetch()
        found += [micro_batch.x_B.clone(), micro_batch.silent]
        del micro_batch
    with pytest.raises(StopIteration):
        next(inputs)
    return found


@pytest.mark.parametrize("device", [CPU, GPU])
def test_making_micro_batches_ahead_changes_no_bit(device):
    plain, ahead = waves(device, overlap=False), waves(device, overlap=True)
    assert len(plain) == 16 and plain[1] == 0 and plain[-1] == 4
    for a, b in zip(plain, ahead):
        assert torch.equal(a, b)
    assert len({float(wave_BS.abs().max()) for wave_BS in plain[::2]}) == 8


@pytest.mark.gpu
def test_the_streams_wait_for_each_other():
    """With the main stream seconds late, memory is used in the order of a single stream."""
    device = torch.device("cuda", 0)
    plain = waves(device, overlap=False, count=30)
    ahead = waves(device, overlap=True, count=30, disturb=4096)
    torch.cuda.synchronize()
    for a, b in zip(plain, ahead):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_on_a_gpu_only_idle_time_is_waiting():
    """While the device computes, a late batch costs nothing."""
    device = torch.device("cuda", 0)

    def slow_batches():
        for batch in make_batches(3):
            time.sleep(0.2)
            yield batch

    inputs = Prefetcher(slow_batches(), Halving().to(device), device=device)
    load = torch.ones(8192, 8192, device=device)
    load @ load  # kernels are chosen
    torch.cuda.synchronize()
    next(inputs)
    assert 0.19 < inputs.take_wait_seconds() < 1
    for _ in range(60):  # takes far longer than the 0.2 s of the batch
        load = load @ load / 8192
    inputs.prefetch()
    assert inputs.take_wait_seconds() < 0.1
    torch.cuda.synchronize()
    next(inputs)
    inputs.prefetch()
    assert 0.1 < inputs.take_wait_seconds() < 1


def test_on_a_cpu_nothing_is_made_ahead_and_waiting_is_the_time_of_the_batches():
    asked: list[int] = []

    def batches():
        for number, batch in enumerate(make_batches(3)):
            asked.append(number)
            time.sleep(0.05)
            yield batch

    inputs = Prefetcher(batches(), Halving(), device=CPU)
    for number in range(3):
        next(inputs)
        inputs.prefetch()
        assert asked == list(range(number + 1))
    assert 0.15 <= inputs.take_wait_seconds() < 0.4
    assert inputs.take_wait_seconds() == 0.0
