"""Micro-batch x ranks x accumulation = global batch.

Hardware never changes the global batch: memory only determines into how many pieces it is divided.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MIN_MICRO_BATCH = 16
MAX_MICRO_BATCH = 128
# Crops that BatchNorm needs for good statistics. With 32, 16 and 8 images the error of a classifier
# is 23.6, 23.7 and 24.8 % (Wu and He, "Group Normalization", ECCV 2018, arXiv 1803.08494), and
# published recipes for speakers have 28 crops and more.
ENOUGH_CROPS = 32
REMEDY = "use a shorter data.crop_seconds, a smaller model or a lower precision"


class MemoryTooSmall(ValueError):
    """The smallest allowed micro-batch does not fit; the message names a remedy."""


@dataclass(frozen=True)
class BatchPlan:
    """Division of the global batch into micro-batches, with the reason."""

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
        """Return the number of crops that BatchNorm normalises together."""
        return self.micro_batch * self.joined_ranks

    def __str__(self) -> str:
        return (
            f"global batch {self.global_batch} = micro-batch {self.micro_batch} x"
            f" {self.world_size} ranks x {self.accumulation} accumulations"
            f" ({self.reason})"
        )


def divide_global_batch(
    *,
    global_batch: int,
    world_size: int,
    micro_batch: int | None = None,
    bn_batch: int | None = None,
    join_ranks: bool = False,
    below: int | None = None,
    limit: Callable[[list[int]], int],
    undivided: str = "",
    why_not_single: Callable[[], str] = lambda: "",
) -> BatchPlan:
    """Choose a micro-batch that makes up the global batch exactly.

    micro_batch: fixed, or None for the largest divisor of a rank's share in 16..128 that fits.
    bn_batch: preferred if it fits. join_ranks: if `bn_batch` does not fit, ranks with fewer than
    `ENOUGH_CROPS` share BatchNorm's statistics; then a rank may have fewer than 16 crops, as long
    as BatchNorm has 16. below: a micro-batch that ran out of memory; take the next smaller one.
    limit: gets the candidate sizes, ascending, and returns how many crops fit; raises
    MemoryTooSmall if not even the first size does. undivided: why a rank must compute its share at
    once, without accumulation; "" if it need not. why_not_single: returns why the model cannot be
    trained if BatchNorm has a single crop; "" if it can. It is called only if that might happen.

    Raises ValueError, with the nearest valid sizes, if there is no such micro-batch.
    """
    # Ascending, so the last divisor of a rank's share is the share itself.
    divisors = micro_batches(global_batch, world_size)
    share = divisors[-1]
    if undivided:
        if micro_batch not in (None, share):
            raise ValueError(
                f"runtime.micro_batch: {micro_batch}, but {undivided}; use {share}, or"
                " a smaller training.global_batch"
            )
        micro_batch = share

    # For each size: the number of ranks that share BatchNorm's statistics.
    joined_ranks = dict.fromkeys(divisors, 1)
    if join_ranks and bn_batch:
        for size in divisors:
            joined_ranks[size] = _count_joined_ranks(size, bn_batch, world_size)

    sizes = _sizes_to_try(
        divisors,
        micro_batch=micro_batch,
        bn_batch=bn_batch,
        below=below,
        joined_ranks=joined_ranks,
    )
    # Only with the smallest size can BatchNorm have a single crop.
    smallest_bn_batch = sizes[0] * joined_ranks[sizes[0]]
    problem = why_not_single() if smallest_bn_batch == 1 else ""
    if problem:
        sizes = _without_single(
            sizes,
            problem,
            divisors=divisors,
            micro_batch=micro_batch,
            below=below,
            world_size=world_size,
        )
    # Called once for all sizes: it measures the memory, and all ranks agree on the smallest result.
    max_crops = limit(sizes)
    fitting_sizes = [size for size in sizes if size <= max_crops]
    size = max(fitting_sizes)
    if below is not None:
        reason = f"{below} ran out of memory"
    elif micro_batch is not None:
        reason = undivided or "as configured"
    elif size == bn_batch:
        reason = "auto: training.bn_batch fits"
    elif max_crops < MAX_MICRO_BATCH:
        reason = f"auto: memory allows {max_crops}"
    else:
        reason = "auto"
    return BatchPlan(
        micro_batch=size,
        accumulation=share // size,
        world_size=world_size,
        reason=reason,
        joined_ranks=joined_ranks[size],
    )


def _without_single(
    sizes: list[int],
    problem: str,
    *,
    divisors: list[int],
    micro_batch: int | None,
    below: int | None,
    world_size: int,
) -> list[int]:
    """Return the sizes without the first one, a single crop.

    problem: why the model cannot be trained with a single crop. Raises an error with this text if
    no other size is left. The other arguments are those of `divide_global_batch`.
    """
    if len(sizes) > 1:
        return sizes[1:]
    if below is not None:
        raise MemoryTooSmall(
            f"memory: a micro-batch of {below} does not fit, and {problem}; {REMEDY}"
        )
    if len(divisors) == 1:
        remedy = f"use {2 * world_size}"
        if world_size > 1:
            remedy += ", or fewer ranks"
        raise ValueError(
            f"training.global_batch: {world_size} is a runtime.micro_batch of 1, but"
            f" {problem}; {remedy}"
        )
    key = "training.bn_batch" if micro_batch is None else "runtime.micro_batch"
    raise ValueError(f"{key}: 1, but {problem}; use {divisors[1]}")


def _count_joined_ranks(size: int, bn_batch: int, world_size: int) -> int:
    """Return how many ranks with `size` crops make up `bn_batch`; a divisor of all ranks."""
    if size >= ENOUGH_CROPS:
        return 1
    max_ranks = max(bn_batch // size, 1)
    num_ranks = 1
    for count in range(1, max_ranks + 1):
        # Groups must be of equal size.
        if world_size % count == 0:
            num_ranks = count
    return num_ranks


def micro_batches(global_batch: int, world_size: int) -> list[int]:
    """Return the divisors of a rank's share of the global batch, ascending."""
    if global_batch % world_size:
        lower_share = global_batch // world_size
        lower = max(lower_share, 1) * world_size
        upper = (lower_share + 1) * world_size
        # Both are equal if the batch is smaller than the number of ranks.
        nearest_sizes = sorted({lower, upper})
        nearest = " and ".join(map(str, nearest_sizes))
        raise ValueError(
            f"training.global_batch: {global_batch} is not a multiple of the"
            f" {world_size} ranks; nearest are {nearest}"
        )
    share = global_batch // world_size
    return [size for size in range(1, share + 1) if share % size == 0]


