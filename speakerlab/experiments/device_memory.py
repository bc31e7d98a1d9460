"""Memory of a device, and what a training takes of it: how many crops fit, and what would help."""

import math
from dataclasses import dataclass, replace
from functools import partial

from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.experiments.footprint import Footprint, why_not_single
from speakerlab.training import batch_size
from speakerlab.training.batch_size import (
    ENOUGH_CROPS,
    BatchPlan,
    BatchRequest,
    MemoryTooSmall,
    micro_batches,
)

# What a card's nominal memory loses before a training measures its free memory.
DRIVER_GB = 0.25
CONTEXT_GB = 0.4  # of CUDA, with the first kernels
# NCCL's buffers, with several ranks and without NVLink. With NVLink they take 0.5 to 0.7 GB
# (github.com/NVIDIA/nccl/issues/964), on cards whose reserve is larger than the difference.
NCCL_GB = 0.25
# Kernels that libraries load later, workspaces, and the state of a typical model: weights,
# gradients and momentum. Only state beyond STATE_IN_RESERVE is added to it.
GPU_FIXED_BYTES = int(1.1 * 2**30)
STATE_IN_RESERVE = 384 * 2**20
GPU_USABLE_SHARE = 0.92
CPU_USABLE_SHARE = 0.5
TRANSIENT_SHARE = 1.055  # peak of a backward pass, relative to the saved activations
# Cards of this size, GTX 1080 Ti and RTX 2080 Ti, are older than bf16.
WITHOUT_BF16_GB = 11


@dataclass(frozen=True)
class Memory:
    """Memory of a rank's device, and what a training takes of it, in bytes.

    A card of 11 GB, for example, has place for 76 crops of 0.103 GB:

        nominal                      11.00 GB
        - taken_bytes                 0.65     by the driver and CUDA, before the training starts
        = free                       10.35
        x usable_share                9.52     the other 8 % are a reserve
        - state_and_libraries         1.10     weights, gradients, optimizer and libraries
        - bank_bytes                  0.50     noise and rooms
        = bytes_for_crops             7.92
    """

    config: Config
    footprint: Footprint
    free: float  # before the model is loaded
    on_gpu: bool = True
    world_size: int = 1
    bank_bytes: float = 0.0  # of noise and RIRs that will be loaded
    taken_bytes: float = 0.0  # 0 where the free memory is measured
    key: str = "--gpu-mem"  # the option for more memory, in messages
    # The 16-bit format to propose, in messages.
    half_precision: str = "bf16 (fp16 where the GPU has no bf16)"

    @property
    def nominal(self) -> float:
        return self.free + self.taken_bytes

    @property
    def is_configured(self) -> bool:
        """Return whether the micro-batch is configured, so that it may use all free memory."""
        return configured_micro_batch(self.config) is not None

    @property
    def usable_share(self) -> float:
        """Return the share of the free memory that a training may take."""
        if self.is_configured:
            return 1.0
        return GPU_USABLE_SHARE if self.on_gpu else CPU_USABLE_SHARE

    @property
    def state_and_libraries(self) -> float:
        """Return the bytes of weights, gradients and optimizer; on a GPU also of libraries."""
        state = self.footprint.state(self.world_size)
        if not self.on_gpu:
            return state
        return GPU_FIXED_BYTES + max(state - STATE_IN_RESERVE, 0)

    @property
    def fixed(self) -> float:
        """Return the bytes that do not depend on the number of crops."""
        return self.state_and_libraries + self.bank_bytes

    @property
    def bytes_for_crops(self) -> float:
        """Return the bytes that are left for crops; negative if not even the model fits."""
        return int(self.free) * self.usable_share - self.fixed

    @property
    def peak_per_crop(self) -> float:
        """Return the bytes that each crop takes at the peak of a step."""
        return self.footprint.saved_per_crop * TRANSIENT_SHARE

    @property
    def max_crops(self) -> int:
        """Return the number of crops that fit."""
        return max(int(self.bytes_for_crops / self.peak_per_crop), 0)

    def missing_for(self, num_crops: int) -> float:
        """Return the bytes that are missing for so many crops; negative if they fit."""
        return num_crops * self.peak_per_crop - self.bytes_for_crops

    def nominal_for(self, num_crops: int) -> float:
        """Return the nominal memory in which so many crops fit."""
        # Only the usable share of additional memory counts.
        return self.nominal + self.missing_for(num_crops) / self.usable_share

    def left(self, num_crops: int) -> float:
        """Return the bytes of a GPU that remain for noise beside so many crops; at least 0.

        Noise never takes the reserve, not even where a configured micro-batch may.
        """
        usable = self.free * GPU_USABLE_SHARE
        return max(usable - self.fixed - num_crops * self.peak_per_crop, 0.0)

    def require(self, max_crops: int, least: int) -> int:
        """Return the crops that fit on every rank; MemoryTooSmall with fixes if below `least`."""
        if max_crops < least:
            raise _too_small_error(self, max_crops, least)
        return max_crops

    def plan_batch(self) -> BatchPlan:
        """Return the batch plan for such devices; ValueError in the same cases as in training."""
        request = batch_request(self.config, self.world_size)
        limit = partial(self.require, self.max_crops)
        return batch_size.divide_global_batch(request, limit)


def batch_request(
    config: Config,
    world_size: int,
    too_large: int | None = None,
) -> BatchRequest:
    """Return what the configuration asks of the division of its global batch."""
    return BatchRequest(
        global_batch=config.training.global_batch,
        world_size=world_size,
        micro_batch=configured_micro_batch(config),
        bn_batch=config.training.bn_batch,
        join_ranks=config.runtime.sync_bn == "auto",
        why_undivided=build.why_undivided(config),
        why_not_single=partial(why_not_single, config),
        too_large=too_large,
    )


