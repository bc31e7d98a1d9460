"""Build modules and optimizers from a `Config`; the modules themselves do not depend on it."""

import inspect
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from speakerlab.config.schema import Config, takes_layers
from speakerlab.core.powerset import NUM_SETS
from speakerlab.core.shapes import shapes_only
from speakerlab.embedder import Embedder
from speakerlab.frontend import DEFAULT, FRONTENDS, PRETRAINED
from speakerlab.frontend.augment import AUGMENTATIONS, SUPPLIED, Augment, Augmentation
from speakerlab.frontend.lora import Lora
from speakerlab.frontend.pretrained import PretrainedFrontEnd
from speakerlab.frontend.vad import EnergyVad
from speakerlab.losses import HEADS, OBJECTIVES
from speakerlab.losses.distillation import (
    Distillation,
    FrameDistance,
    compares_crops,
)
from speakerlab.losses.head import Head
from speakerlab.losses.objective import Objective
from speakerlab.losses.powerset import PowersetLoss
from speakerlab.losses.sharded import SPLITTABLE, ShardedHead
from speakerlab.losses.shards import Shards
from speakerlab.models import MODELS, SEGMENTERS
from speakerlab.models.frames import num_channels
from speakerlab.models.segmenter import Segmenter
from speakerlab.models.teacher_space import TeacherSpace
from speakerlab.training.distillation import DistillationTask
from speakerlab.training.optimizers import OPTIMIZERS
from speakerlab.training.precision import Precision
from speakerlab.training.schedules import SCHEDULES, LearningRate
from speakerlab.training.segmentation import SegmentationTask
from speakerlab.training.self_supervised import SelfSupervisedTask, Views
from speakerlab.training.task import SpeakerTask, Task

# With fewer classes, holding all rows on every rank and reducing their gradients is cheap.
SPLIT_FROM_CLASSES = 50_000


def build_task(
    config: Config,
    *,
    num_classes: int,
    precision: Precision,
    augment: Augment | None = None,
    shards: Shards | None = None,
    target_dim: int = 0,
    teacher_channels: int = 0,
) -> Task:
    """Build the task, which computes the loss of a batch, on the CPU.

    augment: from `build_augment`; None: no noise and no rooms. shards: the ranks that the rows of
    the head are split over or, without labels, whose utterances are compared. target_dim:
    dimensions of the teachers. teacher_channels: of the teacher's frames.
    """
    if augment is None:
        augment = build_augment(config)
    if config.task == "segmentation":
        return SegmentationTask(
            augment=augment,
            segmenter=build_segmenter(config),
            loss=PowersetLoss(),
            precision=precision,
        )
    embedder = build_embedder(config)
    embed_dim = embedder.embed_dim
    if config.task == "ssl":
        objective = build_objective(config, embed_dim=embed_dim, shards=shards)
        return SelfSupervisedTask(
            augment=augment,
            embedder=embedder,
            objective=objective,
            views=build_views(config),
            momentum=config.views.teacher_momentum,
            precision=precision,
        )
    if config.task == "distil":
        distance = build_distillation(
            config,
            embed_dim=embed_dim,
            target_dim=target_dim,
            shards=shards,
        )
        head = None
        if config.has_head:
            head = build_head(config, embed_dim=embed_dim, num_classes=num_classes)
        frame_distance = build_frame_distance(
            config, embedder.backbone, teacher_channels
        )
        return DistillationTask(
            augment=augment,
            embedder=embedder,
            distance=distance,
            frame_distance=frame_distance,
            frame_weight=config.distil.frame_weight,
            head=head,
            label_weight=config.distil.label_weight,
            precision=precision,
        )
    # The tasks with labels: verification and identification.
    head = build_head(
        config,
        embed_dim=embed_dim,
        num_classes=num_classes,
        shards=shards,
    )
    return SpeakerTask(
        augment=augment,
        embedder=embedder,
        head=head,
        precision=precision,
    )


