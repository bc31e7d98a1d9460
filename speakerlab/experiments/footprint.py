"""Predict the memory that a training takes, and whether it can take single utterances.

Nothing is trained: the forward pass runs on fake tensors, which have shapes but no data, in about a
second.

Letters: B crops, S samples, T frames, F mel bins, V views, L long views, D embedding dimensions,
C channels or classes, K local speakers.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from speakerlab.training.precision import resolve_precision

FRAMES_PER_SECOND = 100  # of features


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


@dataclass(frozen=True)
class Footprint:
    """Memory of a training on its device, in bytes."""

    precision: str
    backbone_crop: float  # saved for the backward pass, per crop
    head_crop: float
    saved_once: float  # for any number of crops, without the parameters
    weights: int
    trained: int  # the part of the weights that learns
    momentum: int  # all state of the optimizer

    @property
    def saved_per_crop(self) -> float:
        """Return bytes per crop; the gradients of logits are as large as the saved logits."""
        return self.backbone_crop + 2 * self.head_crop

    def state(self, world_size: int) -> float:
        """Return bytes that do not depend on the number of crops; DDP holds gradients twice."""
        gradients = self.trained * (1 if world_size == 1 else 2)
        return self.weights + gradients + self.momentum + self.saved_once


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
            excluded=[*parameters, *loss.copies],
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


def _backbone_bytes(
    frontend: Any,
    backbone: Any,
    all_crops: Sequence[Crops],
    *,
    excluded: Sequence[nn.Parameter],
    precision: str,
) -> tuple[float, float]:
    """Return the bytes that front end and backbone save: per crop, and for any number of crops.

    excluded: parameters whose bytes are counted elsewhere. The front end no longer recomputes its
    layers after this.
    """
    # A CPU does not compute in fp16; bf16 values have the same size.
    cpu_precision = "fp32" if precision == "fp32" else "bf16"
    used = resolve_precision(cpu_precision, "cpu")

    def embed(num_utterances: int) -> list[Tensor]:
        with used.autocast():
            return _embed_zeros(frontend, backbone, all_crops, num_utterances)

    per_crop, once = batch_size.saved_bytes(embed, excluded)
    per_crop += _state_bytes(frontend, all_crops)
    if isinstance(frontend, PretrainedFrontEnd) and frontend.recomputes_layers:
        # In the backward pass, one layer at a time is kept whole.
        frontend.recomputes_layers = False
        kept_crop, _ = batch_size.saved_bytes(embed, excluded)
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


def why_not_single(config: Config) -> str:
    """Return why the model cannot be trained on one utterance at a time; "" if it can.

    A BatchNorm after the pooling has one value of each crop, and one value has no variance.
    """
    num_utterances = 2  # with one, torch's BatchNorm raises an error
    counts: list[int] = []  # values of a channel

    def note_count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, _BatchNorm):
            channels = inputs[0].shape[1]
            counts.append(inputs[0].numel() // channels)

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
        # Without --teacher, as many as the student has.
        channels = num_channels(backbone)
        for teacher in config.distil.teachers:
            channels = channels_of(teacher)
        frame_distance = build.build_frame_distance(config, backbone, channels)
        parameters += frame_distance.parameters()
    head: Any = None
    if config.has_head:
        head = build.build_head(config, embed_dim=embed_dim, num_classes=num_classes)
        parameters += head.parameters()
    # Most networks halve the number of frames, or reduce it further.
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
