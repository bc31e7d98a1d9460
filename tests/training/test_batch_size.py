"""micro-batch x ranks x accumulation = global batch; memory decides the micro-batch."""

import pytest
import torch
from refusals import refuses
from torch import nn

from speakerlab.training.batch_size import (
    BatchRequest,
    MemoryTooSmall,
    divide_global_batch,
    saved_bytes,
    slow_batchnorm,
)

JOIN = {"bn_batch": 64, "join_ranks": True}


def memory_for(most):
    """Return the limit of a device where `most` crops fit."""

    def limit(least):
        if most < least:
            raise MemoryTooSmall(f"memory: {most}")
        return most

    return limit


@pytest.mark.parametrize("world_size", range(1, 17))
def test_every_plan_is_exact_and_in_range(world_size):
    """For each cap 1..512, on global batches that the ranks can share."""
    for share in (16, 20, 64, 96, 100, 256):
        global_batch = share * world_size
        request = BatchRequest(global_batch=global_batch, world_size=world_size)
        sizes = [size for size in range(16, 129) if share % size == 0]
        for cap in range(1, 513):
            limit = memory_for(cap)
            fitting = [size for size in sizes if size <= cap]
            if not fitting:
                with refuses("memory", cap):
                    divide_global_batch(request, limit)
                continue
            plan = divide_global_batch(request, limit)
            crops_per_rank = plan.micro_batch * plan.accumulation
            assert crops_per_rank * world_size == global_batch
            assert plan.global_batch == global_batch
            assert plan.micro_batch == max(fitting)


@pytest.mark.parametrize(
    ("ask", "most", "micro_batch", "accumulation", "bn_batch", "reason"),
    [
        ({"world_size": 4}, 80, 64, 1, 64, "auto: memory allows 80"),
        ({}, 24, 16, 16, 16, "auto: memory allows 24"),
        ({"global_batch": 8, "world_size": 2}, 999, 4, 1, 4, "auto"),
        ({"bn_batch": 64}, 500, 64, 4, 64, "auto: training.bn_batch fits"),
        ({"bn_batch": 64}, 40, 32, 8, 32, "auto: memory allows 40"),
        # ranks with fewer than 32 crops are joined until BatchNorm sees bn_batch crops
        ({"world_size": 4, **JOIN}, 40, 32, 2, 32, "allows 40"),
        ({"world_size": 8, **JOIN}, 80, 32, 1, 32, "allows 80"),
        ({"world_size": 8, **JOIN}, 24, 16, 2, 64, "allows 24"),
        ({"world_size": 4, **JOIN}, 64, 64, 1, 64, "fits"),
        ({"world_size": 4, "bn_batch": 64}, 40, 32, 2, 32, "allows 40"),
        ({"world_size": 4, **JOIN, "bn_batch": 32}, 12, 8, 8, 32, "allows 12"),
        (
            {"global_batch": 320, "world_size": 5, **JOIN, "bn_batch": 32},
            8,
            4,
            16,
            20,
            "allows 8",
        ),
        ({"global_batch": 64, "world_size": 8, **JOIN}, 2, 2, 4, 16, "allows 2"),
        ({"global_batch": 96, "world_size": 6, **JOIN}, 16, 16, 1, 48, ""),
        ({"global_batch": 80, "world_size": 5, **JOIN}, 16, 16, 1, 16, ""),
        ({"global_batch": 96, "world_size": 2, **JOIN}, 48, 48, 1, 48, ""),
        # a micro-batch that ran out of memory is followed by the next smaller one that fits
        ({"bn_batch": 64, "too_large": 64}, 500, 32, 8, 32, "64 ran out of memory"),
        ({"bn_batch": 64, "too_large": 64}, 20, 16, 16, 16, "64 ran out of memory"),
        ({"bn_batch": 64, "too_large": 16}, 500, 8, 32, 8, "16 ran out of memory"),
        ({"too_large": 64, "micro_batch": 16}, 500, 16, 16, 16, "64 ran out of memory"),
        ({"too_large": 64, "micro_batch": 128}, 500, 32, 8, 32, "64 ran out of memory"),
        ({"micro_batch": 32}, 40, 32, 8, 32, "as configured"),
    ],
)
def test_plans(ask, most, micro_batch, accumulation, bn_batch, reason):
    settings = {"global_batch": 256, "world_size": 1}
    settings |= ask
    plan = divide_global_batch(BatchRequest(**settings), memory_for(most))
    assert plan.micro_batch == micro_batch
    assert plan.accumulation == accumulation
    assert plan.bn_batch == bn_batch
    assert plan.reason.endswith(reason)


