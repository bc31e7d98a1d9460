"""Build modules and optimizers from a `Config`, of which the modules themselves know nothing."""

import inspect
import math
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from speakerlab.config.embedder import build_embedder
from speakerlab.config.schema import Config
from speakerlab.core.shapes import shapes_only
from speakerlab.frontend.augment import AUGMENTATIONS, SUPPLIED, Augment, Augmentation
from speakerlab.frontend.fbank import Fbank
from speakerlab.losses import HEADS, OBJECTIVES
from speakerlab.losses.head import Head
from speakerlab.losses.objective import Objective
from speakerlab.losses.sharded import SPLITTABLE, ShardedHead
from speakerlab.losses.shards import Shards
from speakerlab.training.precision import Precision
from speakerlab.training.schedules import SCHEDULES, LearningRate
from speakerlab.training.self_supervised import SelfSupervisedTask, Views
from speakerlab.training.task import SpeakerTask, Task
from speakerlab.training.update import OPTIMIZERS

SPLIT_FROM_CLASSES = 50_000  # below it, all rows and their reduction cost next to nothing


def build_task(
    config: Config,
    *,
    num_classes: int,
    precision: Precision,
    augment: Augment | None = None,
    shards: Shards | None = None,
) -> Task:
    """Build everything between a batch and its loss, on the CPU.

    augment: from `build_augment`; None: no noise and no rooms. shards: the ranks that the rows of
    the head are split over, or whose utterances are compared without labels.
    """
    embedder = build_embedder(config)
    dim, augment = embedder.embed_dim, build_augment(config) if augment is None else augment
    if config.task == "ssl":
        return SelfSupervisedTask(
            augment=augment,
            embedder=embedder,
            objective=build_objective(config, embed_dim=dim, shards=shards),
            views=build_views(config),
            momentum=config.views.teacher_momentum,
            precision=precision,
        )
    head = build_head(config, embed_dim=dim, num_classes=num_classes, shards=shards)
    return SpeakerTask(augment=augment, embedder=embedder, head=head, precision=precision)


def build_head(
    config: Config, *, embed_dim: int, num_classes: int, shards: Shards | None = None
) -> Head:
    """Build the training head, with weights drawn from the configuration's seed.

    shards: the ranks that its rows are split over; None: every rank has all rows.
    """
    check_margin(config)
    make = partial(
        HEADS[config.head.name], embed_dim=embed_dim, num_classes=num_classes, **config.head.args
    )
    torch.manual_seed(config.seed + 1)
    if shards is None:
        return make()
    return ShardedHead(make, shards=shards, sampled_share=config.training.sampled_share)


def build_objective(config: Config, *, embed_dim: int, shards: Shards | None = None) -> Objective:
    """Build the self-supervised objective, with weights drawn from the configuration's seed."""
    assert config.objective is not None
    torch.manual_seed(config.seed + 1)
    args = config.objective.args
    return OBJECTIVES[config.objective.name](embed_dim=embed_dim, shards=shards, **args)  # pyright: ignore[reportCallIssue]


def why_undivided(config: Config) -> str:
    """Return why a rank must compute its share of a batch at once; "" if it need not."""
    if config.task != "ssl" or config.objective is None:
        return ""
    with shapes_only():
        is_needed = build_objective(config, embed_dim=1).needs_whole_batch
    return f"{config.objective.name} compares all utterances of a batch" if is_needed else ""


def num_choices(config: Config) -> int:
    """Return between how many things the objective decides, to know the loss of guessing."""
    assert config.objective is not None
    with shapes_only():
        num_prototypes = build_objective(config, embed_dim=1).num_prototypes
    return num_prototypes or config.views.long * config.training.global_batch - 1


def build_views(config: Config) -> Views:
    views = config.views
    short_samples = round(views.short_seconds * config.frontend["sample_rate"])
    num_samples = crop_samples(config)
    return Views(views.long, views.short, num_samples, min(short_samples, num_samples))


def crops_each(config: Config) -> int:
    """Return the number of crops of an utterance in a batch."""
    return build_views(config).crops_each if config.task == "ssl" else 1