def build_trained_network(config: Config) -> Embedder | Segmenter:
    """Build the network that a training publishes: an embedder, except in segmentation."""
    if config.task == "segmentation":
        return build_segmenter(config)
    return build_embedder(config)


def build_segmenter(config: Config) -> Segmenter:
    """Build the segmentation network, with weights drawn from the configuration's seed."""
    torch.manual_seed(config.seed)
    frontend, backbone = build_network(config)
    return Segmenter(
        frontend=frontend, backbone=backbone, window_samples=crop_samples(config)
    )


def build_embedder(config: Config) -> Embedder:
    """Build the embedder of waveforms, with weights drawn from the configuration's seed."""
    torch.manual_seed(config.seed)
    frontend, backbone = build_network(config)
    if isinstance(frontend, PretrainedFrontEnd) and frontend.weights == "base":
        frontend.load_base()
    vad = None
    if config.vad is not None:
        sample_rate = config.frontend["sample_rate"]
        vad = EnergyVad(sample_rate=sample_rate, **config.vad)
    return Embedder(
        frontend=frontend,
        backbone=backbone,
        max_seconds=config.model.max_seconds,
        vad=vad,
        projection=build_projection(config, backbone),
    )


def build_network(config: Config) -> tuple[Any, Any]:
    """Build the front end and the backbone, with random weights, and freeze what never learns.

    Raises ValueError for arguments that they reject, and if nothing has a name to be frozen.
    """
    frontend = build_frontend(config)
    backbone = build_backbone(config, frontend)
    if config.task == "segmentation":
        min_samples: int = backbone.min_samples  # pyright: ignore[reportAssignmentType]
        if crop_samples(config) < min_samples:
            raise ValueError(
                f"data.crop_seconds: {config.data.crop_seconds:g} s are too short for"
                f" {config.model.name}; use 10"
            )
    network = nn.ModuleDict({"frontend": frontend, "backbone": backbone})
    for name in config.training.freeze:
        _freeze(network, name)
    return frontend, backbone


def build_frontend(config: Config) -> Any:
    """Build the front end; the weights of a pretrained model are random until they are loaded."""
    args = dict(config.frontend)
    name = args.pop("name", DEFAULT)
    if name == PRETRAINED:
        args["joins_layers"] = takes_layers(config.model.name)
        if args.get("lora") is not None:
            args["lora"] = Lora(**args["lora"])
    return FRONTENDS[name](**args)


def _freeze(network: nn.Module, name: str) -> None:
    """Freeze the parameters of a part, such as "frontend" or "frontend.encoder"."""
    frozen: list[nn.Parameter] = []
    for parameter_name, parameter in network.named_parameters():
        if parameter_name == name or parameter_name.startswith(f"{name}."):
            frozen.append(parameter)
    if not frozen:
        raise ValueError(
            f"training.freeze: no parameter belongs to {name}; use frontend, backbone, or"
            " a part of one, such as frontend.encoder"
        )
    for parameter in frozen:
        parameter.requires_grad_(False)


def build_projection(config: Config, backbone: nn.Module) -> TeacherSpace | None:
    """Build the projection that a student keeps; None for other models."""
    target_dim = config.distil.target_dim
    if target_dim is None:
        return None
    embed_dim: int = backbone.embed_dim  # pyright: ignore[reportAssignmentType]
    return TeacherSpace(embed_dim=embed_dim, target_dim=target_dim)


def build_backbone(config: Config, frontend: Any) -> nn.Module:
    """Build the backbone for a front end; raise ValueError for arguments that it rejects."""
    name = config.model.name
    given = {"feat_dim": frontend.feat_dim}
    if takes_layers(name):
        given["num_layers"] = frontend.num_layers
    try:
        registry = SEGMENTERS if config.task == "segmentation" else MODELS
        make = registry[name]
        return make(**given, **config.model.args)
    except ValueError:
        # The model itself rejects its arguments, with an explanation.
        raise
    except Exception as error:
        # Impossible sizes raise many kinds of errors in torch. The first line has the reason.
        reason, _, _ = str(error).partition("\n")
        raise ValueError(
            f"model.args: {name} cannot be built ({reason}); correct them"
        ) from error


