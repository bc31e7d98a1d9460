"""Choose ranks, precision and kernels of a training for its machine."""

from typing import Any

import torch

from speakerlab.config.schema import Config
from speakerlab.core import system
from speakerlab.embedder import Embedder
from speakerlab.models.segmenter import Segmenter
from speakerlab.training.distributed import Ranks, start_ranks
from speakerlab.training.precision import (
    Precision,
    apply_backend_settings,
    card_of,
    resolve_precision,
)
from speakerlab.training.task import Task

CACHE_LINE = 16  # values in fp32


def start_rank(config: Config) -> Ranks:
    """Choose this process's device and join the other ranks."""
    runtime = config.runtime
    apply_backend_settings(
        deterministic=runtime.deterministic, conv_tf32=runtime.tf32 == "auto"
    )
    if runtime.num_threads != "auto":
        torch.set_num_threads(runtime.num_threads)
    ranks = start_ranks(timeout_minutes=runtime.timeout_minutes, device=runtime.device)
    # Every step of a training allocates the same memory again.
    if ranks.device.type == "cpu":
        system.keep_freed_memory()
    return ranks


def choose_precision(config: Config, ranks: Ranks) -> Precision:
    """Return the precision for all ranks; the least capable device decides."""
    cards = ranks.gather_objects(card_of(ranks.device))
    return resolve_precision(config.runtime.precision, ranks.device, cards)


def choose_kernels(config: Config, task: Task) -> None:
    """Choose memory layout and compilation; neither changes a loss beyond rounding.

    On a CPU, channels last is faster, except with few channels: the threads of BatchNorm's backward
    pass then write their sums to one cache line, which takes ten times as long.
    """
    # A task with a teacher has two embedders of the same architecture.
    embedders: list[Any] = []
    for module in task.children():
        if isinstance(module, Embedder | Segmenter):
            embedders.append(module)

    channels_last = config.runtime.channels_last
    if channels_last == "auto":
        channels_last = _is_channels_last_faster(embedders[0], task.precision)

    compile_mode = config.runtime.compile
    for embedder in embedders:
        if channels_last:
            embedder.backbone.to(memory_format=torch.channels_last)
        if compile_mode:
            # YAML's `true` is torch.compile's default mode.
            mode = "default" if compile_mode is True else compile_mode
            embedder.compile_for_training(mode)


def _is_channels_last_faster(embedder: Embedder, precision: Precision) -> bool:
    # In half precision, tensor cores compute in this layout. Not measured yet.
    if precision.device_type != "cpu":
        return precision.name != "fp32"
    # Without 2-D layers the layout makes no difference.
    for module in embedder.modules():
        is_norm = isinstance(module, torch.nn.BatchNorm2d)
        if is_norm and module.num_features < CACHE_LINE:
            return False
    return True
