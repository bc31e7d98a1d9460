"""micro x ranks x accumulation = global, always; memory decides in how many pieces."""

import pytest
import torch
from refusals import refuses
from torch import nn

from speakerlab.training.batch_size import (
    GPU_RESERVE_BYTES,
    STATE_IN_RESERVE,
    memory_limit,
    micro_batches,
    micro_batches_to_try,
    plan_batch,
    ranks_to_join,
    saved_bytes,
    slow_batchnorm,
)

GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize("world_size", range(1, 17))
def test_every_plan_is_exact_and_in_range(world_size):
    """For each cap 1..512, on global batches that the ranks can share."""
    for share in (16, 20, 64, 96, 100, 256):
        for cap in range(1, 513):
            ask = {"global_batch": share * world_size, "world_size": world_size}
            fitting = [size for size in range(16, min(128, cap) + 1) if share % size == 0]
            if not fitting:
                key = "runtime.micro_batch" if cap < 16 else "training.global_batch"
                with refuses(key, cap if cap < 16 else share):
                    plan_batch(**ask, limit=lambda cap=cap: cap)
                continue
            plan = plan_batch(**ask, limit=lambda cap=cap: cap)
            assert plan.micro_batch * plan.accumulation * world_size == share * world_size
            assert plan.global_batch == share * world_size
            assert plan.micro_batch == max(fitting)


def test_one_small_card_accumulates_to_the_batch_of_four_large_ones():
    large = plan_batch(global_batch=256, world_size=4, limit=lambda: 80)
    small = plan_batch(global_batch=256, world_size=1, limit=lambda: 24)
    assert (large.micro_batch, large.accumulation) == (64, 1)
    assert (small.micro_batch, small.accumulation) == (16, 16)


def test_bn_batch_is_kept_where_it_fits_and_only_there():
    plan = plan_batch(global_batch=256, world_size=1, bn_batch=64, limit=lambda: 500)
    assert (plan.micro_batch, plan.reason) == (64, "auto: training.bn_batch fits")
    plan = plan_batch(global_batch=256, world_size=1, bn_batch=64, limit=lambda: 40)
    assert (plan.micro_batch, plan.bn_batch, plan.reason) == (32, 32, "auto: memory allows 40")


def test_ranks_are_joined_until_batchnorm_sees_as_many_crops_as_it_should():
    ask = {"global_batch": 256, "bn_batch": 64, "join_ranks": True}
    plan = plan_batch(world_size=4, limit=lambda: 40, **ask)
    assert (plan.micro_batch, plan.joined_ranks, plan.bn_batch) == (32, 2, 64)
    plan = plan_batch(world_size=8, limit=lambda: 24, **ask)
    assert (plan.micro_batch, plan.joined_ranks, plan.bn_batch) == (16, 4, 64)
    plan = plan_batch(world_size=4, limit=lambda: 64, **ask)
    assert (plan.joined_ranks, plan.bn_batch) == (1, 64)
    assert plan_batch(world_size=4, limit=lambda: 40, **{**ask, "join_ranks": False}).bn_batch == 32


@pytest.mark.parametrize(
    ("micro_batch", "bn_batch", "world_size", "joined"),
    [
        (16, 64, 8, 4),
        (16, 64, 6, 3),
        (16, 64, 5, 1),
        (48, 64, 4, 1),
        (16, 64, 2, 2),
        (16, None, 8, 1),
    ],
)
def test_groups_divide_the_ranks_and_do_not_exceed_bn_batch(
    micro_batch, bn_batch, world_size, joined
):
    assert ranks_to_join(micro_batch, bn_batch, world_size) == joined


def test_a_fixed_micro_batch_asks_no_memory():
    def never():
        raise AssertionError

    plan = plan_batch(global_batch=24, world_size=2, micro_batch=6, limit=never)
    assert (plan.micro_batch, plan.accumulation, plan.reason) == (6, 2, "as configured")
    plan = plan_batch(global_batch=24, world_size=2, micro_batch=6, below=6, limit=never)
    assert (plan.micro_batch, plan.accumulation) == (4, 3)