def configured_micro_batch(config: Config) -> int | None:
    """Return the configured micro-batch, None for auto."""
    micro_batch = config.runtime.micro_batch
    # A table by model; the batch of other models is planned.
    if isinstance(micro_batch, dict):
        micro_batch = micro_batch.get(config.model.name)
    return None if micro_batch == "auto" else micro_batch


def _too_small_error(memory: Memory, max_crops: int, least: int) -> MemoryTooSmall:
    """Return the error where `max_crops` fit on every rank, fewer than the `least` allowed."""
    config = memory.config
    is_undivided = bool(build.why_undivided(config))

    # Each fix is enough by itself; the least harmful comes first.
    fixes: list[str] = []
    if not is_undivided:
        fixes += _smaller_micro_batch(memory, max_crops)
    # Activations take half in 16 bits, but not the weights, gradients and moments.
    if memory.footprint.precision == "fp32" and memory.bytes_for_crops > 0:
        fixes.append(f"runtime.precision={memory.half_precision}")
    if memory.bank_bytes >= memory.missing_for(least):
        fixes.append(f"less than {_gb(memory.bank_bytes)} GB of noise and rooms")
    fixes.append(f"{_gb(memory.nominal_for(least))} GB")
    size_key = "training.global_batch" if is_undivided else "data.crop_seconds"
    fixes.append(f"a lower {size_key} or a smaller model")

    key = "runtime.micro_batch" if memory.is_configured else memory.key
    unit, length = build.batch_unit(config)
    return MemoryTooSmall(
        f"{key}: {least} {unit}s{length} in {memory.footprint.precision} do not fit in "
        f"{_gb(memory.nominal)} GB, {max_crops} do; use {', '.join(fixes)}"
    )


def _smaller_micro_batch(memory: Memory, max_crops: int) -> list[str]:
    """Return the setting of the largest micro-batch that fits; empty if none does."""
    sizes = micro_batches(memory.config.training.global_batch, memory.world_size)
    fitting = [size for size in sizes if size <= max_crops]
    if not fitting:
        return []
    if fitting == [1] and why_not_single(memory.config):
        return []
    setting = f"runtime.micro_batch={fitting[-1]}"
    if not memory.is_configured:
        setting += " (too few for a good BatchNorm)"
    return [setting]


def why_fewer(memory: Memory, batch: BatchPlan, max_crops: int) -> str:
    """Return why a rank has fewer crops than `training.bn_batch`, and what changes it.

    max_crops: number of crops that fit on every rank. Returns "" if memory is not the reason.
    """
    bn_batch = memory.config.training.bn_batch
    if memory.is_configured or bn_batch is None:
        return ""
    sizes = micro_batches(batch.global_batch, batch.world_size)
    larger_sizes = [size for size in sizes if batch.micro_batch < size <= bn_batch]
    if not larger_sizes or larger_sizes[0] <= max_crops:
        return ""
    next_size = larger_sizes[0]

    unit, _ = build.batch_unit(memory.config)
    problem = (
        f"training.bn_batch: {bn_batch} {unit}s do not fit in {_gb(memory.nominal)} GB"
        f" ({memory.key}), {max_crops} do"
    )
    fix = f"{_gb(memory.nominal_for(next_size))} GB"
    if memory.footprint.precision == "fp32" and memory.on_gpu:
        fix += f" or runtime.precision={memory.half_precision}"
    if batch.joined_ranks == 1:
        return f"{problem}: BatchNorm sees {batch.bn_batch}; {next_size} {unit}s need {fix}"

    # The ranks of a group exchange moments forward, and sums of gradients backward.
    without_exchanges = ", without exchanges," if next_size >= ENOUGH_CROPS else ""
    return (
        f"{problem}: a rank takes {batch.micro_batch}, and {batch.joined_ranks} ranks"
        f" share BatchNorm's statistics of {batch.bn_batch} {unit}s, with two exchanges"
        f" per layer and micro-batch; {next_size} {unit}s{without_exchanges} need {fix};"
        f" with runtime.sync_bn=off, BatchNorm sees {batch.micro_batch}, without"
        " exchanges"
    )


def card_memory(
    config: Config,
    needs: Footprint,
    card_gb: float,
    world_size: int = 1,
    bank_gb: float = 0.0,
) -> Memory:
    """Return the `Memory` of each of `world_size` cards with `card_gb` GB."""
    taken_gb = sum(taken_before(world_size).values())
    card = Memory(
        config,
        needs,
        free=(card_gb - taken_gb) * 2**30,
        on_gpu=True,
        world_size=world_size,
        bank_bytes=bank_gb * 2**30,
        taken_bytes=taken_gb * 2**30,
    )
    if lacks_bf16(card_gb):
        return replace(card, half_precision="fp16")
    return card


def taken_before(world_size: int) -> dict[str, float]:
    """Return the GB of a card that are not free when a training measures its memory, by part."""
    parts = {"driver": DRIVER_GB, "CUDA context": CONTEXT_GB}
    if world_size > 1:
        parts["NCCL buffers"] = NCCL_GB
    return parts


def lacks_bf16(card_gb: float) -> bool:
    """Return whether all cards of this size are older than bf16."""
    return round(card_gb) == WITHOUT_BF16_GB


def _gb(num_bytes: float) -> str:
    """Return GB with one decimal, rounded up, so that the stated memory is enough."""
    tenths = math.ceil(10 * num_bytes / 2**30)
    return f"{max(tenths, 0) / 10:g}"
