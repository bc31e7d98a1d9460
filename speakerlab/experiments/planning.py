"""Predict the memory of a training without running it, and plan the batch from the prediction.

The forward pass runs on fake tensors, which have shapes but no data, in about a second.
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.frontend.fbank import Fbank
from speakerlab.models import MODELS
from speakerlab.models.cpu import plain_code
from speakerlab.training import batch_size
from speakerlab.training.batch_size import BatchPlan, MemoryTooSmall
from speakerlab.training.devices import count_gpus
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import resolve_precision
from speakerlab.training.task import Task

DRIVER_GB = 0.25  # of a card's nominal memory, reserved by the driver
# Context, workspaces, and the state of a typical model: weights, gradients and momentum. Only
# state beyond STATE_IN_RESERVE is added to the reserve.
GPU_RESERVE_BYTES = int(1.5 * 2**30)
STATE_IN_RESERVE = 384 * 2**20
GPU_USABLE_SHARE = 0.92
CPU_USABLE_SHARE = 0.5
# With `runtime.bank_gb: auto`, noise and RIRs may take this share of the memory that is free
# before the model is loaded. A sixth of 80 GB holds all of MUSAN.
GPU_BANK_SHARE = 1 / 6
CPU_BANK_SHARE = 1 / 4
CPU_BANK_GB = 4.0  # at most, because data workers need memory of the host too
TRANSIENT_SHARE = 1.055  # peak of a backward pass, relative to the saved activations


class Crops(NamedTuple):
    """Number and length of equally long crops of each utterance, the input of the backbone."""

    num_crops: int
    num_samples: int


class LossMemory(NamedTuple):
    """Loss after the backbone: a head with labels, or an objective without labels."""

    crops: list[Crops]
    compute_loss: Callable[[int], Tensor]  # from a number of utterances
    parameters: list[nn.Parameter]
    copies: list[nn.Parameter]  # of a teacher, without gradient and momentum


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
        """Return bytes per crop; the gradients of logits are as large as the saved logits."""
        return self.backbone_crop + 2 * self.head_crop

    def state(self, world_size: int) -> float:
        """Return bytes that do not depend on the number of crops; DDP holds gradients twice."""
        gradients = self.weights * (1 if world_size == 1 else 2)
        return self.weights + gradients + self.momentum + self.saved_once


@dataclass(frozen=True)
class Memory:
    """Free memory of a rank's device before the model is loaded, and the training's footprint."""

    config: Config
    footprint: Footprint
    free: float  # bytes
    on_gpu: bool = True
    world_size: int = 1
    bank_bytes: float = 0.0  # of noise and RIRs that will be loaded
    driver_bytes: float = 0.0  # of the nominal memory, never free
    key: str = "--gpu-mem"  # the option for more memory, in messages

    @property
    def is_fixed(self) -> bool:
        """Return whether the micro-batch is configured, so that it may use all free memory."""
        return configured_micro_batch(self.config) is not None

    @property
    def usable_share(self) -> float:
        """Return the share of the free memory that a training may take."""
        if self.is_fixed:
            return 1.0
        return GPU_USABLE_SHARE if self.on_gpu else CPU_USABLE_SHARE

    @property
    def crop(self) -> float:
        """Return the bytes that each crop takes."""
        return self.footprint.crop * TRANSIENT_SHARE

    @property
    def fit(self) -> int:
        """Return the number of crops that fit."""
        return max(int(self._for_crops() / self.crop), 0)

    def require(self, most: int, least: int) -> int:
        """Return `most`, the crops that fit on every rank; ValueError with fixes if too few."""
        if most >= least:
            return most
        config = self.config
        usable = self._for_crops()
        needed = least * self.crop
        # Only the usable share of additional memory counts.
        nominal = self.free + self.driver_bytes
        enough = nominal + (needed - usable) / self.usable_share

        # Each fix is enough by itself; the least harmful comes first.
        fixes: list[str] = []
        length_key = "data.crop_seconds"
        if build.why_undivided(config):
            length_key = "training.global_batch"
        else:
            fixes += self._smaller_micro_batch(most)
        if self.footprint.precision == "fp32" and usable > 0:
            fixes.append("runtime.precision=bf16 (fp16 where the GPU has no bf16)")
        fixes.append(f"{_gb(enough)} GB")
        fixes.append(f"a lower {length_key} or a smaller model")

        key = "runtime.micro_batch" if self.is_fixed else self.key
        unit, length = build.batch_unit(config)
        raise MemoryTooSmall(
            f"{key}: {least} {unit}s{length} in {self.footprint.precision} do not fit in "
            f"{_gb(nominal)} GB, {most} do; use {', '.join(fixes)}"
        )

    def _smaller_micro_batch(self, most: int) -> list[str]:
        """Return the setting of the largest micro-batch that fits; empty if none does."""
        global_batch = self.config.training.global_batch
        sizes = batch_size.micro_batches(global_batch, self.world_size)
        fitting = [size for size in sizes if size <= most]
        if fitting == [1] and why_not_single(self.config):
            return []
        if not fitting:
            return []
        setting = f"runtime.micro_batch={fitting[-1]}"
        if not self.is_fixed:
            setting += " (too few for a good BatchNorm)"
        return [setting]

    def _for_crops(self) -> float:
        return int(self.free) * self.usable_share - self.fixed

    @property
    def fixed(self) -> float:
        state = self.footprint.state(self.world_size)
        if self.on_gpu:
            state = GPU_RESERVE_BYTES + max(state - STATE_IN_RESERVE, 0)
        return state + self.bank_bytes

    def batch(self) -> BatchPlan:
        """Return the batch plan for such devices; ValueError in the same cases as in training."""

        def limit(sizes: list[int]) -> int:
            return self.require(self.fit, sizes[0])

        return _divide_configured_batch(self.config, self.world_size, limit)


def card_memory(
    config: Config,
    needs: Footprint,
    card_gb: float,
    world_size: int = 1,
    bank_gb: float = 0.0,
) -> Memory:
    """Return the `Memory` of each of `world_size` cards with `card_gb` GB."""
    return Memory(
        config,
        needs,
        free=(card_gb - DRIVER_GB) * 2**30,
        on_gpu=True,
        world_size=world_size,
        bank_bytes=bank_gb * 2**30,
        driver_bytes=DRIVER_GB * 2**30,
    )


def _gb(num_bytes: float) -> str:
    """Return GB with one decimal, rounded up, so that the stated memory is enough."""
    tenths = math.ceil(10 * num_bytes / 2**30)
    return f"{max(tenths, 0) / 10:g}"


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
    with_data: count the tensors that a CPU saves, by computing the forward pass; else count the
    tensors that a GPU saves, which runs the plain code of every model. In training without labels,
    a crop is an utterance with all its views.
    """
    # A CPU does not compute in fp16; bf16 values have the same size.
    cpu_precision = "fp32" if precision == "fp32" else "bf16"
    used = resolve_precision(cpu_precision, "cpu")
    fbank = Fbank(**config.frontend)
    without_data = nullcontext() if with_data else FakeTensorMode()
    kernels = nullcontext() if with_data else plain_code()
    # A prediction must not change the random numbers of the training that follows.
    with torch.random.fork_rng(devices=[]), without_data, kernels:
        backbone: Any = MODELS[config.model.name](
            feat_dim=fbank.num_mel_bins,
            **config.model.args,
        )
        if config.task == "ssl":
            loss = _build_objective(config, backbone)
        else:
            loss = _build_head(config, backbone, num_classes, split_over)
        parameters = [*backbone.parameters(), *loss.parameters]

        def embed(num_utterances: int) -> list[Tensor]:
            with used.autocast():
                return _embed_zeros(backbone, fbank, loss.crops, num_utterances)

        # Parameters saved by autograd are already counted as weights.
        backbone_crop, backbone_once = batch_size.saved_bytes(
            embed,
            [*parameters, *loss.copies],
        )
        head_crop, head_once = batch_size.saved_bytes(loss.compute_loss, parameters)
        copied_bytes = sum(parameter.nbytes for parameter in loss.copies)
        return Footprint(
            precision=precision,
            backbone_crop=backbone_crop,
            head_crop=head_crop,
            saved_once=backbone_once + head_once + copied_bytes,
            weights=sum(parameter.nbytes for parameter in parameters),
            momentum=_momentum_bytes(config, parameters),
        )


