"""What stands between a configuration and a training: classes, batch plan, order, schedule.

In: `Config`, the experiment's folder, the ranks. Out: plain objects and numbers for the trainer.
"""

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from speakerlab import provenance, stored_features
from speakerlab.atomic import write_json, write_text
from speakerlab.batch import Batch
from speakerlab.build import crop_samples
from speakerlab.config import Config, differences, load_config
from speakerlab.corpus import Corpus, noise_kinds
from speakerlab.data.dataset import Draws, TrainCrops, class_names, labels_by_name
from speakerlab.data.loader import auto_workers, batch_bytes, fit_workers
from speakerlab.data.sampler import EpochOrder
from speakerlab.published import file_sha256, find_model, read_classes
from speakerlab.training import batch_size
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.distributed import Ranks
from speakerlab.training.guard import Guard
from speakerlab.training.precision import Precision, resolve_precision
from speakerlab.training.schedules import margin_ramp, warmup_cosine
from speakerlab.training.task import SpeakerTask, dummy_batch
from speakerlab.training.trainer import Schedule

log = logging.getLogger(__name__)
LOG_FORMAT = "%(asctime)s %(message)s"


def load(exp_dir: Path, layers: Sequence[Path], overrides: Sequence[str]) -> Config:
    """The configuration; refused if the experiment was begun with another."""
    config = load_config(layers, overrides)
    recorded = exp_dir / "config.yaml"
    if recorded.exists() and any((exp_dir / "checkpoints").glob("step_*")):
        changed = differences(load_config([recorded]), config)
        if changed:
            raise ValueError(
                f"{recorded}: a resumed run must keep its configuration, got {'; '.join(changed)}; "
                "use the old values, or another --exp"
            )
    return config


def log_to(exp_dir: Path, ranks: Ranks) -> None:
    """Rank 0 also logs to `exp/train.log`; the other ranks only speak when something is wrong."""
    if ranks.is_first:
        file = logging.FileHandler(exp_dir / "train.log", encoding="utf-8")
        file.setFormatter(logging.Formatter(LOG_FORMAT, "%Y-%m-%d %H:%M:%S"))
        logging.getLogger().addHandler(file)
    else:
        logging.getLogger().setLevel(logging.WARNING)


def precision(config: Config, ranks: Ranks) -> Precision:
    """The same on every rank: that of the least capable device."""
    capability = None
    if ranks.device.type == "cuda":
        major, minor = ranks.min(torch.cuda.get_device_capability(ranks.device))
        capability = (major, minor)
    return resolve_precision(config.runtime.precision, ranks.device, capability)


def classes(
    config: Config, corpus: Corpus, init: Path | None, exp_dir: Path, ranks: Ranks
) -> list[str]:
    """The name of each row of the head; those of an experiment that goes on must be the same.

    With training.init_head "keep", the rows of the initial model come first, all of them.
    """
    names = class_names(corpus.train.speakers, config.augment.speeds)
    if init is not None and config.training.init_head == "keep":
        names = list(dict.fromkeys([*read_classes(init), *names]))
    recorded = exp_dir / "speakers.txt"

    def record() -> None:
        text = "".join(f"{name}\n" for name in names)
        resumed = any((exp_dir / "checkpoints").glob("step_*"))
        if resumed and recorded.read_text(encoding="utf-8") != text:
            raise ValueError(
                f"{recorded}: a resumed run must keep its speakers, got other training data; "
                "restore the data, or use another --exp"
            )
        write_text(recorded, text)
        config.write(exp_dir / "config.yaml")

    ranks.on_first(record)
    return names


def plan_batch(config: Config, ranks: Ranks, task: SpeakerTask) -> BatchPlan:
    """Micro-batch and accumulation; asks the memory only where the micro-batch is `auto`."""
    asked = config.runtime.micro_batch
    if isinstance(asked, dict):
        asked = asked.get(config.model.name, "auto")

    def forward(num_rows: int) -> Any:
        batch = throw_away_batch(config, torch.device("cpu"), num_rows)
        return task(task.features(batch), batch.label_B, 0.0).loss

    def limit() -> int:
        guard = Guard(task)
        guard.before_step()
        # Counted in fp32 on the CPU; what the backbone keeps in 16 bits is half of it.
        size = batch_size.saved_bytes_per_crop(forward) * task.precision.dtype.itemsize / 4
        guard.restore()
        free = batch_size.free_bytes(ranks.device, ranks.local_size)
        return ranks.min((batch_size.memory_limit(size, free, ranks.device),))[0]

    return batch_size.plan_batch(
        global_batch=config.training.global_batch,
        world_size=ranks.world_size,
        micro_batch=asked if isinstance(asked, int) else None,
        bn_batch=config.training.bn_batch,
        limit=limit,
    )


