"""A second stream changes no micro-batch; only idle time of the device is waiting for data."""

import time

import pytest
import torch
from torch import nn

from speakerlab.core.batch import Batch
from speakerlab.training.task import Inputs

SAMPLES = 8000
CPU = torch.device("cpu")


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
    generator = torch.Generator().manual_seed(0)
    empty = torch.empty(0, 0, 0)
    shape = (4, SAMPLES)
    loud = torch.randint(-3000, 3000, shape, dtype=torch.int16, generator=generator)
    return [
        Batch(loud // (number + 1), *[empty] * 4, draws={}) for number in range(count)
    ]


def waves(
    device: torch.device, *, count: int = 8, disturb: int = 0
) -> list[torch.Tensor]:
    """Return the augmented waves and the silent crops of each micro-batch, on the CPU.

    disturb: size of matrices multiplied on the main stream, so that it is late.
    """
    augment = Halving().to(device)
    inputs = Inputs(iter(make_batches(count)), augment, device=device)
    load = torch.ones(disturb, disturb, device=device)
    waves_of_batches = []
    for _ in range(count):
        micro_batch = next(inputs)
        for _ in range(20 if disturb else 0):
            load = load @ load / disturb
        waves_of_batches += [micro_batch.x_B.clone(), micro_batch.silent]
        del micro_batch
    with pytest.raises(StopIteration):
        next(inputs)
    return [tensor.cpu() for tensor in waves_of_batches]


def test_micro_batches_differ_and_have_their_own_silent_crops():
    waves_of_batches = waves(CPU)
    assert len(waves_of_batches) == 16
    assert waves_of_batches[1] == 0
    assert waves_of_batches[-1] == 4
    assert len({float(wave_BS.abs().max()) for wave_BS in waves_of_batches[::2]}) == 8


@pytest.mark.gpu
def test_the_streams_wait_for_each_other():
    """With the main stream seconds late, memory is used in the order of a single stream."""
    late = waves(torch.device("cuda", 0), count=30, disturb=4096)
    for a, b in zip(late, waves(CPU, count=30), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_on_a_gpu_only_idle_time_is_waiting():
    """While the device computes, a late batch costs nothing."""
    device = torch.device("cuda", 0)

    def slow_batches():
        for batch in make_batches(3):
            time.sleep(0.2)
            yield batch

    inputs = Inputs(slow_batches(), Halving().to(device), device=device)
    load = torch.ones(8192, 8192, device=device)
    load @ load  # kernels are chosen
    torch.cuda.synchronize()
    next(inputs)
    assert 0.19 < inputs.take_wait_seconds() < 1
    for _ in range(60):  # takes far longer than the 0.2 s of the batch
        load = load @ load / 8192
    next(inputs)
    assert inputs.take_wait_seconds() < 0.1
    torch.cuda.synchronize()
    next(inputs)
    assert 0.1 < inputs.take_wait_seconds() < 1


def test_on_a_cpu_waiting_is_the_time_of_the_batches():
    def batches():
        for batch in make_batches(3):
            time.sleep(0.05)
            yield batch

    inputs = Inputs(batches(), Halving(), device=CPU)
    for _ in range(3):
        next(inputs)
    assert 0.15 <= inputs.take_wait_seconds() < 0.4
    assert inputs.take_wait_seconds() == 0.0
