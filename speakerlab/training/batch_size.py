"""Micro-batch x ranks x accumulation = global batch.

Hardware never changes the global batch: memory only decides in how many pieces it is computed.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MIN_MICRO_BATCH, MAX_MICRO_BATCH = 16, 128
# For BatchNorm: with 32, 16 and 8 images its error is 23.6, 23.7 and 24.8 % (Wu and He, "Group
# Normalization", ECCV 2018, arXiv 1803.08494), and the published recipes have 28 crops and more.
ENOUGH_CROPS = 32
REMEDY = "use a shorter data.crop_seconds, a smaller model or a lower precision"


class MemoryTooSmall(ValueError):
    """The smallest micro-batch that is allowed does not fit; the message says what would."""


@dataclass(frozen=True)
class BatchPlan:
    """How the global batch is computed, and why."""

    micro_batch: int
    accumulation: int
    world_size: int
    reason: str
    joined_ranks: int = 1  # neighbouring ranks that share BatchNorm's statistics

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def bn_batch(self) -> int:
        """Return the number of crops that BatchNorm sees at once."""
        return self.micro_batch * self.joined_ranks

    def __str__(self) -> str:
        return (
            f"global batch {self.global_batch} = micro-batch {self.micro_batch} x "
            f"{self.world_size} ranks x {self.accumulation} accumulations ({self.reason})"
        )


def plan_batch(
    *,
    global_batch: int,
    world_size: int,
    micro_batch: int | None = None,
    bn_batch: int | None = None,
    join_ranks: bool = False,
    below: int | None = None,
    limit: Callable[[list[int]], int],
    undivided: str = "",
) -> BatchPlan:
    """Choose a micro-batch whose product is exact; ValueError names the nearest valid sizes.

    micro_batch: fixed, or None for the largest divisor of a rank's share in 16..128 that fits.
    bn_batch: preferred if it fits; if it does not and `join_ranks`, ranks with fewer than
    `ENOUGH_CROPS` share BatchNorm's statistics, and fewer than 16 crops a rank will do if BatchNorm
    still sees 16. below: take the next smaller micro-batch, after this one ran out of memory.
    limit: gets the sizes in question, ascending, and returns how many crops fit; raises
    MemoryTooSmall if not even the first size does. undivided: why a rank must compute its share at
    once, without accumulation; "" if it need not.
    """
    divisors, joined = micro_batches(global_batch, world_size), {}
    if undivided:
        share = divisors[-1]
        if micro_batch not in (None, share):
            raise ValueError(
                f"runtime.micro_batch: {micro_batch}, but {undivided}; use {share}, or a smaller "
                "training.global_batch"
            )
        micro_batch = share
    for size in divisors:
        may_join = join_ranks and size < ENOUGH_CROPS
        most = max(bn_batch // size, 1) if may_join and bn_batch else 1
        joined[size] = max(n for n in range(1, most + 1) if world_size % n == 0)
    sizes = _sizes_to_try(divisors, micro_batch, bn_batch, below, joined)
    most = limit(sizes)
    size = max(size for size in sizes if size <= most)
    if below is not None:
        reason = f"{below} ran out of memory"
    elif micro_batch is not None:
        reason = undivided or "as configured"
    elif size == bn_batch:
        reason = "auto: training.bn_batch fits"
    else:
        reason = f"auto: memory allows {most}" if most < MAX_MICRO_BATCH else "auto"
    return BatchPlan(size, divisors[-1] // size, world_size, reason, joined[size])


def micro_batches(global_batch: int, world_size: int) -> list[int]:
    """Return the divisors of a rank's share of the global batch, ascending."""
    if global_batch % world_size:
        below = global_batch // world_size
        near = sorted({max(below, 1) * world_size, (below + 1) * world_size})
        raise ValueError(
            f"training.global_batch: {global_batch} is not a multiple of the {world_size} ranks; "
            f"nearest are {' and '.join(map(str, near))}"
        )
    share = global_batch // world_size
    return [size for size in range(1, share + 1) if share % size == 0]


def _sizes_to_try(
    divisors: list[int],
    micro_batch: int | None,
    bn_batch: int | None,
    below: int | None,
    joined: Mapping[int, int],
) -> list[int]:
    """Return the sizes that `plan_batch` may choose, ascending; never none."""
    share = divisors[-1]
    low, high, least = 1, MAX_MICRO_BATCH, min(MIN_MICRO_BATCH, share * joined[share])
    if micro_batch is not None:
        if micro_batch not in divisors:
            near = sorted(divisors, key=lambda size: abs(size - micro_batch))[:2]
            raise ValueError(
                f"runtime.micro_batch: {micro_batch} does not divide a rank's share of {share}; "
                f"nearest are {' and '.join(map(str, sorted(near)))}"
            )
        low, high, least = micro_batch, micro_batch, 1
    elif bn_batch in divisors:
        high, least = bn_batch, min(least, bn_batch)
    if below is not None:
        low, high, least = 1, min(high, below - 1), 1
    sizes = [size for size in divisors if low <= size <= high and size * joined[size] >= least]
    if not sizes and below is not None:
        raise MemoryTooSmall(f"memory: a micro-batch of {below} does not fit; {REMEDY}")
    if not sizes:
        raise ValueError(
            f"training.global_batch: a rank's share of {share} has no divisor from {least} to "
            f"{high}; change it, or set runtime.micro_batch"
        )
    return sizes


def saved_bytes(
    run: Callable[[int], Any], parameters: Iterable[Tensor] = ()
) -> tuple[float, float]:
    """Return what a forward pass saves for the backward pass: (bytes per crop, bytes once).

    run: computes the forward pass for a number of crops; parameters: are not counted.
    """
    # `_cdata` differs even between storages without data, whose addresses are all 0.
    ignored = {parameter.untyped_storage()._cdata for parameter in parameters}

    def count(num_crops: int) -> int:
        sizes: dict[int, int] = {}  # by storage: views share theirs

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in ignored:
                sizes[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            kept = run(num_crops)  # alive until counted, so that no storage is reused
        del kept
        return sum(sizes.values())

    two, four = count(2), count(4)
    return (four - two) / 2, 2 * two - four


def free_bytes(device: torch.device, local_ranks: int) -> int:
    """Return the free memory of the GPU, or this rank's share of the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        words = meminfo.read_text(encoding="ascii").split()
        return int(words[words.index("MemAvailable:") + 1]) * 1024 // local_ranks
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // local_ranks


def slow_batchnorm(module: nn.Module, accumulation: int) -> None:
    """Make k micro-batches move running statistics as far as one batch: 1 - (1 - m)^(1 / k)."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is not None:  # noqa: SLF001
            layer.momentum = 1 - (1 - layer.momentum) ** (1 / accumulation)