def _embed_zeros(
    backbone: Any,
    fbank: Fbank,
    all_crops: Sequence[Crops],
    num_utterances: int,
) -> list[Tensor]:
    """Return the embeddings of each kind of crops of some utterances, all zeros."""
    embeddings: list[Tensor] = []
    for crops in all_crops:
        if not crops.num_crops:
            continue
        feats_BTF = torch.zeros(
            num_utterances * crops.num_crops,
            fbank.num_frames(crops.num_samples),
            fbank.num_mel_bins,
        )
        embeddings.append(backbone(feats_BTF))
    return embeddings


def why_not_single(config: Config) -> str:
    """Return why the model cannot be trained on one utterance at a time; "" if it can.

    A BatchNorm after the pooling has one value of each crop, and one value has no variance.
    """
    num_utterances = 2  # with one, torch's BatchNorm raises an error
    counts: list[int] = []  # values of a channel

    def note_count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, _BatchNorm):
            num_channels = inputs[0].shape[1]
            counts.append(inputs[0].numel() // num_channels)

    fbank = Fbank(**config.frontend)
    # For all modules, because an objective may keep its teacher outside of its own modules.
    handle = register_module_forward_pre_hook(note_count)
    try:
        with torch.random.fork_rng(devices=[]), FakeTensorMode(), plain_code():
            backbone: Any = MODELS[config.model.name](
                feat_dim=fbank.num_mel_bins,
                **config.model.args,
            )
            if config.task == "ssl":
                loss = _build_objective(config, backbone)
            else:
                loss = _build_head(config, backbone, num_classes=2, split_over=1)
            all_crops = list(loss.crops)
            # A teacher embeds the long views alone.
            if loss.copies:
                views = build.build_views(config)
                all_crops.append(Crops(views.num_long, views.crop_samples))
            _embed_zeros(backbone, fbank, all_crops, num_utterances)
            loss.compute_loss(num_utterances)
    finally:
        handle.remove()
    if min(counts, default=0) != num_utterances:
        return ""
    unit, _ = build.batch_unit(config)
    return (
        f"a BatchNorm of {config.model.name} has one value of each {unit}, and cannot be"
        f" trained with a single {unit}"
    )


def _build_head(
    config: Config,
    backbone: Any,
    num_classes: int,
    split_over: int,
) -> LossMemory:
    head = build.build_head(
        config,
        embed_dim=backbone.embed_dim,
        num_classes=num_classes,
    )

    def classify(num_utterances: int) -> Tensor:
        # Each part of a split head takes the embeddings of all ranks.
        num_embeddings = num_utterances * split_over
        emb_BD = torch.zeros(num_embeddings, backbone.embed_dim, requires_grad=True)
        label_B = torch.zeros(num_embeddings, dtype=torch.int64)
        return head(emb_BD, label_B, 0.0)[0]

    return LossMemory(
        crops=[Crops(num_crops=1, num_samples=build.crop_samples(config))],
        compute_loss=classify,
        parameters=[*head.parameters()],
        copies=[],
    )


def _build_objective(config: Config, backbone: Any) -> LossMemory:
    # The teacher's projector is built, because modules on fake tensors cannot be copied.
    objective = build.build_objective(config, embed_dim=backbone.embed_dim)
    teacher_objective = build.build_objective(config, embed_dim=backbone.embed_dim)
    views = build.build_views(config)
    num_long = views.num_long if objective.sees_long else 0

    teacher = None
    copies: list[nn.Parameter] = []
    if objective.has_teacher:
        teacher = teacher_objective.projector
        copies = [*backbone.parameters(), *objective.projector.parameters()]

    def compare_views(num_utterances: int) -> Tensor:
        num_views = num_long + views.num_short
        emb_VBD = torch.zeros(
            (num_views, num_utterances, backbone.embed_dim),
            requires_grad=True,
        )
        # The teacher embeds the long views, without gradients.
        target_LBD = None
        if teacher:
            target_LBD = torch.zeros(
                views.num_long,
                num_utterances,
                backbone.embed_dim,
            )
        return objective(emb_VBD, target_LBD, teacher)[0]

    return LossMemory(
        crops=[
            Crops(num_crops=num_long, num_samples=views.crop_samples),
            Crops(num_crops=views.num_short, num_samples=views.short_samples),
        ],
        compute_loss=compare_views,
        parameters=[*objective.parameters()],
        copies=copies,
    )


def _momentum_bytes(config: Config, parameters: list[nn.Parameter]) -> int:
    """Return the bytes of the optimizer's state, which its first step allocates."""
    optimizer = build.build_optimizer(config, parameters, lr=0.1)
    for group in optimizer.param_groups:
        # Fused kernels would use real memory.
        group["fused"] = False
        group["foreach"] = False
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    num_bytes = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                num_bytes += value.nbytes
    return num_bytes


def bank_limit(config: Config) -> float:
    """Return the bytes that noise and RIRs may take on this rank's device."""
    bank_gb = config.runtime.bank_gb
    if bank_gb != "auto":
        return bank_gb * 2**30
    # `start_ranks` has made this rank's GPU the current one.
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", 1)
    local_ranks = int(local_world_size)
    if count_gpus(config.runtime.device, num_ranks=local_ranks):
        free = batch_size.free_bytes(torch.device("cuda"), local_ranks)
        return free * GPU_BANK_SHARE
    free = batch_size.free_bytes(torch.device("cpu"), local_ranks)
    return min(free * CPU_BANK_SHARE, CPU_BANK_GB * 2**30)


def batch_bytes(config: Config, micro_batch: int, *, noise: bool = False) -> int:
    """Return the bytes of a micro-batch from workers: int16 samples, or features of similar size.

    noise: whether the workers also send noise.
    """
    # A faster crop needs more samples; the noise is as long as its crop.
    fastest = max(config.augment.speeds)
    crop_samples = round(build.crop_samples(config) * fastest)
    num_samples = 2 * crop_samples if noise else crop_samples
    num_crops = micro_batch * build.crops_each(config)
    return 2 * num_crops * num_samples


def configured_micro_batch(config: Config) -> int | None:
    """Return the configured micro-batch, None for auto."""
    micro_batch = config.runtime.micro_batch
    # A table by model; the batch of other models is planned.
    if isinstance(micro_batch, dict):
        micro_batch = micro_batch.get(config.model.name)
    return None if micro_batch == "auto" else micro_batch


def plan_batch(
    config: Config,
    ranks: Ranks,
    task: Task,
    *,
    below: int | None = None,
) -> BatchPlan:
    """Choose micro-batch and accumulation from the free memory of all ranks.

    below: only choose a smaller micro-batch, after one of this size ran out of memory.
    """

    def limit(sizes: list[int]) -> int:
        micro_batch = configured_micro_batch(config)
        if micro_batch is not None and ranks.device.type != "cuda":
            # The free memory of a host is too uncertain to refuse a configured size.
            return micro_batch
        memory = _measure_memory(config, ranks, task)
        # The rank with the least memory determines the size for all ranks.
        most = min(ranks.gather_objects(memory.fit))
        return memory.require(most, sizes[0])

    return _divide_configured_batch(config, ranks.world_size, limit, below)


def _measure_memory(config: Config, ranks: Ranks, task: Task) -> Memory:
    """Return the free memory of this rank's device, and the footprint of the task."""
    on_gpu = ranks.device.type == "cuda"
    num_classes = 0
    if task.head is not None:
        num_classes = len(task.head.get_parameter("weight_CD"))
    task_footprint = footprint(
        config,
        num_classes=num_classes,
        precision=task.precision.name,
        split_over=ranks.world_size if task.split_parameters else 1,
        with_data=not on_gpu,
    )

    # Noise and RIRs are not yet on the GPU; on a host they are already in memory.
    bank_bytes = 0
    if on_gpu:
        bank_bytes = sum(buffer.nbytes for buffer in task.augment.buffers())
    return Memory(
        config,
        task_footprint,
        free=batch_size.free_bytes(ranks.device, ranks.local_size),
        on_gpu=on_gpu,
        world_size=ranks.world_size,
        bank_bytes=bank_bytes,
        key=f"free memory of {ranks.device}",
    )


def _divide_configured_batch(
    config: Config,
    world_size: int,
    limit: Callable[[list[int]], int],
    below: int | None = None,
) -> BatchPlan:
    """Divide the configured global batch; limit and below as in `divide_global_batch`."""
    return batch_size.divide_global_batch(
        global_batch=config.training.global_batch,
        world_size=world_size,
        micro_batch=configured_micro_batch(config),
        bn_batch=config.training.bn_batch,
        undivided=build.why_undivided(config),
        join_ranks=config.runtime.sync_bn == "auto",
        limit=limit,
        below=below,
        why_not_single=partial(why_not_single, config),
    )
