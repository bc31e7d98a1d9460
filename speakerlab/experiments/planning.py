"""Predict the memory of a training without running it, and plan the batch with it.

The forward pass runs on fake tensors, which have shapes and no data, in about a second.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.frontend.fbank import Fbank
from speakerlab.models import MODELS
from speakerlab.models.cpu import plain_code
from speakerlab.training import batch_size
from speakerlab.training.batch_size import BatchPlan, MemoryTooSmall
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import resolve_precision
from speakerlab.training.task import Task

DRIVER_GB = 0.25  # of a card's nominal memory that the driver keeps
GPU_RESERVE_BYTES = int(1.5 * 2**30)  # context, workspaces, and the state of a usual model:
STATE_IN_RESERVE = 384 * 2**20  # weights, gradients and momentum; only what is more counts
GPU_USABLE_SHARE = 0.92
CPU_USABLE_SHARE = 0.5
TRANSIENT_SHARE = 1.055  # what a backward pass holds beyond the saved activations

# Number and samples of the crops of an utterance; what is computed from so many embeddings; the
# parameters of that; and those that are copies, without gradient and momentum (of a teacher).
Learned = tuple[
    list[tuple[int, int]], Callable[[int], Tensor], list[nn.Parameter], list[nn.Parameter]
]


@dataclass(frozen=True)
class Footprint:
    """Memory of a training on its device, in bytes."""

    precision: str
    backbone_crop: float  # saved for the backward pass, per crop
    head_crop: float
    saved_once: float  # for any number of crops, without the parameters
    weights: int
    momentum: int  # all state of the optimizer

    @property
    def crop(self) -> float:
        """Return bytes per crop; gradients of logits are as large as what is saved of them."""
        return self.backbone_crop + 2 * self.head_crop

    def state(self, world_size: int) -> float:
        """Return bytes for any number of crops; DDP holds two sets of gradients once."""
        gradients = self.weights * (1 if world_size == 1 else 2)
        return self.weights + gradients + self.momentum + self.saved_once


@dataclass(frozen=True)
class Memory:
    """Memory of a rank's device, before the model is there, and what a training needs of it."""

    config: Config
    found: Footprint
    free: float  # bytes
    on_gpu: bool = True
    world_size: int = 1
    bank_bytes: float = 0.0  # of noise and rooms that will be there too
    kept: float = 0.0  # bytes of its nominal memory that are never free
    key: str = "--gpu-mem"  # the option that gives more of it, for messages

    @property
    def is_fixed(self) -> bool:
        """Return whether the micro-batch is configured; it may use what `auto` leaves free."""
        return asked_micro_batch(self.config) is not None

    @property
    def usable_share(self) -> float:
        return 1.0 if self.is_fixed else GPU_USABLE_SHARE if self.on_gpu else CPU_USABLE_SHARE

    @property
    def crop(self) -> float:
        """Return the bytes that each crop takes."""
        return self.found.crop * TRANSIENT_SHARE

    @property
    def fit(self) -> int:
        """Return the number of crops that fit."""
        return max(int(self._for_crops() / self.crop), 0)

    def require(self, most: int, least: int) -> int:
        """Return `most`, the crops that fit on every rank; if too few, say what would fit."""
        if most >= least:
            return most
        config, found = self.config, self.found
        usable, needed = self._for_crops(), least * self.crop
        enough = self.free + self.kept + (needed - usable) / self.usable_share
        sizes = batch_size.micro_batches(config.training.global_batch, self.world_size)
        lower = "data.crop_seconds"
        if build.why_undivided(config):
            sizes, lower = [], "training.global_batch"
        fixes = [f"runtime.micro_batch={size}" for size in [s for s in sizes if s <= most][-1:]]
        if fixes and not self.is_fixed:
            fixes[0] += " (too few for a good BatchNorm)"
        if found.precision == "fp32" and usable > 0:
            fixes += ["runtime.precision=bf16"]
        fixes += [f"{_gb(enough)} GB", f"a lower {lower} or a smaller model"]
        key = "runtime.micro_batch" if self.is_fixed else self.key
        unit, length = build.batch_unit(config)
        raise MemoryTooSmall(
            f"{key}: {least} {unit}s{length} in {found.precision} do not fit in "
            f"{_gb(self.free + self.kept)} GB, {most} do; use {', '.join(fixes)}"
        )

    def _for_crops(self) -> float:
        return int(self.free) * self.usable_share - self.fixed

    @property
    def fixed(self) -> float:
        state = self.found.state(self.world_size)
        if self.on_gpu:
            state = GPU_RESERVE_BYTES + max(state - STATE_IN_RESERVE, 0)
        return state + self.bank_bytes

    def batch(self) -> BatchPlan:
        """Return the plan of a training on such devices; raise ValueError where it would."""
        return _plan(self.config, self.world_size, lambda sizes: self.require(self.fit, sizes[0]))


def card_memory(
    config: Config, found: Footprint, card_gb: float, world_size: int = 1, bank_gb: float = 0.0
) -> Memory:
    """Return the memory of each of `world_size` cards of `card_gb` GB."""
    sizes = (card_gb - DRIVER_GB, bank_gb, DRIVER_GB)
    free, bank_bytes, kept = (gib * 2**30 for gib in sizes)
    return Memory(config, found, free, True, world_size, bank_bytes, kept)


def _gb(num_bytes: float) -> str:
    return f"{max(math.ceil(10 * num_bytes / 2**30), 0) / 10:g}"


