"""Plan a training: the division of its batch, and what is kept on the device.

A plan follows from the free memory of all ranks and from the predicted footprint.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from speakerlab.config.schema import Config
from speakerlab.experiments.device_memory import (
    Memory,
    batch_request,
    configured_micro_batch,
    why_fewer,
)
from speakerlab.experiments.footprint import rank_footprint
from speakerlab.training import batch_size
from speakerlab.training.batch_size import ENOUGH_CROPS, BatchPlan
from speakerlab.training.distributed import Ranks

log = logging.getLogger(__name__)

# With `runtime.bank_gb: auto` on a CPU, noise and RIRs may take this share of the free memory.
CPU_BANK_SHARE = 1 / 4
CPU_BANK_GB = 4.0  # at most, because data workers need memory of the host too


class BankBytes(NamedTuple):
    """Memory that rooms and noise take on a device; rooms have no other place."""

    rooms: int = 0
    noise: int = 0


NO_BANKS = BankBytes()


class DevicePlan(NamedTuple):
    """Division of the global batch, and what is kept on the device."""

    batch: BatchPlan
    noise_on_device: bool  # else the data workers read it
    # Layers of a pretrained model are computed again in the backward pass, instead of being kept.
    recomputes_layers: bool = False


def plan_device(
    config: Config,
    ranks: Ranks,
    *,
    num_classes: int,
    precision: str,
    banks: BankBytes = NO_BANKS,
    too_large: int | None = None,
) -> DevicePlan:
    """Plan the batch and the place of the noise from the free memory of all ranks.

    num_classes: of the whole head; 0 without labels. precision: fp32, bf16 or fp16.
    too_large: a micro-batch that ran out of memory; the plan has a smaller one.

    Raises ValueError, with fixes, if the rooms or the smallest micro-batch do not fit.
    """
    on_gpu = ranks.device.type == "cuda"
    # On a GPU with `auto`, noise gets the memory that the batch leaves, and never takes crops away.
    noise_gets_rest = on_gpu and config.runtime.bank_gb == "auto"
    noise_on_device = noise_gets_rest or _fits_limit(config, ranks, banks)
    bank_bytes = banks.rooms
    if noise_on_device and not noise_gets_rest:
        bank_bytes += banks.noise

    request = batch_request(config, ranks.world_size, too_large)
    # The free memory of a host is too uncertain to refuse a configured size.
    if not on_gpu and configured_micro_batch(config) is not None:
        batch = batch_size.divide_global_batch(request, limit=None)
        recomputes_layers = config.runtime.checkpoint_layers is True
        return DevicePlan(batch, noise_on_device, recomputes_layers)

    def measure(config: Config) -> Memory:
        return _measure_memory(
            config,
            ranks,
            num_classes=num_classes,
            precision=precision,
            bank_bytes=bank_bytes,
        )

    memory = fitting_memory(config, ranks.world_size, measure)
    # The rank with the least memory decides for all ranks, here and below.
    max_crops = min(ranks.gather_objects(memory.max_crops))
    limit = partial(memory.require, max_crops)
    batch = batch_size.divide_global_batch(request, limit)
    reason = why_fewer(memory, batch, max_crops)
    if reason:
        log.info("%s", reason)

    if noise_gets_rest and banks.noise:
        # After running out of memory, the freed memory stays free.
        num_crops = max(batch.micro_batch, too_large or 0)
        left = min(ranks.gather_objects(memory.left(num_crops)))
        noise_on_device = banks.noise <= left
        if not noise_on_device:
            free_for_banks = banks.rooms + left
            _report_noise(banks, free_for_banks, "that the training leaves on the GPU")
    recomputes_layers = memory.config.runtime.checkpoint_layers is True
    return DevicePlan(batch, noise_on_device, recomputes_layers)


def fitting_memory(
    config: Config,
    world_size: int,
    measure: Callable[[Config], Memory],
) -> Memory:
    """Return the memory of a training, which decides `runtime.checkpoint_layers: auto`.

    The layers of a pretrained model are kept if that leaves room for a rank's share of the batch,
    or for enough crops for a good BatchNorm; else they are computed again in the backward pass.
    All ranks measure the same memory.
    """
    memory = measure(config)
    may_recompute = config.is_pretrained and config.runtime.checkpoint_layers == "auto"
    rank_share = config.training.global_batch // world_size
    has_enough_crops = memory.max_crops >= min(rank_share, ENOUGH_CROPS)
    if has_enough_crops or not may_recompute:
        return memory
    runtime = config.runtime.model_copy(update={"checkpoint_layers": True})
    return measure(config.model_copy(update={"runtime": runtime}))


def _fits_limit(config: Config, ranks: Ranks, banks: BankBytes) -> bool:
    """Return whether noise and rooms fit into `runtime.bank_gb`; ValueError if the rooms do not."""
    bank_gb = config.runtime.bank_gb
    if bank_gb == "auto":
        free = batch_size.free_bytes(ranks.device, ranks.local_size)
        limit = min(free * CPU_BANK_SHARE, CPU_BANK_GB * 2**30)
    else:
        limit = bank_gb * 2**30
    # The rank with the least memory decides for all ranks.
    limit = min(ranks.gather_objects(limit))
    if banks.rooms > limit:
        raise ValueError(
            f"runtime.bank_gb: the rooms take {banks.rooms / 2**30:.1f} GB, more than"
            f" {limit / 2**30:.3g} GB; set a larger value, or list fewer files in"
            " data.rirs"
        )
    noise_on_device = sum(banks) <= limit
    if not noise_on_device:
        _report_noise(banks, limit, "of runtime.bank_gb")
    return noise_on_device


def _report_noise(banks: BankBytes, limit: float, source: str) -> None:
    log.info(
        "data.noise: noise and rooms take %.1f GB, more than the %.3g GB %s: the data"
        " workers read the noise and send it with each crop, which slows them down",
        sum(banks) / 2**30,
        limit / 2**30,
        source,
    )


def _measure_memory(
    config: Config,
    ranks: Ranks,
    *,
    num_classes: int,
    precision: str,
    bank_bytes: int,
) -> Memory:
    """Return the free memory of the rank with the least, and the footprint of this rank."""
    on_gpu = ranks.device.type == "cuda"
    free = batch_size.free_bytes(ranks.device, ranks.local_size)
    # Of a host, only a share of the memory that is free beside noise and rooms is planned.
    if not on_gpu:
        free -= bank_bytes
        bank_bytes = 0
    return Memory(
        config,
        rank_footprint(
            config,
            world_size=ranks.world_size,
            num_classes=num_classes,
            precision=precision,
            with_data=not on_gpu,
        ),
        free=min(ranks.gather_objects(free)),
        on_gpu=on_gpu,
        world_size=ranks.world_size,
        bank_bytes=bank_bytes,
        key=f"free memory of {ranks.device}",
    )
