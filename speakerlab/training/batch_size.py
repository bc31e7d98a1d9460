"""Micro-batch x ranks x accumulation = global batch. In: the wish and the memory. Out: a plan.

Hardware never changes the global batch: memory only decides in how many pieces it is computed.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MIN_MICRO_BATCH, MAX_MICRO_BATCH = 16, 128
GPU_RESERVE_BYTES = int(1.5 * 2**30)  # context, workspaces, and what a usual model learns with:
STATE_IN_RESERVE = 384 * 2**20  # weights, gradients and momentum; only what is more counts
GPU_USABLE_SHARE = 0.92
CPU_USABLE_SHARE = 0.5
TRANSIENT_SHARE = 1.055  # what a backward pass holds beyond the saved activations
REMEDY = "use a shorter data.crop_seconds, a smaller model or a lower precision"


@dataclass(frozen=True)
class BatchPlan:
    """How the global batch is computed, and why so."""

    micro_batch: int
    accumulation: int
    world_size: int
    reason: str
    joined_ranks: int = 1  # how many neighbours share the statistics of BatchNorm

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def bn_batch(self) -> int:
        """How many crops BatchNorm sees at once."""
        return self.micro_batch * self.joined_ranks

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
    join_ranks: bool = False,
    below: int | None = None,
    limit: Callable[[], int],
    mode: str = "auto",
) -> BatchPlan:
    """Exact by construction; ValueError names the nearest sizes that are.

    micro_batch: fixed, or None for the largest divisor of a rank's share in 16..128 that `limit`
    (called only then) allows. bn_batch: taken instead where it fits; where it does not and
    `join_ranks`, ranks share statistics until as many crops are seen. below: after a run went out
    of memory with this micro-batch, the next smaller one is taken, whatever was asked for. mode:
    what the reason calls this way of choosing.
    """
    divisors = micro_batches(global_batch, world_size)
    if micro_batch is not None and micro_batch not in divisors:
        near = sorted(divisors, key=lambda size: abs(size - micro_batch))[:2]
        raise ValueError(
            f"runtime.micro_batch: must divide a rank's share of {divisors[-1]}, got "
            f"{micro_batch}; nearest are {' and '.join(map(str, sorted(near)))}"
        )
    if below is not None:
        most = min(below - 1, micro_batch or limit())
        size = max((size for size in divisors if size <= most), default=0)
        reason = f"memory did not suffice for {below}"
        if not size:
            raise ValueError(f"runtime.micro_batch: not even 1 crop fits, {reason}; {REMEDY}")
    elif micro_batch is not None:
        size, reason = micro_batch, "asked for"
    else:
        size, reason = _choose(divisors, bn_batch, limit(), mode)
    joined = ranks_to_join(size, bn_batch, world_size) if join_ranks else 1
    return BatchPlan(size, divisors[-1] // size, world_size, reason, joined)


def micro_batches(global_batch: int, world_size: int) -> list[int]:
    """Micro-batches that make up a rank's share, the share itself last."""
    if global_batch % world_size:
        below = global_batch // world_size
        near = sorted({max(below, 1) * world_size, (below + 1) * world_size})
        raise ValueError(
            f"training.global_batch: must be a multiple of the {world_size} ranks, got "
            f"{global_batch}; nearest are {' and '.join(map(str, near))}"
        )
    share = global_batch // world_size
    return [size for size in range(1, share + 1) if share % size == 0]


def _choose(divisors: list[int], bn_batch: int | None, most: int, mode: str) -> tuple[int, str]:
    """The micro-batch where none was asked for, and why."""
    if bn_batch in divisors and bn_batch <= most:
        return bn_batch, f"{mode}: training.bn_batch fits"
    floor = min(MIN_MICRO_BATCH, divisors[-1])
    if most < floor:
        raise ValueError(
            f"runtime.micro_batch: at least {floor} crops must fit, got room for {most}; {REMEDY}"
        )
    fitting = [size for size in divisors if floor <= size <= min(MAX_MICRO_BATCH, most)]
    if not fitting:
        raise ValueError(
            f"training.global_batch: no divisor of a rank's share is in {floor}.."
            f"{min(MAX_MICRO_BATCH, most)}, got a share of {divisors[-1]}; change it, or set "
            "runtime.micro_batch"
        )
    return fitting[-1], f"{mode}: memory allows {most}" if most < MAX_MICRO_BATCH else mode


def micro_batches_to_try(
    divisors: list[int], *, bn_batch: int | None = None, below: int | None = None
) -> list[int]:
    """What `plan_batch` could choose from, in rising order: no more need be tried."""
    floor = 1 if below is not None else min(MIN_MICRO_BATCH, divisors[-1])
    most = MAX_MICRO_BATCH if below is None else below - 1
    if bn_batch in divisors:
        floor, most = min(floor, bn_batch), min(bn_batch, most)
    return [size for size in divisors if floor <= size <= most]


def ranks_to_join(micro_batch: int, bn_batch: int | None, world_size: int) -> int:
    """How many neighbouring ranks see `bn_batch` crops together, or as nearly as groups can."""
    most = max((bn_batch or 0) // micro_batch, 1)
    return max(n for n in range(1, world_size + 1) if world_size % n == 0 and n <= most)


def saved_bytes(
    run: Callable[[int], Any], parameters: Iterable[Tensor] = ()
) -> tuple[float, float]:
    """What a forward pass keeps for the backward pass: (bytes for each crop more, and in any case).

    run: computes the forward pass for a number of crops; parameters: are not counted.
    """
    ignored = {_storage_key(parameter) for parameter in parameters}
    two, four = (_saved_bytes(run, num_crops, ignored) for num_crops in (2, 4))
    return (four - two) / 2, 2 * two - four


def _saved_bytes(run: Callable[[int], Any], num_crops: int, ignored: set[int]) -> int:
    sizes: dict[int, int] = {}  # one entry a storage: views share theirs

    def note(tensor: Tensor) -> Tensor:
        if _storage_key(tensor) not in ignored:
            sizes[_storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = run(num_crops)  # alive until counted, so that no storage is used twice
    del kept
    return sum(sizes.values())


def _storage_key(tensor: Tensor) -> int:
    """Tells storages apart, also those of tensors without data, whose addresses are all 0."""
    return tensor.untyped_storage()._cdata


def memory_limit(
    bytes_per_crop: float,
    free_bytes: int,
    device: torch.device,
    *,
    state_bytes: float = 0,
    bank_bytes: float = 0,
) -> int:
    """How many crops fit in the memory that is free now, before the model is on the device.

    state_bytes: weights, gradients, momentum; bank_bytes: noise and rooms that will be there too.
    """
    if device.type == "cuda":
        held = GPU_RESERVE_BYTES + max(state_bytes - STATE_IN_RESERVE, 0) + bank_bytes
        usable = free_bytes * GPU_USABLE_SHARE - held
    else:
        usable = free_bytes * CPU_USABLE_SHARE - state_bytes - bank_bytes
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