def footprint(
    config: Config,
    *,
    num_classes: int,
    precision: str,
    split_over: int = 1,
    with_data: bool = False,
) -> Footprint:
    """Return the footprint of the configured model and head in fp32, bf16 or fp16.

    num_classes: rows of the head on this device; split_over: ranks whose crops use these rows.
    with_data: count what a CPU keeps, by computing the forward pass; otherwise what a GPU keeps,
    which runs the plain code of every model. Without labels a crop is an utterance with all views.
    """
    used = resolve_precision("fp32" if precision == "fp32" else "bf16", "cpu")
    fbank = Fbank(**config.frontend)
    without_data = nullcontext() if with_data else FakeTensorMode()
    kernels = nullcontext() if with_data else plain_code()
    with torch.random.fork_rng(devices=[]), without_data, kernels:
        backbone: Any = MODELS[config.model.name](feat_dim=fbank.num_mel_bins, **config.model.args)
        if config.task == "ssl":
            made = _without_labels(config, backbone)
        else:
            made = _with_labels(config, backbone, num_classes, split_over)
        crops, compare, learned, copied = made
        parameters = [*backbone.parameters(), *learned]

        def embed(num: int) -> list[Tensor]:
            with used.autocast():
                return [
                    backbone(torch.zeros(num * count, fbank.num_frames(size), fbank.num_mel_bins))
                    for count, size in crops
                    if count
                ]

        crop, once = batch_size.saved_bytes(embed, [*parameters, *copied])
        head_crop, head_once = batch_size.saved_bytes(compare, parameters)
        return Footprint(
            precision=precision,
            backbone_crop=crop,
            head_crop=head_crop,
            saved_once=once + head_once + sum(p.nbytes for p in copied),
            weights=sum(p.nbytes for p in parameters),
            momentum=_momentum_bytes(config, parameters),
        )


def _with_labels(config: Config, backbone: Any, num_classes: int, split_over: int) -> Learned:
    head = build.build_head(config, embed_dim=backbone.embed_dim, num_classes=num_classes)

    def classify(num: int) -> Tensor:
        emb_BD = torch.zeros(num * split_over, backbone.embed_dim, requires_grad=True)
        return head(emb_BD, torch.zeros(len(emb_BD), dtype=torch.int64), 0.0)[0]

    return [(1, build.crop_samples(config))], classify, [*head.parameters()], []


def _without_labels(config: Config, backbone: Any) -> Learned:
    # Two, because a module without data cannot be copied.
    objective, other = (build.build_objective(config, embed_dim=backbone.embed_dim) for _ in "12")
    views = build.build_views(config)
    num_long = views.num_long if objective.sees_long else 0
    teacher = other.projector if objective.has_teacher else None
    copied = [*backbone.parameters(), *objective.projector.parameters()] if teacher else []

    def compare(num: int) -> Tensor:
        shape = (num_long + views.num_short, num, backbone.embed_dim)
        target_LBD = torch.zeros(views.num_long, *shape[1:]) if teacher else None
        return objective(torch.zeros(shape, requires_grad=True), target_LBD, teacher)[0]

    crops = [(num_long, views.crop_samples), (views.num_short, views.short_samples)]
    return crops, compare, [*objective.parameters()], copied


def _momentum_bytes(config: Config, parameters: list[nn.Parameter]) -> int:
    optimizer = build.build_optimizer(config, parameters, lr=0.1)
    for group in optimizer.param_groups:  # fused kernels would use real memory
        group |= {"fused": False, "foreach": False}
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in kept if isinstance(value, Tensor))


def batch_bytes(config: Config, micro_batch: int, *, noise: bool = False) -> int:
    """Return the bytes of a micro-batch of workers, as int16 or features of about that size.

    noise: whether the workers send it along.
    """
    samples = round(build.crop_samples(config) * max(config.augment.speeds)) * (2 if noise else 1)
    return 2 * micro_batch * build.crops_each(config) * samples


def asked_micro_batch(config: Config) -> int | None:
    """Return the configured micro-batch, None for auto."""
    asked = config.runtime.micro_batch
    asked = asked.get(config.model.name) if isinstance(asked, dict) else asked
    return None if asked == "auto" else asked


def plan_batch(config: Config, ranks: Ranks, task: Task, *, below: int | None = None) -> BatchPlan:
    """Choose micro-batch and accumulation.

    below: only choose a smaller micro-batch, after one of this size ran out of memory.
    """
    asked, on_gpu = asked_micro_batch(config), ranks.device.type == "cuda"

    def limit(sizes: list[int]) -> int:
        if asked is not None and not on_gpu:  # a host's memory is not known that precisely
            return asked
        found = footprint(
            config,
            num_classes=0 if task.head is None else len(task.head.get_parameter("weight_CD")),
            precision=task.precision.name,
            split_over=ranks.world_size if task.split else 1,
            with_data=not on_gpu,
        )
        # Noise and rooms are not on the GPU yet; on a host they are in memory already.
        bank_bytes = sum(buffer.nbytes for buffer in task.augment.buffers()) if on_gpu else 0
        free, world = batch_size.free_bytes(ranks.device, ranks.local_size), ranks.world_size
        key = f"free memory of {ranks.device}"
        memory = Memory(config, found, free, on_gpu, world, bank_bytes, key=key)
        return memory.require(min(ranks.every(memory.fit)), sizes[0])

    return _plan(config, ranks.world_size, limit, below)


def _plan(
    config: Config, world_size: int, limit: Callable[[list[int]], int], below: int | None = None
) -> BatchPlan:
    return batch_size.plan_batch(
        global_batch=config.training.global_batch,
        world_size=world_size,
        micro_batch=asked_micro_batch(config),
        bn_batch=config.training.bn_batch,
        undivided=build.why_undivided(config),
        join_ranks=config.runtime.sync_bn == "auto",
        limit=limit,
        below=below,
    )