def test_after_a_run_out_of_memory_the_next_smaller_one_is_taken():
    ask = {"global_batch": 256, "world_size": 1, "bn_batch": 64}
    plan = plan_batch(**ask, below=64, limit=lambda: 500)
    assert (plan.micro_batch, plan.accumulation) == (32, 8)
    assert plan.reason == "64 ran out of memory"
    assert plan_batch(**ask, below=64, limit=lambda: 20).micro_batch == 16  # less is free now
    assert plan_batch(**ask, below=16, limit=lambda: 500).micro_batch == 8
    assert plan_batch(**ask, below=64, micro_batch=16, limit=lambda: 500).micro_batch == 16
    with refuses("runtime.micro_batch", "not even 1 crop"):
        plan_batch(**ask, below=1, limit=lambda: 500)


@pytest.mark.parametrize(
    ("ask", "limit", "key", "values"),
    [
        ({"global_batch": 256, "world_size": 3}, 99, "training.global_batch", (256, "255 and 258")),
        ({"global_batch": 64, "micro_batch": 24}, 99, "runtime.micro_batch", (24, "16 and 32")),
        ({"global_batch": 256}, 9, "runtime.micro_batch", (9, 16)),
        ({"global_batch": 262}, 999, "training.global_batch", (262, "16..128")),
    ],
)
def test_refusals_name_the_nearest_valid_sizes(ask, limit, key, values):
    with refuses(key, *values):
        plan_batch(**{"world_size": 1, **ask}, limit=lambda: limit)


def test_a_small_share_is_taken_whole():
    assert plan_batch(global_batch=8, world_size=2, limit=lambda: 99).micro_batch == 4


def test_no_more_is_tried_than_could_be_taken():
    divisors = micro_batches(256, 1)
    assert micro_batches_to_try(divisors) == [16, 32, 64, 128]
    assert micro_batches_to_try(divisors, bn_batch=64) == [16, 32, 64]
    assert micro_batches_to_try(divisors, bn_batch=64, below=32) == [1, 2, 4, 8, 16]
    assert micro_batches_to_try(micro_batches(8, 2)) == [4]
    assert micro_batches_to_try(divisors, bn_batch=48) == [16, 32, 64, 128]


def test_saved_bytes_are_those_of_the_activations():
    layer = nn.Linear(100, 50, bias=False)
    constant = torch.ones(1000, requires_grad=True)

    def run(rows):
        return layer(torch.ones(rows, 100, requires_grad=True)).relu(), constant.exp()

    # kept for the backward pass: the input (100) and relu's output (50), float32; exp's output
    assert saved_bytes(run, layer.parameters()) == ((100 + 50) * 4, 1000 * 4)


def test_memory_limit_by_hand():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    # 0.92 x 11 - 1.5 = 8.62 GiB for crops of 100 MiB x 1.055
    free = 11 * GIB
    assert memory_limit(100 * MIB, free, cuda) == 83
    assert int((0.92 * free - GPU_RESERVE_BYTES) / (100 * MIB * 1.055)) == 83
    assert memory_limit(MIB / 1.055, GIB, cpu) == 512


def test_a_head_of_many_speakers_and_banks_leave_room_for_fewer_crops():
    cuda, crop = torch.device("cuda"), 100 * MIB / 1.055
    alone = memory_limit(crop, 24 * GIB, cuda)
    assert memory_limit(crop, 24 * GIB, cuda, state_bytes=STATE_IN_RESERVE) == alone
    # a million speakers of 192 values, weights, gradients and momentum: 2197 MiB, 384 reserved
    million = 3 * 4 * 192 * 1_000_000
    assert memory_limit(crop, 24 * GIB, cuda, state_bytes=million) == alone - 18
    assert memory_limit(crop, 24 * GIB, cuda, bank_bytes=2 * GIB) == alone - 20
    assert memory_limit(crop, GIB, cuda) == 0


def test_batchnorm_moves_as_far_in_two_micro_batches_as_in_one():
    layer = nn.BatchNorm1d(1, momentum=0.1)
    slow_batchnorm(nn.Sequential(layer), 2)
    for _ in range(2):
        layer(torch.full((4, 1), 5.0))
    assert layer.running_mean is not None
    assert layer.running_mean.item() == pytest.approx(0.1 * 5.0)
