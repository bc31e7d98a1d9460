"""What stands between a configuration and a training: classes, batch plan, order, schedule.

In: `Config`, the experiment's folder, the ranks. Out: plain objects and numbers for the trainer.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from speakerlab.checkpoints import provenance
from speakerlab.config import build
from speakerlab.config.build import crop_samples
from speakerlab.config.schema import Config
from speakerlab.core.atomic import write_json
from speakerlab.core.batch import Batch
from speakerlab.data.dataset import TrainCrops
from speakerlab.data.loader import auto_workers, batch_bytes, fit_workers
from speakerlab.data.sampler import EpochOrder
from speakerlab.experiments import stored_features
from speakerlab.experiments.corpus import Corpus, corpus_facts, counted, row_labels
from speakerlab.experiments.memory_probe import Trial, largest_that_runs
from speakerlab.experiments.planning import (
    asked_micro_batch,
    crops_that_fit,
    footprint,
    may_join_ranks,
)
from speakerlab.frontend.augment import Augment
from speakerlab.training import batch_size
from speakerlab.training.appended import LogFile
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import Precision, card_of, resolve_precision
from speakerlab.training.schedules import margin_ramp, warmup_cosine
from speakerlab.training.task import SpeakerTask, dummy_batch
from speakerlab.training.trainer import Schedule

log = logging.getLogger(__name__)
MAX_LR_SCALE = 4.0  # far from its batch the linear rule (Goyal et al., arXiv 1706.02677) fails
LOG_FORMAT = "%(asctime)s %(message)s"


def log_to(exp_dir: Path, ranks: Ranks) -> None:
    """Rank 0 also logs to `exp/train.log`; the other ranks only speak when something is wrong."""
    if ranks.is_first:
        file = LogFile(exp_dir / "train.log")
        file.setFormatter(logging.Formatter(LOG_FORMAT, "%Y-%m-%d %H:%M:%S"))
        logging.getLogger().addHandler(file)
    else:
        logging.getLogger().setLevel(logging.WARNING)


def precision(config: Config, ranks: Ranks) -> Precision:
    """The same on every rank: that of the least capable device."""
    every = ranks.every(card_of(ranks.device))
    cards = [card for card in every if card is not None]
    conv_tf32 = torch.backends.cudnn.allow_tf32
    return resolve_precision(config.runtime.precision, ranks.device, cards, conv_tf32=conv_tf32)


def build_task(
    config: Config, corpus: Corpus, precision: Precision, ranks: Ranks, *, num_classes: int
) -> SpeakerTask:
    """Everything between a batch and its loss, on the CPU; the head is split where that pays."""
    is_split = build.is_head_split(config, ranks.world_size, num_classes)
    return build.build_task(
        config,
        num_classes=num_classes,
        precision=precision,
        rooms=corpus.rooms,
        noises=corpus.noise,
        noise_kinds=corpus.noise.kinds,
        noise_on_device=corpus.noise_on_device,
        shards=ranks if is_split else None,
    )


def choose_kernels(config: Config, task: SpeakerTask) -> None:
    """Layout and compilation as configured; neither changes a loss beyond rounding."""
    if wants_channels_last(config, task.precision):
        backbone = task.embedder.get_submodule("backbone")
        backbone.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if config.runtime.compile:
        task.compile_backbone()


def wants_channels_last(config: Config, precision: Precision) -> bool:
    """Whether 2-D convolutions are to have that layout; auto: where it is the quicker one."""
    if config.runtime.channels_last == "auto":
        return precision.device_type == "cpu" or precision.name != "fp32"
    return config.runtime.channels_last


def plan_batch(
    config: Config, ranks: Ranks, task: SpeakerTask, *, below: int | None = None
) -> BatchPlan:
    """Micro-batch and accumulation; asks the memory only where the micro-batch is not fixed.

    below: only a smaller micro-batch, after one of so many crops went out of memory.
    """
    training, asked = config.training, asked_micro_batch(config)
    on_gpu = ranks.device.type == "cuda"
    num_classes = len(task.head.get_parameter("weight_CD"))
    # Noise and rooms are not on the GPU yet; on a host they are in the memory already.
    banks = sum(buffer.nbytes for buffer in task.augment.buffers()) if on_gpu else 0

    def counted() -> int:
        found = footprint(
            config,
            num_classes=num_classes,
            precision=task.precision.name,
            split_over=ranks.world_size if task.head.is_split else 1,
            with_data=not on_gpu,
        )
        free, world = batch_size.free_bytes(ranks.device, ranks.local_size), ranks.world_size
        return crops_that_fit(found, free, ranks.device, world_size=world, bank_bytes=banks)

    def tried() -> int:
        divisors = batch_size.micro_batches(training.global_batch, ranks.world_size)
        sizes = batch_size.micro_batches_to_try(divisors, bn_batch=training.bn_batch, below=below)
        return largest_that_runs(
            Trial(
                config=config.to_dict(),
                num_classes=num_classes,
                precision=task.precision.name,
                device=str(ranks.device),
                bank_bytes=banks,
                sizes=sizes,
            )
        )

    limit = tried if asked == "probe" else counted
    return batch_size.plan_batch(
        global_batch=training.global_batch,
        world_size=ranks.world_size,
        micro_batch=asked if isinstance(asked, int) else None,
        bn_batch=training.bn_batch,
        join_ranks=may_join_ranks(config),
        below=below,
        limit=lambda: ranks.min((limit(),))[0],
        mode=str(asked),
    )


def epoch_order(config: Config, corpus: Corpus, attempt: int = 0) -> EpochOrder:
    """The order of all epochs; its length is the same at every attempt."""
    hours = config.training.epoch_hours
    order = EpochOrder(
        corpus.train.num_samples_N,
        crop_samples=crop_samples(config),
        global_batch=config.training.global_batch,
        seed=config.seed,
        attempt=attempt,
        epoch_samples=None if hours is None else hours * 3600 * corpus.train.sample_rate,
        speaker_N=corpus.train.speaker_N,
        speaker_balance=config.training.speaker_balance,
    )
    if hours is None and order.repeats > 1 and not attempt:
        text = "the corpus is shorter than a global batch: each epoch repeats it %.1f times"
        log.info(text, order.repeats)
    return order


def schedule(config: Config, order: EpochOrder) -> Schedule:
    """Epochs become steps here and nowhere else."""
    training, per_epoch = config.training, order.steps_per_epoch
    scale = training.global_batch / training.lr_base_batch
    total_steps = training.num_epochs * per_epoch
    return Schedule(
        lr_at=partial(
            warmup_cosine,
            peak=training.lr * scale,
            final=training.final_lr * scale,
            warmup_steps=round(training.warmup_epochs * per_epoch),
            total_steps=total_steps,
        ),
        margin_at=partial(
            margin_ramp,
            initial=training.margin.initial,
            final=training.margin.final,
            start_step=round(training.margin.start_epoch * per_epoch),
            end_step=round(training.margin.end_epoch * per_epoch),
        ),
        total_steps=total_steps,
        steps_per_epoch=per_epoch,
        valid_every_steps=training.valid_every_epochs * per_epoch,
        checkpoint_every_steps=training.checkpoint_every_steps,
        checkpoint_seconds=60 * config.runtime.checkpoint_minutes,
        log_every_steps=config.runtime.log_every_steps,
        frozen_steps=round(training.freeze_epochs * per_epoch),
    )


def train_crops(
    config: Config, corpus: Corpus, names: Sequence[str], augment: Augment, attempt: int = 0
) -> TrainCrops:
    """The training set as crops with their draws."""
    stored = {}
    if config.data.features == "fbank":
        stored = stored_features.frames_to_read(config.frontend, crop_samples(config))
        stored_features.check_stored(corpus.train, config.frontend)
    return TrainCrops(
        corpus.train,
        augment.draws,
        crop_samples=crop_samples(config),
        **stored,
        speeds=config.augment.speeds,
        label_KN=row_labels(config, corpus, names),
        seed=config.seed,
        attempt=attempt,
    )


def num_workers(config: Config, ranks: Ranks, crops: TrainCrops, plan: BatchPlan) -> int:
    """Worker processes of this rank: as many as its CPUs and the host's shared memory allow."""
    asked = config.runtime.num_workers
    return fit_workers(
        auto_workers(ranks.local_size) if asked == "auto" else asked,
        bytes_per_batch=batch_bytes(crops, plan.micro_batch),
        local_ranks=ranks.local_size,
        is_fixed=asked != "auto",
        on_gpus=ranks.device.type == "cuda",
    )