def build_head(
    config: Config,
    *,
    embed_dim: int,
    num_classes: int,
    shards: Shards | None = None,
) -> Head:
    """Build the training head, with weights drawn from the configuration's seed.

    shards: the ranks that its rows are split over; None: every rank has all rows.
    """
    check_margin(config)
    make = partial(
        HEADS[config.head.name],
        embed_dim=embed_dim,
        num_classes=num_classes,
        **config.head.args,
    )
    # A seed other than the embedder's, because both draw from the same generator.
    torch.manual_seed(config.seed + 1)
    if shards is None:
        return make()
    return ShardedHead(
        make,
        shards=shards,
        sampled_share=config.training.sampled_share,
    )


def build_objective(
    config: Config,
    *,
    embed_dim: int,
    shards: Shards | None = None,
) -> Objective:
    """Build the self-supervised objective, with weights drawn from the configuration's seed."""
    assert config.objective is not None
    torch.manual_seed(config.seed + 1)
    make = OBJECTIVES[config.objective.name]
    args = config.objective.args
    return make(embed_dim=embed_dim, shards=shards, **args)  # pyright: ignore[reportCallIssue]


def build_distillation(
    config: Config,
    *,
    embed_dim: int,
    target_dim: int,
    shards: Shards | None = None,
) -> Distillation:
    """Build the losses of distillation, with weights drawn from the configuration's seed."""
    torch.manual_seed(config.seed + 1)
    return Distillation(
        embed_dim=embed_dim,
        target_dim=target_dim,
        weights=config.distil.losses,
        temperature=config.distil.temperature,
        is_projected=embed_dim != target_dim,
        shards=shards,
    )


def build_frame_distance(
    config: Config, backbone: nn.Module, teacher_channels: int
) -> FrameDistance | None:
    """Build the distance of frames, with weights drawn from the seed; None: it is not used."""
    if not config.distil.frame_weight:
        return None
    torch.manual_seed(config.seed + 2)
    return FrameDistance(
        student_channels=num_channels(backbone),
        teacher_channels=teacher_channels,
    )


def why_undivided(config: Config) -> str:
    """Return why a rank must compute its share of a batch at once; "" if it need not."""
    if config.task == "distil":
        weights = config.distil.losses
        if not compares_crops(weights):
            return ""
        names = ", ".join(name for name in weights if weights[name])
        return f"distil.losses ({names}) compare all crops of a batch"
    if config.task != "ssl" or config.objective is None:
        return ""
    # Reading an attribute needs no weights.
    with shapes_only():
        needs_whole_batch = build_objective(config, embed_dim=1).needs_whole_batch
    if not needs_whole_batch:
        return ""
    return f"{config.objective.name} compares all utterances of a batch"


def num_choices(config: Config) -> int:
    """Return the number of choices without labels; the loss of guessing is its logarithm."""
    if config.task == "segmentation":
        return NUM_SETS
    # A student finds its target among those of the batch.
    if config.task == "distil":
        return config.training.global_batch
    assert config.objective is not None
    with shapes_only():
        num_prototypes = build_objective(config, embed_dim=1).num_prototypes
    # Without prototypes, a view is compared with all other long views of the batch.
    num_views = config.views.long * config.training.global_batch
    return num_prototypes or num_views - 1


def build_views(config: Config) -> Views:
    """Return the numbers and lengths of the views of an utterance."""
    views = config.views
    long_samples = crop_samples(config)
    sample_rate = config.frontend["sample_rate"]
    short_samples = round(views.short_seconds * sample_rate)
    # Short views are cut out of crops that are as long as the long views.
    return Views(
        views.long,
        views.short,
        long_samples,
        min(short_samples, long_samples),
    )