@pytest.mark.parametrize(
    ("ask", "limit", "key", "values"),
    [
        (
            {"global_batch": 256, "world_size": 3},
            99,
            "training.global_batch",
            (256, "255 and 258"),
        ),
        (
            {"global_batch": 64, "micro_batch": 24},
            99,
            "runtime.micro_batch",
            (24, "16 and 32"),
        ),
        ({"global_batch": 256}, 9, "memory", (9,)),
        ({"global_batch": 256, **JOIN}, 15, "memory", (15,)),
        ({"global_batch": 256, "micro_batch": 64}, 63, "memory", (63,)),
        ({"global_batch": 256, "too_large": 1}, 99, "memory", (1,)),
        ({"global_batch": 262}, 999, "training.global_batch", (262, 16, 128)),
        # A loss over the whole share cannot accumulate, also after it ran out of memory.
        (
            {"global_batch": 64, "why_undivided": "SimCLR compares", "too_large": 64},
            99,
            "memory",
            (64, "SimCLR compares", "a smaller training.global_batch"),
        ),
    ],
)
def test_errors_name_the_nearest_valid_sizes(ask, limit, key, values):
    settings = {"world_size": 1} | ask
    with refuses(key, *values):
        divide_global_batch(BatchRequest(**settings), memory_for(limit))


SINGLE = "a BatchNorm has one value of each crop"


@pytest.mark.parametrize(
    ("ask", "key", "values"),
    [
        ({"micro_batch": 1}, "runtime.micro_batch", (1, SINGLE, "use 2")),
        ({"micro_batch": 1, "global_batch": 9}, "runtime.micro_batch", ("use 3",)),
        # A rank has no second crop.
        (
            {"global_batch": 4, "world_size": 4},
            "training.global_batch",
            ("4 is a runtime.micro_batch of 1", SINGLE, "use 8"),
        ),
        ({"bn_batch": 1}, "training.bn_batch", (1, SINGLE, "use 2")),
        # After 2 crops ran out of memory, there is no smaller size.
        ({"too_large": 2}, "memory", (2, SINGLE)),
    ],
)
def test_a_single_crop_is_refused_where_it_cannot_be_trained(ask, key, values):
    settings = {"global_batch": 8, "world_size": 1} | ask
    with refuses(key, *values):
        divide_global_batch(BatchRequest(**settings, why_not_single=lambda: SINGLE))
    # Models without such a BatchNorm may be trained with it.
    plan = divide_global_batch(BatchRequest(**settings))
    assert plan.micro_batch == 1


def test_other_sizes_are_taken_without_asking_for_the_model():
    def fail() -> str:
        raise AssertionError("asked")

    # Ranks that share BatchNorm's statistics have a crop each.
    joined = {"global_batch": 4, "world_size": 4, **JOIN, "micro_batch": 1}
    for settings in (joined, {"global_batch": 8, "world_size": 2}):
        plan = divide_global_batch(BatchRequest(**settings, why_not_single=fail))
        assert plan.bn_batch == 4
    # A smaller size after running out of memory is 2 crops at least.
    request = BatchRequest(
        global_batch=8,
        world_size=1,
        too_large=4,
        why_not_single=lambda: SINGLE,
    )
    plan = divide_global_batch(request)
    assert plan.micro_batch == 2


def test_saved_bytes_are_those_of_the_activations():
    layer = nn.Linear(100, 50, bias=False)
    constant = torch.ones(1000, requires_grad=True)

    def run(rows):
        input_BD = torch.ones(rows, 100, requires_grad=True)
        return layer(input_BD).relu(), constant.exp()

    # kept for the backward pass: the input (100) and relu's output (50), float32; exp's output
    per_row, constant_bytes = saved_bytes(run, layer.parameters())
    assert per_row == (100 + 50) * 4
    assert constant_bytes == 1000 * 4


def test_batchnorm_moves_as_far_in_two_micro_batches_as_in_one():
    layer = nn.BatchNorm1d(1, momentum=0.1)
    slow_batchnorm(nn.Sequential(layer), 2)
    for _ in range(2):
        input_BD = torch.full((4, 1), 5.0)
        layer(input_BD)
    assert layer.running_mean is not None
    mean = layer.running_mean.item()
    assert mean == pytest.approx(0.1 * 5.0)