def throw_away_batch(config: Config, device: torch.device, num_rows: int = 2) -> Batch:
    """A small batch of noise with the shape of a real one."""
    return dummy_batch(
        num_rows=num_rows,
        num_samples=crop_samples(config),
        device=device,
    )


def facts(
    config: Config,
    ranks: Ranks,
    used: Precision,
    plan: BatchPlan,
    corpus: Corpus,
    order: EpochOrder,
) -> dict[str, Any]:
    """What the run is made with, for run.json and the model's card."""
    return {
        **provenance.environment(ranks.device),
        "precision": used.name,
        "precision_reason": used.reason,
        "precision_remarks": list(used.remarks),
        "autocast_dtype": None if used.name == "fp32" else str(used.dtype).removeprefix("torch."),
        "loss_scaling": used.scales_loss,
        "world_size": ranks.world_size,
        "batch": str(plan),
        "bn_batch": plan.bn_batch,
        "bn_joined_ranks": plan.joined_ranks,
        "seed": config.seed,
        **corpus_facts(config, corpus),
        "steps_per_epoch": order.steps_per_epoch,
        "crops_dropped_per_epoch": order.num_dropped,
    }


def describe(exp_dir: Path, config: Config, known: dict[str, Any], task: SpeakerTask) -> None:
    """Say what is about to happen; write run.json, unless the experiment is finished."""
    gpu = "" if known["gpu"] is None else ", {gpu}, capability {capability[0]}.{capability[1]}"
    log.info(
        "%s: %s on %s%s (%s)",
        *(exp_dir, known["precision"], known["device"], gpu.format(**known)),
        known["precision_reason"],
    )
    for remark in known["precision_remarks"]:
        log.info("%s", remark)
    joined = f" of {known['bn_joined_ranks']} ranks" if known["bn_joined_ranks"] > 1 else ""
    log.info("%s; BatchNorm sees %d crops%s at once", known["batch"], known["bn_batch"], joined)
    what, held_out = counted(config)
    log.info(
        "%d %s, %d utterances, %.2f h; %d validation %s; %d rooms, %d noises; "
        "%d steps an epoch, %d crops of its incomplete last step left out",
        *(known[f"train_{what}"], what, known["train_utterances"], known["train_hours"]),
        *(known[f"valid_{held_out}"], held_out, known["rooms"], known["noises"]),
        *(known["steps_per_epoch"], known["crops_dropped_per_epoch"]),
    )
    training = config.training
    scale = training.global_batch / training.lr_base_batch
    log.info(
        "learning rate up to %g: %g at a batch of %d, in proportion; gradients clipped at %g",
        *(scale * training.lr, training.lr, training.lr_base_batch, training.clip_norm),
    )
    if scale > MAX_LR_SCALE:
        text = "training.lr: grows with the batch, got %.1f times; beyond %g this often diverges"
        log.warning(text, scale, MAX_LR_SCALE)
    parameters = sum(p.numel() for p in task.embedder.parameters())
    log.info("%s: %.2f M parameters", config.model.name, parameters / 1e6)
    if not (exp_dir / "model").exists():
        write_json(exp_dir / "run.json", known)