def batch_unit(config: Config) -> tuple[str, str]:
    """Return what batches count, in the singular, and how long it is."""
    seconds, views = f"{config.data.crop_seconds:g} s", config.views
    if config.task != "ssl":
        return "crop", f" of {seconds}"
    short = f", {views.short} of {views.short_seconds:g} s" if views.short else ""
    return "utterance", f" (views: {views.long} of {seconds}{short})"


def check_margin(config: Config) -> None:
    head, margin = HEADS[config.head.name], config.training.margin
    if not head.takes_margin and (margin.initial or margin.final):  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            f"training.margin: {margin.initial:g} to {margin.final:g}, but head "
            f"{config.head.name} has no margin; set training.margin.initial and .final to 0"
        )


def is_head_split(config: Config, world_size: int, num_classes: int) -> bool:
    """Return whether the head's rows are split over ranks, as for a sampled share of classes."""
    asked, share = config.runtime.split_head, config.training.sampled_share
    reason = ""
    if config.task == "identification":  # validation and the published model need all rows
        reason = "identification needs the whole head; use auto"
    elif config.head.name not in SPLITTABLE:
        heads = ", ".join(SPLITTABLE)
        reason = f"rows of {config.head.name} cannot be split; use head {heads}, or off"
    must = asked == "on" or share < 1
    if must and reason:
        raise ValueError(
            f"runtime.split_head: {asked}, with training.sampled_share {share:g}: {reason} and 1"
        )
    is_worth_it = world_size > 1 and num_classes >= SPLIT_FROM_CLASSES
    return must or (asked == "auto" and is_worth_it and not reason)


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
    (`spec`), or are added here. Those of `augment.more` follow, named `more_<key>`.
    """
    fbank = Fbank(**config.frontend)
    supplied = {
        "num_samples": crop_samples(config),
        "num_frames": fbank.num_frames(crop_samples(config)),
        "num_mel_bins": fbank.num_mel_bins,
        "sample_rate": fbank.sample_rate,
        "rooms": rooms,
        "noises": noises,
        "noise_kinds": noise_kinds,
        "noise_on_device": noise_on_device,
    }
    assert (*supplied,) == SUPPLIED
    known = {**config.augment.model_dump(), **supplied}
    made: dict[str, Augmentation] = {}
    for name, make in AUGMENTATIONS.items():
        if known.get(f"{name}_prob") != 0:
            args, keys = {**known, **known.get(name, {})}, inspect.signature(make).parameters
            if missing := ", ".join(keys - args.keys()):
                raise ValueError(f"augment: no key {missing} of {name}; add it to AugmentConfig")
            made[name] = make(**{key: args[key] for key in keys})
    for label, part in config.augment.more.items():
        make = AUGMENTATIONS[part.name]
        taken = inspect.signature(make).parameters.keys() & supplied.keys()
        made[f"more_{label}"] = make(**{key: supplied[key] for key in taken}, **part.args)
    return Augment(made, num_samples=crop_samples(config))


def build_optimizer(
    config: Config, parameters: Iterable[nn.Parameter], *, lr: float
) -> torch.optim.Optimizer:
    """Build the optimizer; `lr` is its first learning rate, and is set at each step."""
    return OPTIMIZERS[config.optimizer.name](parameters, lr=lr, **config.optimizer.args)


def build_learning_rate(config: Config, steps_per_epoch: int) -> LearningRate:
    """Return the learning rate as a function of the step; ValueError if it is not a number >= 0."""
    training = config.training
    scale = training.global_batch / training.lr_base_batch
    total_steps = training.num_epochs * steps_per_epoch
    lr_at = LearningRate(
        schedule=SCHEDULES[config.schedule.name],
        args=config.schedule.args,
        peak=training.lr * scale,
        final=training.final_lr * scale,
        warmup_steps=round(training.warmup_epochs * steps_per_epoch),
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        extended=[(step, before * steps_per_epoch) for step, before in training.extended],
    )
    for step in (*range(0, total_steps, steps_per_epoch), total_steps - 1):
        if not 0 <= lr_at(step) < math.inf:
            raise ValueError(
                f"schedule: {config.schedule.name} gives {lr_at(step)} in step {step}; correct "
                "schedule.args"
            )
    return lr_at


def crop_samples(config: Config) -> int:
    return round(config.data.crop_seconds * config.frontend["sample_rate"])