def epoch_order(config: Config, corpus: Corpus) -> EpochOrder:
    """The order of all epochs."""
    hours = config.training.epoch_hours
    order = EpochOrder(
        corpus.train.num_samples_N,
        crop_samples=crop_samples(config),
        global_batch=config.training.global_batch,
        seed=config.seed,
        epoch_samples=None if hours is None else hours * 3600 * corpus.train.sample_rate,
        speaker_N=corpus.train.speaker_N,
        speaker_balance=config.training.speaker_balance,
    )
    if hours is None and order.repeats > 1:
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
        log_every_steps=config.runtime.log_every_steps,
        frozen_steps=round(training.freeze_epochs * per_epoch),
    )


def train_crops(config: Config, corpus: Corpus, names: Sequence[str]) -> TrainCrops:
    """The training set as crops with their draws."""
    augment, stored = config.augment, {}
    if config.data.features == "fbank":
        stored = stored_features.frames_to_read(config.frontend, crop_samples(config))
        stored_features.check_stored(corpus.train, config.frontend)
    draws = Draws(
        crop_samples=crop_samples(config),
        **stored,
        speeds=augment.speeds,
        room_prob=augment.room_prob,
        num_rooms=len(corpus.rooms),
        noise_prob=augment.noise_prob,
        noise_lengths=[len(noise) for noise in corpus.noise],
        noise_kinds=noise_kinds(config, corpus.noise),
        telephone_prob=augment.telephone_prob,
        codec_prob=augment.codec_prob,
        num_masks=num_masks(config),
    )
    labels = labels_by_name(names, corpus.train.speakers, augment.speeds)
    return TrainCrops(
        corpus.train,
        draws,
        label_KN=labels,
        seed=config.seed,
        noise_bank=None if corpus.noise_on_device else corpus.noise,
    )


def num_masks(config: Config) -> int:
    """How many pairs of uniforms SpecAugment needs for a crop."""
    return config.augment.spec["num_freq_masks"] + config.augment.spec["num_time_masks"]


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
        num_speeds=len(config.augment.speeds),
        num_masks=num_masks(config),
        device=device,
    )


def initial_model(config: Config, init: Path | None, exp_dir: Path) -> str | None:
    """sha256 of the model that --init names; a run that goes on must keep its own."""
    if init is None and config.training.freeze_epochs:
        raise ValueError(
            f"training.freeze_epochs: only a model given by --init may be frozen, got "
            f"{config.training.freeze_epochs:g} without one; set it to 0, or add --init"
        )
    digest = None if init is None else file_sha256(find_model(init) / "embedder.safetensors")
    recorded = exp_dir / "run.json"
    if recorded.exists() and any((exp_dir / "checkpoints").glob("step_*")):
        begun = json.loads(recorded.read_text(encoding="utf-8")).get("init_sha256")
        if begun != digest:
            raise ValueError(
                f"{recorded}: a resumed run must keep its initial model, got {digest} for {begun}; "
                f"remove {exp_dir} to begin anew, or use another --exp"
            )
    return digest


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
        "world_size": ranks.world_size,
        "batch": str(plan),
        "bn_batch": plan.micro_batch,
        "seed": config.seed,
        "train_speakers": len(corpus.train.speakers),
        "train_utterances": len(corpus.train),
        "train_hours": round(corpus.train.hours, 3),
        "train_sha256": corpus.train.sha256(),
        "valid_speakers": len(corpus.valid.speakers),
        "rooms": len(corpus.rooms),
        "noises": len(corpus.noise),
        "noise_on_device": corpus.noise_on_device,
        "steps_per_epoch": order.steps_per_epoch,
        "crops_dropped_per_epoch": order.num_dropped,
    }


def describe(exp_dir: Path, config: Config, known: dict[str, Any], task: SpeakerTask) -> None:
    """Say what is about to happen; write run.json, unless the experiment is finished."""
    log.info(
        "%s: %s on %s (%s)",
        *(exp_dir, *(known[name] for name in ("precision", "device", "precision_reason"))),
    )
    log.info("%s; BatchNorm sees %d crops at once", known["batch"], known["bn_batch"])
    names = ("train_speakers", "train_utterances", "train_hours", "valid_speakers", "rooms")
    names = (*names, "noises", "steps_per_epoch", "crops_dropped_per_epoch")
    log.info(
        "%d speakers, %d utterances, %.2f h; %d validation speakers; %d rooms, %d noises; "
        "%d steps an epoch, %d crops of its incomplete last step left out",
        *(known[name] for name in names),
    )
    parameters = sum(p.numel() for p in task.embedder.parameters())
    log.info("%s: %.2f M parameters", config.model.name, parameters / 1e6)
    if not (exp_dir / "model").exists():
        write_json(exp_dir / "run.json", known)
