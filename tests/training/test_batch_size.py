"""micro x ranks x accumulation = global, always; memory decides in how many pieces."""

import pytest
import torch
from torch import nn

from speakerlab.training.batch_size import (
    GPU_RESERVE_BYTES,
    memory_limit,
    plan_batch,
    saved_bytes_per_crop,
    slow_batchnorm,
)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("limit", [16, 20, 31, 64, 100, 1000])
def test_auto_is_exact_and_in_range(world_size, limit):
    plan = plan_batch(global_batch=256, world_size=world_size, limit=lambda: limit)
    assert plan.micro_batch * plan.accumulation * world_size == plan.global_batch == 256
    assert 16 <= plan.micro_batch <= min(128, limit)


def test_one_small_card_accumulates_to_the_batch_of_four_large_ones():
    large = plan_batch(global_batch=256, world_size=4, limit=lambda: 80)
    small = plan_batch(global_batch=256, world_size=1, limit=lambda: 24)
    assert (large.micro_batch, large.accumulation) == (64, 1)
    assert (small.micro_batch, small.accumulation) == (16, 16)


def test_bn_batch_is_kept_where_it_fits_and_only_there():
    plan = plan_batch(global_batch=256, world_size=1, bn_batch=64, limit=lambda: 500)
    assert plan.micro_batch == 64
    plan = plan_batch(global_batch=256, world_size=1, bn_batch=64, limit=lambda: 40)
    assert plan.micro_batch == 32


def test_a_fixed_micro_batch_asks_no_memory():
    def never():
        raise AssertionError

    plan = plan_batch(global_batch=24, world_size=2, micro_batch=6, limit=never)
    assert (plan.micro_batch, plan.accumulation) == (6, 2)


def test_refusals_name_the_nearest_that_work():
    with pytest.raises(ValueError, match=r"multiple of the 3 ranks, got 256; nearest are 255 and"):
        plan_batch(global_batch=256, world_size=3, limit=lambda: 99)
    with pytest.raises(ValueError, match=r"a rank's share of 64, got 24; nearest are 16 and 32"):
        plan_batch(global_batch=64, world_size=1, micro_batch=24, limit=lambda: 99)
    with pytest.raises(ValueError, match=r"at least 16 crops must fit, got room for 9; use a"):
        plan_batch(global_batch=256, world_size=1, limit=lambda: 9)


def test_a_small_share_is_taken_whole():
    assert plan_batch(global_batch=8, world_size=2, limit=lambda: 99).micro_batch == 4


def test_saved_bytes_are_those_of_the_activations():
    layer = nn.Linear(100, 50, bias=False)

    def run(rows):
        return layer(torch.ones(rows, 100, requires_grad=True)).relu()

    # kept for the backward pass: the input (100) and relu's output (50), float32
    assert saved_bytes_per_crop(run) == (100 + 50) * 4


def test_memory_limit_by_hand():
    gigabyte = 2**30
    # 0.92 x 11 - 1.5 = 8.62 GiB for crops of 100 MiB x 1.055
    cuda = memory_limit(100 * 2**20, 11 * gigabyte, torch.device("cuda"))
    assert cuda == int((0.92 * 11 * gigabyte - GPU_RESERVE_BYTES) / (100 * 2**20 * 1.055)) == 83
    assert memory_limit(2**20 / 1.055, gigabyte, torch.device("cpu")) == 512


def test_batchnorm_moves_as_far_in_two_micro_batches_as_in_one():
    layer = nn.BatchNorm1d(1, momentum=0.1)
    slow_batchnorm(nn.Sequential(layer), 2)
    for _ in range(2):
        layer(torch.full((4, 1), 5.0))
    assert layer.running_mean is not None
    assert layer.running_mean.item() == pytest.approx(0.1 * 5.0)
