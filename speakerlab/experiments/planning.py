"""Predict the memory of a training without running it, and plan the batch from the prediction.

The forward pass runs on fake tensors, which have shapes but no data, in about a second.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.experiments.teachers import channels_of, sizes_of
from speakerlab.frontend.pretrained import PretrainedFrontEnd
from speakerlab.losses.powerset import PowersetLoss
from speakerlab.models.cpu import plain_code
from speakerlab.models.frames import FRAME_STEP, num_channels
from speakerlab.training import batch_size
from speakerlab.training.batch_size import (
    ENOUGH_CROPS,
    BatchPlan,
    BatchRequest,
    MemoryTooSmall,
    micro_batches,
)
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import resolve_precision

log = logging.getLogger(__name__)

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
# With `runtime.bank_gb: auto` on a CPU, noise and RIRs may take this share of the free memory.
CPU_BANK_SHARE = 1 / 4
CPU_BANK_GB = 4.0  # at most, because data workers need memory of the host too
FRAMES_PER_SECOND = 100  # of features
TRANSIENT_SHARE = 1.055  # peak of a backward pass, relative to the saved activations
# Cards of this size, GTX 1080 Ti and RTX 2080 Ti, are older than bf16.
WITHOUT_BF16_GB = 11


class Crops(NamedTuple):
    """Number and length of equally long crops of each utterance, the input of the backbone."""

    num_crops: int
    num_samples: int


class LossMemory(NamedTuple):
    """Loss after the backbone: a head with labels, an objective, or the distance from teachers."""

    crops: list[Crops]
    compute_loss: Callable[[int], Tensor]  # from a number of utterances
    parameters: list[nn.Parameter]
    copies: list[nn.Parameter]  # of teachers, without gradient and momentum


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


@dataclass(frozen=True)
class Footprint:
    """Memory of a training on its device, in bytes."""

    precision: str
    backbone_crop: float  # saved for the backward pass, per crop
    head_crop: float
    saved_once: float  # for any number of crops, without the parameters
    weights: int
    trained: int  # of the weights, those that learn
    momentum: int  # all state of the optimizer

    @property
    def saved_per_crop(self) -> float:
        """Return bytes per crop; the gradients of logits are as large as the saved logits."""
        return self.backbone_crop + 2 * self.head_crop

    def state(self, world_size: int) -> float:
        """Return bytes that do not depend on the number of crops; DDP holds gradients twice."""
        gradients = self.trained * (1 if world_size == 1 else 2)
        return self.weights + gradients + self.momentum + self.saved_once


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
        request = _batch_request(self.config, self.world_size)
        limit = partial(self.require, self.max_crops)
        return batch_size.divide_global_batch(request, limit)


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
    without_data = nullcontext() if with_data else FakeTensorMode()
    kernels = nullcontext() if with_data else plain_code()
    # A prediction must not change the random numbers of the training that follows.
    with torch.random.fork_rng(devices=[]), without_data, kernels:
        frontend, backbone = build.build_network(config)
        if isinstance(frontend, PretrainedFrontEnd):
            frontend.recomputes_layers = config.runtime.checkpoint_layers is True
        loss = _build_loss(config, backbone, num_classes, split_over)
        parameters = [*frontend.parameters(), *backbone.parameters(), *loss.parameters]
        trained = [parameter for parameter in parameters if parameter.requires_grad]

        backbone_crop, backbone_once = _backbone_bytes(
            frontend,
            backbone,
            loss.crops,
            # Parameters that autograd saves are counted as weights, or as copies.
            counted=[*parameters, *loss.copies],
            precision=precision,
        )
        head_crop, head_once = batch_size.saved_bytes(loss.compute_loss, parameters)
        copied_bytes = sum(parameter.nbytes for parameter in loss.copies)
        return Footprint(
            precision=precision,
            backbone_crop=backbone_crop,
            head_crop=head_crop,
            saved_once=backbone_once + head_once + copied_bytes,
            weights=sum(parameter.nbytes for parameter in parameters),
            trained=sum(parameter.nbytes for parameter in trained),
            momentum=_momentum_bytes(config, trained),
        )


def _backbone_bytes(
    frontend: Any,
    backbone: Any,
    all_crops: Sequence[Crops],
    *,
    counted: Sequence[nn.Parameter],
    precision: str,
) -> tuple[float, float]:
    """Return the bytes that front end and backbone save: per crop, and for any number of crops.

    counted: parameters that do not count, because they are counted elsewhere. The front end no
    longer recomputes its layers after this.
    """
    # A CPU does not compute in fp16; bf16 values have the same size.
    cpu_precision = "fp32" if precision == "fp32" else "bf16"
    used = resolve_precision(cpu_precision, "cpu")

    def embed(num_utterances: int) -> list[Tensor]:
        with used.autocast():
            return _embed_zeros(frontend, backbone, all_crops, num_utterances)

    per_crop, once = batch_size.saved_bytes(embed, counted)
    per_crop += _state_bytes(frontend, all_crops)
    if isinstance(frontend, PretrainedFrontEnd) and frontend.recomputes_layers:
        # In the backward pass, one layer at a time is kept whole.
        frontend.recomputes_layers = False
        kept_crop, _ = batch_size.saved_bytes(embed, counted)
        per_crop += (kept_crop - per_crop) / len(frontend.layers)
    return per_crop, once


def _state_bytes(frontend: Any, all_crops: Sequence[Crops]) -> int:
    """Return the bytes per crop of the states of a frozen pretrained model, in fp32.

    No backward pass needs them, but all exist at once before they are joined or summed. Those of a
    model that learns are among the saved tensors.
    """
    if not isinstance(frontend, PretrainedFrontEnd) or frontend.learns:
        return 0
    num_bytes = 0
    for crops in all_crops:
        num_frames = crops.num_crops * frontend.num_frames(crops.num_samples)
        values_per_frame = frontend.num_layers * frontend.num_channels
        num_bytes += 4 * num_frames * values_per_frame
    return num_bytes


def rank_footprint(
    config: Config,
    *,
    world_size: int,
    num_classes: int,
    precision: str,
    with_data: bool = False,
) -> Footprint:
    """Return the footprint on each of `world_size` ranks; with many classes they split the head."""
    split_over = 1
    if build.is_head_split(config, world_size, num_classes):
        split_over = world_size
    return footprint(
        config,
        num_classes=math.ceil(num_classes / split_over),
        precision=precision,
        split_over=split_over,
        with_data=with_data,
    )


def _embed_zeros(
    frontend: Any,
    backbone: Any,
    all_crops: Sequence[Crops],
    num_utterances: int,
) -> list[Tensor]:
    """Return the embeddings of each kind of crops of some utterances, all zeros."""
    embeddings: list[Tensor] = []
    for crops in all_crops:
        if not crops.num_crops:
            continue
        num_crops = num_utterances * crops.num_crops
        if isinstance(frontend, PretrainedFrontEnd):
            shape = frontend.inputs.shape(crops.num_samples)
            feats_BTF = frontend.encode(torch.zeros(num_crops, *shape))
        else:
            num_frames = frontend.num_frames(crops.num_samples)
            feats_BTF = torch.zeros(num_crops, num_frames, frontend.feat_dim)
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

    # For all modules, because an objective may keep its teacher outside of its own modules.
    handle = register_module_forward_pre_hook(note_count)
    try:
        with torch.random.fork_rng(devices=[]), FakeTensorMode(), plain_code():
            frontend, backbone = build.build_network(config)
            loss = _build_loss(config, backbone, num_classes=2, split_over=1)
            all_crops = list(loss.crops)
            # The moving average of the student embeds the long views alone.
            if config.task == "ssl" and loss.copies:
                views = build.build_views(config)
                all_crops.append(Crops(views.num_long, views.crop_samples))
            _embed_zeros(frontend, backbone, all_crops, num_utterances)
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


def _build_loss(
    config: Config,
    backbone: Any,
    num_classes: int,
    split_over: int,
) -> LossMemory:
    if config.task == "ssl":
        return _build_objective(config, backbone)
    if config.task == "distil":
        return _build_distillation(config, backbone, num_classes)
    if config.task == "segmentation":
        return _build_powerset(config, backbone)
    return _build_head(config, backbone, num_classes, split_over)


def _build_distillation(
    config: Config,
    backbone: Any,
    num_classes: int,
) -> LossMemory:
    # The dimensions of a teacher that is not kept in the student change little.
    embed_dim = backbone.embed_dim
    distance = build.build_distillation(
        config, embed_dim=embed_dim, target_dim=embed_dim
    )
    parameters: list[nn.Parameter] = [*distance.parameters()]
    frame_distance: Any = None
    if config.distil.frame_weight:
        # Without --teacher, one like the student.
        channels = num_channels(backbone)
        for teacher in config.distil.teachers:
            channels = channels_of(teacher)
        frame_distance = build.build_frame_distance(config, backbone, channels)
        parameters += frame_distance.parameters()
    head: Any = None
    if config.has_head:
        head = build.build_head(config, embed_dim=embed_dim, num_classes=num_classes)
        parameters += head.parameters()
    # Most networks halve their number, or more.
    num_frames = round(FRAMES_PER_SECOND / 2 / FRAME_STEP * config.data.crop_seconds)

    def compare(num_utterances: int) -> Tensor:
        emb_BD = torch.zeros(num_utterances, embed_dim, requires_grad=True)
        loss, _ = distance(emb_BD, emb_BD.detach())
        if frame_distance is not None:
            student_channels = frame_distance.to_teacher.in_channels
            student_BST = torch.zeros(num_utterances, student_channels, num_frames)
            teacher_BCT = torch.zeros(
                num_utterances, len(frame_distance.mean_C), num_frames
            )
            loss = loss + frame_distance(student_BST.requires_grad_(), teacher_BCT)
        if head is not None:
            label_B = torch.zeros(num_utterances, dtype=torch.int64)
            loss = loss + head(emb_BD, label_B, 0.0)[0]
        return loss

    return LossMemory(
        crops=[Crops(num_crops=1, num_samples=build.crop_samples(config))],
        compute_loss=compare,
        parameters=parameters,
        copies=_teacher_weights(config),
    )


def _teacher_weights(config: Config) -> list[nn.Parameter]:
    """Return parameters as large as each teacher's; [] where the targets were stored before.

    Teachers that do not hear crops have left the device when the training starts.
    """
    if config.distil.targets != "crop":
        return []
    weights: list[nn.Parameter] = []
    for num_parameters in sizes_of(config.distil.teachers):
        values = torch.zeros(num_parameters)
        weights.append(nn.Parameter(values, requires_grad=False))
    return weights


def _build_powerset(config: Config, backbone: Any) -> LossMemory:
    num_samples = build.crop_samples(config)
    num_frames = backbone.num_frames(num_samples)
    loss = PowersetLoss()

    def compare(num_windows: int) -> Tensor:
        shape = (num_windows, num_frames, backbone.num_sets)
        log_prob_BTC = torch.zeros(shape, requires_grad=True)
        speech_BKT = torch.zeros(num_windows, loss.max_speakers, num_frames)
        return loss(log_prob_BTC, speech_BKT)[0]

    return LossMemory(
        crops=[Crops(num_crops=1, num_samples=num_samples)],
        compute_loss=compare,
        parameters=[],
        copies=[],
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


def batch_bytes(config: Config, micro_batch: int, *, noise: bool = False) -> int:
    """Return the bytes of a micro-batch from workers: int16 samples, or features of similar size.

    Stored frames of a teacher count, too. noise: whether the workers also send noise.
    """
    # A faster crop needs more samples; the noise is as long as its crop.
    fastest = max(config.augment.speeds)
    crop_samples = round(build.crop_samples(config) * fastest)
    num_samples = 2 * crop_samples if noise else crop_samples
    num_crops = micro_batch * build.crops_each(config)
    return 2 * num_crops * (num_samples + _stored_frame_values(config))


def _stored_frame_values(config: Config) -> int:
    """Return the values of a teacher's stored frames for a crop, at most; 0 without them."""
    distil = config.distil
    stores_frames = distil.targets == "utterance" and distil.frame_weight > 0
    if config.task != "distil" or not stores_frames:
        return 0
    max_frames = round(FRAMES_PER_SECOND / FRAME_STEP * config.data.crop_seconds)
    return sum(max_frames * channels_of(teacher) for teacher in distil.teachers)


def configured_micro_batch(config: Config) -> int | None:
    """Return the configured micro-batch, None for auto."""
    micro_batch = config.runtime.micro_batch
    # A table by model; the batch of other models is planned.
    if isinstance(micro_batch, dict):
        micro_batch = micro_batch.get(config.model.name)
    return None if micro_batch == "auto" else micro_batch


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

    request = _batch_request(config, ranks.world_size, too_large)
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


def _batch_request(
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
