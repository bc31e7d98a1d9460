"""Divide the global batch: micro-batch x ranks x accumulation = global batch.

The global batch is what a model learns from, so hardware never changes it: memory only determines
into how many pieces it is divided. With a global batch of 256 crops on 2 ranks, the share of a rank
is 128 crops. If 50 crops fit, each rank takes 4 micro-batches of 32, the largest divisor of its
share that fits.

The micro-batch also is the number of crops that BatchNorm normalises together, its batch. A model
needs enough of them, and where memory allows fewer, ranks can share BatchNorm's statistics.
"""

import math
import os
from collections.abc import Callable, Iterable
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


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """What the division of a global batch must respect, apart from memory."""

    global_batch: int
    world_size: int
    # runtime.micro_batch; None: the largest size that fits, and that BatchNorm can do with.
    micro_batch: int | None = None
    # training.bn_batch, the size of BatchNorm's batch to aim at; None: no wish.
    bn_batch: int | None = None
    # Ranks may share BatchNorm's statistics, to make up `bn_batch`.
    join_ranks: bool = False
    # Why a rank must compute its share at once, without accumulation; "" if it need not.
    why_undivided: str = ""
    # Returns why the model cannot be trained if BatchNorm has a single crop; "" if it can. It
    # builds the model, so it is called only if that might happen.
    why_not_single: Callable[[], str] = lambda: ""
    # A micro-batch that ran out of memory: only smaller ones are allowed.
    too_large: int | None = None

    def joined_ranks(self, micro_batch: int) -> int:
        """Return how many ranks share BatchNorm's statistics with such micro-batches.

        For example, `bn_batch` is 64 on 6 ranks. With 16 crops each, 4 ranks would make up 64, but
        6 ranks are no multiple of 4: groups of 3 share the statistics of 48 crops. With 32 crops,
        BatchNorm has enough, and no rank shares.
        """
        if not self.join_ranks or not self.bn_batch:
            return 1
        if micro_batch >= ENOUGH_CROPS:
            return 1
        max_ranks = max(self.bn_batch // micro_batch, 1)
        group_sizes = _divisors(self.world_size)
        return max(size for size in group_sizes if size <= max_ranks)

    def bn_batch_of(self, micro_batch: int) -> int:
        """Return the number of crops that BatchNorm normalises together."""
        return micro_batch * self.joined_ranks(micro_batch)


def divide_global_batch(
    request: BatchRequest,
    limit: Callable[[int], int] | None = None,
) -> BatchPlan:
    """Choose the largest allowed micro-batch that fits into the memory.

    limit: gets the smallest allowed micro-batch, and returns how many crops fit, at least so many;
    raises MemoryTooSmall if fewer fit. None: any number fits.

    Raises ValueError, with the nearest valid sizes, if no micro-batch is allowed.
    """
    sizes = _allowed_sizes(request)
    sizes = _without_single_crop(sizes, request)
    max_crops = math.inf if limit is None else limit(sizes[0])
    micro_batch = max(size for size in sizes if size <= max_crops)
    crops_at_once = micro_batch * request.world_size
    return BatchPlan(
        micro_batch=micro_batch,
        accumulation=request.global_batch // crops_at_once,
        world_size=request.world_size,
        reason=_describe_choice(request, micro_batch, max_crops),
        joined_ranks=request.joined_ranks(micro_batch),
    )


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
    return _divisors(global_batch // world_size)


def _divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending; the last one is the number itself."""
    return [size for size in range(1, number + 1) if number % size == 0]


def _allowed_sizes(request: BatchRequest) -> list[int]:
    """Return the micro-batches that the request allows, ascending; at least one."""
    sizes = micro_batches(request.global_batch, request.world_size)
    fixed = _fixed_size(request, sizes)
    if request.too_large is not None:
        return _smaller_sizes(request, fixed, sizes)
    # A fixed size may be small for BatchNorm: it is the user's choice.
    if fixed is not None:
        return [fixed]
    return _automatic_sizes(request, sizes)


def _fixed_size(request: BatchRequest, sizes: list[int]) -> int | None:
    """Return the only allowed micro-batch; None if it is chosen automatically.

    sizes: those that divide a rank's share, here and in the functions below.
    """
    share = sizes[-1]
    if request.why_undivided:
        if request.micro_batch not in (None, share):
            raise ValueError(
                f"runtime.micro_batch: {request.micro_batch}, but"
                f" {request.why_undivided}; use {share}, or a smaller"
                " training.global_batch"
            )
        return share

    fixed = request.micro_batch
    if fixed is not None and fixed not in sizes:
        by_distance = sorted(sizes, key=lambda size: abs(size - fixed))
        nearest_sizes = sorted(by_distance[:2])
        nearest = " and ".join(map(str, nearest_sizes))
        raise ValueError(
            f"runtime.micro_batch: {fixed} does not divide a rank's share of"
            f" {share}; nearest are {nearest}"
        )
    return fixed


def _largest_automatic(request: BatchRequest, sizes: list[int]) -> int:
    """Return the largest micro-batch to choose automatically."""
    # A larger one than training.bn_batch would give BatchNorm more crops than the user wants.
    if request.bn_batch in sizes:
        return request.bn_batch
    return MAX_MICRO_BATCH


def _automatic_sizes(request: BatchRequest, sizes: list[int]) -> list[int]:
    """Return the sizes that are not too large, and that give BatchNorm enough crops."""
    largest = _largest_automatic(request, sizes)
    # A small share, or a small training.bn_batch, is the user's choice.
    share = sizes[-1]
    min_bn_batch = min(MIN_MICRO_BATCH, request.bn_batch_of(share), largest)

    allowed: list[int] = []
    for size in sizes:
        if size <= largest and request.bn_batch_of(size) >= min_bn_batch:
            allowed.append(size)
    if not allowed:
        raise ValueError(
            f"training.global_batch: a rank's share of {share} has no divisor from"
            f" {min_bn_batch} to {largest}; change it, or set runtime.micro_batch"
        )
    return allowed


def _smaller_sizes(
    request: BatchRequest, fixed: int | None, sizes: list[int]
) -> list[int]:
    """Return the sizes below the one that ran out of memory, even if they are small for BatchNorm.

    Raises MemoryTooSmall if there are none.
    """
    assert request.too_large is not None
    # The loss compares the crops of a rank's share with each other: in smaller pieces, it would be
    # another loss.
    if request.why_undivided:
        raise MemoryTooSmall(
            f"memory: {request.too_large} crops at once do not fit, but"
            f" {request.why_undivided}; {REMEDY}, or a smaller training.global_batch"
        )
    largest = _largest_automatic(request, sizes) if fixed is None else fixed
    largest = min(largest, request.too_large - 1)
    smaller = [size for size in sizes if size <= largest]
    if not smaller:
        raise MemoryTooSmall(
            f"memory: a micro-batch of {request.too_large} does not fit; {REMEDY}"
        )
    return smaller


def _without_single_crop(sizes: list[int], request: BatchRequest) -> list[int]:
    """Return the sizes that give BatchNorm more than one crop, if the model needs that."""
    # Only with the smallest size can BatchNorm have a single crop.
    if request.bn_batch_of(sizes[0]) > 1:
        return sizes
    problem = request.why_not_single()
    if not problem:
        return sizes
    if len(sizes) == 1:
        raise _single_crop_error(request, problem)
    return sizes[1:]


def _single_crop_error(request: BatchRequest, problem: str) -> ValueError:
    """Return the error where a single crop is the only micro-batch, with what to change."""
    world_size = request.world_size
    if request.too_large is not None:
        return MemoryTooSmall(
            f"memory: a micro-batch of {request.too_large} does not fit, and {problem};"
            f" {REMEDY}"
        )
    if request.global_batch == world_size:
        remedy = f"use {2 * world_size}"
        if world_size > 1:
            remedy += ", or fewer ranks"
        return ValueError(
            f"training.global_batch: {world_size} is a runtime.micro_batch of 1, but"
            f" {problem}; {remedy}"
        )
    key = "training.bn_batch" if request.micro_batch is None else "runtime.micro_batch"
    _, next_size, *_ = micro_batches(request.global_batch, world_size)
    return ValueError(f"{key}: 1, but {problem}; use {next_size}")


def _describe_choice(request: BatchRequest, micro_batch: int, max_crops: float) -> str:
    """Return the reason for a micro-batch, where `max_crops` fit into the memory."""
    if request.too_large is not None:
        return f"{request.too_large} ran out of memory"
    if request.why_undivided:
        return request.why_undivided
    if request.micro_batch is not None:
        return "as configured"
    if micro_batch == request.bn_batch:
        return "auto: training.bn_batch fits"
    if max_crops < MAX_MICRO_BATCH:
        return f"auto: memory allows {max_crops}"
    return "auto"


def saved_bytes(
    run: Callable[[int], Any], parameters: Iterable[Tensor] = ()
) -> tuple[float, float]:
    """Return the memory that a forward pass keeps for the backward pass.

    Returns (bytes per crop, bytes once). run: computes the forward pass for a number of crops.
    parameters: not counted.
    """
    ignored = {_storage_key(parameter) for parameter in parameters}
    # A straight line through two points: bytes = slope * crops + constant.
    bytes_of_two = _saved_bytes_of(run, 2, ignored)
    bytes_of_four = _saved_bytes_of(run, 4, ignored)
    bytes_per_crop = (bytes_of_four - bytes_of_two) / 2
    bytes_once = 2 * bytes_of_two - bytes_of_four
    return bytes_per_crop, bytes_once


def _saved_bytes_of(
    run: Callable[[int], Any], num_crops: int, ignored: set[int]
) -> int:
    """Return the bytes that a forward pass of `num_crops` keeps, without the `ignored` storages."""
    # By storage, because several tensors may be views of one.
    sizes: dict[int, int] = {}

    # Autograd calls these two functions when it keeps a tensor, and when it reads it again.
    def note_size(tensor: Tensor) -> Tensor:
        key = _storage_key(tensor)
        if key not in ignored:
            sizes[key] = tensor.untyped_storage().nbytes()
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    # The output keeps the graph alive. If a storage were freed before all are counted, another
    # one could take its place under the same key.
    with torch.autograd.graph.saved_tensors_hooks(note_size, unpack):
        output = run(num_crops)
    del output
    return sum(sizes.values())


def _storage_key(tensor: Tensor) -> int:
    """Return a number that only tensors with the same storage share."""
    # Not the address of the data, which is 0 for all storages without data.
    return tensor.untyped_storage()._cdata


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