def crops_each(config: Config) -> int:
    """Return the number of crops of an utterance in a batch."""
    if config.task != "ssl":
        return 1
    return build_views(config).crops_each


def views_each(config: Config) -> int:
    """Return the number of rows of a batch that are augmentations of one crop."""
    return config.distil.views if config.task == "distil" else 1


def batch_unit(config: Config) -> tuple[str, str]:
    """Return the unit of the batch size, "crop" or "utterance", and a text with its length."""
    views = config.views
    seconds = f"{config.data.crop_seconds:g} s"
    if config.task != "ssl":
        return "crop", f" of {seconds}"
    short = f", {views.short} of {views.short_seconds:g} s" if views.short else ""
    return "utterance", f" (views: {views.long} of {seconds}{short})"


def check_margin(config: Config) -> None:
    """Raise ValueError if a margin is configured for a head without one."""
    head = HEADS[config.head.name]
    margin = config.training.margin
    if not head.takes_margin and (margin.initial or margin.final):  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            f"training.margin: {margin.initial:g} to {margin.final:g}, but head"
            f" {config.head.name} has no margin; set training.margin.initial and .final"
            " to 0"
        )


def is_head_split(config: Config, world_size: int, num_classes: int) -> bool:
    """Return whether the head's rows are split over ranks; sampling of classes requires it."""
    split_head = config.runtime.split_head
    share = config.training.sampled_share

    reason = ""  # why the head cannot be split
    if config.task == "identification":
        # Validation and the published model need all rows.
        reason = "identification needs the whole head; use auto"
    elif config.task == "distil":
        reason = "distillation needs the whole head; use auto"
    elif config.head.name not in SPLITTABLE:
        heads = ", ".join(SPLITTABLE)
        reason = f"rows of {config.head.name} cannot be split; use head {heads}, or off"

    must_split = split_head == "on" or share < 1
    if must_split and reason:
        raise ValueError(
            f"runtime.split_head: {split_head}, with training.sampled_share {share:g}:"
            f" {reason} and 1"
        )
    if must_split:
        return True
    is_large = world_size > 1 and num_classes >= SPLIT_FROM_CLASSES
    return split_head == "auto" and is_large and not reason


def build_augment(
    config: Config,
    *,
    rooms: Sequence[object] = (),
    noises: Sequence[object] = (),
    noise_kinds: Sequence[str] = (),
    noise_on_device: bool = True,
) -> Augment:
    """Build all augmentations whose probability is not 0.

    The arguments of a constructor are keys of the section `augment` or of a subsection of it
    (`spec`), or are added here. The augmentations of `augment.more` follow, named `more_<key>`.
    """
    # A pretrained model takes no memory here.
    with shapes_only():
        frontend = build_frontend(config)
    num_samples = crop_samples(config)
    # A constructor gets each of these that is among its parameters.
    supplied = {
        "num_samples": num_samples,
        "num_frames": frontend.num_frames(num_samples),
        "num_mel_bins": frontend.feat_dim,
        "sample_rate": frontend.sample_rate,
        "rooms": rooms,
        "noises": noises,
        "noise_kinds": noise_kinds,
        "noise_on_device": noise_on_device,
    }
    # The schema excludes these from the arguments that a configuration may set.
    assert tuple(supplied) == SUPPLIED
    settings = config.augment.model_dump()
    values = {**settings, **supplied}
    augmentations: dict[str, Augmentation] = {}
    for name in AUGMENTATIONS:
        if values.get(f"{name}_prob") == 0:
            continue
        make = AUGMENTATIONS[name]  # imports its module
        # A key of the subsection, such as `spec`, overrides the same key of the section.
        subsection = values.get(name, {})
        arguments = {**values, **subsection}
        parameters = inspect.signature(make).parameters
        missing = sorted(parameters.keys() - arguments.keys())
        if missing:
            raise ValueError(
                f"augment: no key {', '.join(missing)} of {name}; add it to AugmentConfig"
            )
        given = {key: arguments[key] for key in parameters}
        augmentations[name] = make(**given)

    for label, component in config.augment.more.items():
        make = AUGMENTATIONS[component.name]
        parameters = inspect.signature(make).parameters
        wanted = parameters.keys() & supplied.keys()
        given = {key: supplied[key] for key in wanted}
        augmentations[f"more_{label}"] = make(**given, **component.args)
    return Augment(augmentations, num_samples=num_samples)


