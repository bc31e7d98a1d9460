"""Micro-batch x ranks x accumulation = global batch. In: the wish and the memory. Out: a plan.

Hardware never changes the global batch: memory only decides in how many pieces it is computed.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MIN_MICRO_BATCH, MAX_MICRO_BATCH = 16, 128
GPU_RESERVE_BYTES = int(1.5 * 2**30)  # context, workspaces, weights, gradients, momentum
GPU_USABLE_SHARE = 0.92
CPU_USABLE_SHARE = 0.5
TRANSIENT_SHARE = 1.055  # what a backward pass holds beyond the saved activations


@dataclass(frozen=True)
class BatchPlan:
    """How the global batch is computed, and why so."""

    micro_batch: int
    accumulation: int
    world_size: int
    reason: str

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.world_size

    def __str__(self) -> str:
        return (
            f"global batch {self.global_batch} = {self.micro_batch} a micro-batch x "
            f"{self.world_size} ranks x {self.accumulation} accumulations ({self.reason})"
        )


def plan_batch(
    *,
    global_batch: int,
    world_size: int,
    micro_batch: int | None = None,
    bn_batch: int | None = None,
    limit: Callable[[], int],
) -> BatchPlan:
    """Exact by construction; ValueError names the nearest sizes that are.

    micro_batch: fixed, or None for the largest divisor of a rank's share in 16..128 that `limit`
    (called only then) allows. bn_batch: taken instead where it fits.
    """
    if global_batch % world_size:
        near = sorted(
            {
                max(global_batch // world_size, 1) * world_size,
                -(-global_batch // world_size) * world_size,
            }
        )
        raise ValueError(
            f"training.global_batch: must be a multiple of the {world_size} ranks, got "
            f"{global_batch}; nearest are {' and '.join(map(str, near))}"
        )
    share = global_batch // world_size
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    if micro_batch is not None:
        if micro_batch not in divisors:
            near = sorted(divisors, key=lambda size: abs(size - micro_batch))[:2]
            raise ValueError(
                f"runtime.micro_batch: must divide a rank's share of {share}, got {micro_batch}; "
                f"nearest are {' and '.join(map(str, sorted(near)))}"
            )
        return BatchPlan(micro_batch, share // micro_batch, world_size, "asked for")
    return _plan_auto(divisors, world_size, bn_batch, limit())


def _plan_auto(divisors: list[int], world_size: int, bn_batch: int | None, most: int) -> BatchPlan:
    share = divisors[-1]
    if bn_batch in divisors and bn_batch <= most:
        return BatchPlan(bn_batch, share // bn_batch, world_size, "auto: training.bn_batch fits")
    floor = min(MIN_MICRO_BATCH, share)
    fitting = [size for size in divisors if floor <= size <= min(MAX_MICRO_BATCH, most)]
    if not fitting:
        raise ValueError(
            f"runtime.micro_batch: at least {floor} crops must fit, got room for {most}; use a "
            "shorter data.crop_seconds, a smaller model or a lower precision"
        )
    rule = f"auto: memory allows {most}" if most < MAX_MICRO_BATCH else "auto"
    return BatchPlan(fitting[-1], share // fitting[-1], world_size, rule)


def saved_bytes_per_crop(run: Callable[[int], Any]) -> float:
    """Bytes that a forward pass keeps for the backward pass, for each crop more.

    run: computes the forward pass for a number of crops, on the CPU.
    """
    return (_saved_bytes(run, 4) - _saved_bytes(run, 2)) / 2


def _saved_bytes(run: Callable[[int], Any], num_crops: int) -> int:
    sizes: dict[int, int] = {}  # one entry a storage: views share theirs

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = run(num_crops)  # alive until counted, so that no storage is used twice
    del kept
    return sum(sizes.values())


def memory_limit(bytes_per_crop: float, free_bytes: int, device: torch.device) -> int:
    """How many crops fit in the memory that is free now."""
    if device.type == "cuda":
        usable = free_bytes * GPU_USABLE_SHARE - GPU_RESERVE_BYTES
    else:
        usable = free_bytes * CPU_USABLE_SHARE
    return max(int(usable / (bytes_per_crop * TRANSIENT_SHARE)), 0)


def free_bytes(device: torch.device, local_ranks: int) -> int:
    """Free memory of the GPU, or this rank's share of the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        words = meminfo.read_text(encoding="ascii").split()
        return int(words[words.index("MemAvailable:") + 1]) * 1024 // local_ranks
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // local_ranks


def slow_batchnorm(module: nn.Module, accumulation: int) -> None:
    """Let running statistics move as far in k micro-batches as they would in one: 1-(1-m)^(1/k)."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is not None:  # noqa: SLF001
            layer.momentum = 1 - (1 - layer.momentum) ** (1 / accumulation)