def _sizes_to_try(
    divisors: list[int],
    *,
    micro_batch: int | None,
    bn_batch: int | None,
    below: int | None,
    joined_ranks: Mapping[int, int],
) -> list[int]:
    """Return the sizes that `divide_global_batch` may choose, ascending; at least one."""
    share = divisors[-1]
    low = 1
    high = MAX_MICRO_BATCH
    min_bn_batch = min(MIN_MICRO_BATCH, share * joined_ranks[share])
    if micro_batch is not None:
        if micro_batch not in divisors:
            by_distance = sorted(divisors, key=lambda size: abs(size - micro_batch))
            nearest_sizes = sorted(by_distance[:2])
            nearest = " and ".join(map(str, nearest_sizes))
            raise ValueError(
                f"runtime.micro_batch: {micro_batch} does not divide a rank's share of"
                f" {share}; nearest are {nearest}"
            )
        # Chosen by the user; the size may be small for BatchNorm.
        low = micro_batch
        high = micro_batch
        min_bn_batch = 1
    elif bn_batch in divisors:
        high = bn_batch
        min_bn_batch = min(min_bn_batch, bn_batch)
    if below is not None:
        # After running out of memory, any smaller size is better than none.
        low = 1
        high = min(high, below - 1)
        min_bn_batch = 1

    sizes: list[int] = []
    for size in divisors:
        is_enough = size * joined_ranks[size] >= min_bn_batch
        if low <= size <= high and is_enough:
            sizes.append(size)
    if not sizes and below is not None:
        raise MemoryTooSmall(f"memory: a micro-batch of {below} does not fit; {REMEDY}")
    if not sizes:
        raise ValueError(
            f"training.global_batch: a rank's share of {share} has no divisor from"
            f" {min_bn_batch} to {high}; change it, or set runtime.micro_batch"
        )
    return sizes


def saved_bytes(
    run: Callable[[int], Any], parameters: Iterable[Tensor] = ()
) -> tuple[float, float]:
    """Return the memory that a forward pass keeps for the backward pass.

    Returns (bytes per crop, bytes once). run: computes the forward pass for a number of crops.
    parameters: not counted.
    """
    # `_cdata` differs even between storages without data, whose addresses are all 0.
    ignored = {parameter.untyped_storage()._cdata for parameter in parameters}

    def count(num_crops: int) -> int:
        sizes: dict[int, int] = {}  # by storage: views share theirs

        def note_size(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in ignored:
                sizes[storage._cdata] = storage.nbytes()
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            return tensor

        # The output keeps the graph alive. If a storage were freed before all are counted, another
        # one could take its place under the same key.
        hooks = torch.autograd.graph.saved_tensors_hooks(note_size, unpack)
        with hooks:
            output = run(num_crops)
        del output
        return sum(sizes.values())

    # A straight line through two points: bytes = slope * crops + constant.
    bytes_of_two = count(2)
    bytes_of_four = count(4)
    bytes_per_crop = (bytes_of_four - bytes_of_two) / 2
    bytes_once = 2 * bytes_of_two - bytes_of_four
    return bytes_per_crop, bytes_once


def free_bytes(device: torch.device, local_ranks: int) -> int:
    """Return the free memory of the GPU, or this rank's share of the host's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    # Not MemFree, which leaves out the memory of the file cache.
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = meminfo.read_text(encoding="ascii").split()
        name_index = fields.index("MemAvailable:")
        available_kib = int(fields[name_index + 1])
        return available_kib * 1024 // local_ranks
    # Without /proc, as on macOS: half of the physical memory.
    num_pages = os.sysconf("SC_PHYS_PAGES")
    physical_bytes = num_pages * os.sysconf("SC_PAGE_SIZE")
    return physical_bytes // 2 // local_ranks


def slow_batchnorm(module: nn.Module, accumulation: int) -> None:
    """Make k micro-batches move running statistics as far as one batch: 1 - (1 - m)^(1 / k)."""
    for layer in module.modules():
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001
            continue
        if layer.momentum is not None:
            layer.momentum = 1 - (1 - layer.momentum) ** (1 / accumulation)