def parameter_groups(config: Config, task: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters that learn, in groups of one `lr_scale`: a factor on the learning rate.

    A pretrained model may learn slower than the rest, and its layers the slower the lower they are
    (Clark et al., "ELECTRA", ICLR 2020, arXiv 2003.10555); what comes before them learns slowest.
    """
    learned: list[nn.Parameter] = []
    groups: dict[float, list[nn.Parameter]] = {1.0: learned}
    for name, parameter in task.named_parameters():
        if parameter.requires_grad:
            scale = _lr_scale(name, config, task)
            groups.setdefault(scale, []).append(parameter)
    return [
        {"params": parameters, "lr_scale": scale}
        for scale, parameters in groups.items()
        if parameters
    ]


def _lr_scale(name: str, config: Config, task: nn.Module) -> float:
    """Return the factor on the learning rate of a parameter, given its name in the task."""
    encoder_name = "embedder.frontend.encoder."
    if not config.is_pretrained or not name.startswith(encoder_name):
        return 1.0
    training = config.training
    frontend = task.get_submodule("embedder.frontend")
    assert isinstance(frontend, PretrainedFrontEnd)
    num_layers = len(frontend.layers)
    layers_name = f"{encoder_name}{frontend.family.layers}."
    norm_name = f"{encoder_name}{frontend.final_norm}."
    if name.startswith(layers_name):
        index, _, _ = name.removeprefix(layers_name).partition(".")
        layers_above = num_layers - 1 - int(index)
    elif frontend.final_norm and name.startswith(norm_name):
        layers_above = 0  # as the layer whose output it normalises
    else:
        layers_above = num_layers  # before all layers
    return training.pretrained_lr * training.layer_decay**layers_above


def build_optimizer(
    config: Config,
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    *,
    lr: float,
) -> torch.optim.Optimizer:
    """Build the optimizer; `lr` is the initial learning rate, which each step replaces.

    parameters: also in groups, as from `parameter_groups`.
    """
    make = OPTIMIZERS[config.optimizer.name]
    return make(parameters, lr=lr, **config.optimizer.args)


def build_learning_rate(config: Config, steps_per_epoch: int) -> LearningRate:
    """Return the learning rate as a function of the step; ValueError if it is not a number >= 0."""
    training = config.training
    # Linear scaling with the batch size (Goyal et al., 2017).
    scale = training.global_batch / training.lr_base_batch
    total_steps = training.num_epochs * steps_per_epoch
    # A schedule counts steps; the configuration counts epochs.
    extended: list[tuple[int, int]] = []
    for step, num_epochs in training.extended:
        extended.append((step, num_epochs * steps_per_epoch))
    lr_at = LearningRate(
        schedule=SCHEDULES[config.schedule.name],
        args=config.schedule.args,
        peak=training.lr * scale,
        final=training.final_lr * scale,
        warmup_steps=round(training.warmup_epochs * steps_per_epoch),
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        extended=extended,
    )
    # Some arguments are only invalid in combination: check the start of each epoch and the end.
    first_steps = range(0, total_steps, steps_per_epoch)
    for step in (*first_steps, total_steps - 1):
        if not 0 <= lr_at(step) < math.inf:
            raise ValueError(
                f"schedule: {config.schedule.name} gives {lr_at(step)} in step {step};"
                " correct schedule.args"
            )
    return lr_at


def crop_samples(config: Config) -> int:
    """Return the number of samples of a training crop."""
    sample_rate = config.frontend["sample_rate"]
    return round(config.data.crop_seconds * sample_rate)
