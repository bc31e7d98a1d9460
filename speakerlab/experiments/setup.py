"""Build the parts of a training from its configuration: batch plan, data order, schedule, facts."""

import logging
import math
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from speakerlab.checkpoints import provenance
from speakerlab.config import build
from speakerlab.config.embedder import Embedder
from speakerlab.config.schema import Config
from speakerlab.core import process
from speakerlab.core.atomic import write_json
from speakerlab.core.batch import Batch
from speakerlab.core.reading import read_json
from speakerlab.data.loader import TrainCrops, micro_batches, train_loader
from speakerlab.data.sampler import EpochOrder
from speakerlab.data.workers import SHARED_MEMORY, auto_workers, fit_workers
from speakerlab.experiments import consistency
from speakerlab.experiments.corpus import Corpus, class_speeds, counted, row_labels
from speakerlab.experiments.planning import batch_bytes
from speakerlab.experiments.stored_features import frames_to_read
from speakerlab.frontend.augment import Augment
from speakerlab.training.appended import LogFile
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.checkpoint import was_begun
from speakerlab.training.devices import why
from speakerlab.training.distributed import Ranks, start_ranks
from speakerlab.training.precision import (
    Precision,
    apply_backend_settings,
    card_of,
    resolve_precision,
)
from speakerlab.training.schedules import Schedule, margin_ramp
from speakerlab.training.task import Task

log = logging.getLogger(__name__)
CACHE_LINE = 16  # values in fp32
MAX_LR_SCALE = 4.0  # far from its batch the linear rule (Goyal et al., arXiv 1706.02677) fails


def start_rank(config: Config) -> Ranks:
    runtime = config.runtime
    apply_backend_settings(deterministic=runtime.deterministic, conv_tf32=runtime.tf32 == "auto")
    ranks = start_ranks(timeout_minutes=runtime.timeout_minutes, device=runtime.device)
    if ranks.device.type == "cpu":
        process.keep_freed_memory()
    return ranks


def log_to(exp_dir: Path, ranks: Ranks) -> None:
    """Have rank 0 also log to `exp/train.log`; of the others, show errors and stalled readers."""
    if ranks.is_first:
        file = LogFile(exp_dir / "train.log")
        file.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        logging.getLogger().addHandler(file)
    else:
        logging.getLogger().setLevel(logging.ERROR)  # rank 0 warns of the same
        logging.getLogger("speakerlab.data.workers").setLevel(logging.WARNING)
        warnings.simplefilter("ignore")


@contextmanager
def undone_if_refused(exp_dir: Path, *, is_new: bool) -> Iterator[None]:
    """Remove a new experiment that is refused here, and stop logging to its folder."""
    try:
        yield
    except (ValueError, OSError):
        if is_new:
            logger = logging.getLogger()
            logger.handlers = [one for one in logger.handlers if not isinstance(one, LogFile)]
            shutil.rmtree(exp_dir, ignore_errors=True)  # NFS keeps the open lock
        raise


def precision(config: Config, ranks: Ranks) -> Precision:
    """Return the precision for all ranks: that of the least capable device."""
    cards = ranks.every(card_of(ranks.device))
    return resolve_precision(config.runtime.precision, ranks.device, cards)


def log_device(exp_dir: Path, config: Config, ranks: Ranks, used: Precision) -> None:
    """Log the device and the precision, and why: the first lines of a run."""
    where = "the CPU" if ranks.device.type == "cpu" else "GPUs" if ranks.world_size > 1 else "a GPU"
    reason = why(ranks.device, config.runtime.device)
    log.info("%s: trains on %s: %s; %s (%s)", exp_dir, where, reason, used.name, used.reason)
    recorded = exp_dir / "run.json"
    if recorded.exists() and was_begun(exp_dir):
        begun = read_json(recorded).get("precision", used.name)
        if begun != used.name:
            log.warning(
                "%s: the run began in %s and continues in %s, so its result is not that of an "
                "uninterrupted run; to keep %s, set runtime.precision=%s",
                *(exp_dir, begun, used.name, begun, begun),
            )


def build_task(
    config: Config, corpus: Corpus, precision: Precision, ranks: Ranks, *, num_classes: int
) -> Task:
    """Build everything between a batch and its loss, on the CPU; a large head may be split."""
    augment = build.build_augment(config, **corpus.banks)
    is_shared = config.task == "ssl" or build.is_head_split(config, ranks.world_size, num_classes)
    more = {"num_classes": num_classes, "augment": augment, "shards": ranks if is_shared else None}
    return build.build_task(config, precision=precision, **more)


def choose_kernels(config: Config, task: Task) -> None:
    """Choose memory layout and compilation; neither changes a loss beyond rounding.

    On a CPU, channels last is faster, except with few channels: the threads of a BatchNorm's
    backward pass then write their sums to one cache line, which takes ten times as long.
    """
    channels_last, precision = config.runtime.channels_last, task.precision
    embedders: list[Any] = [one for one in task.children() if isinstance(one, Embedder)]
    if channels_last == "auto":
        norms = [one for one in embedders[0].modules() if isinstance(one, torch.nn.BatchNorm2d)]
        if precision.device_type == "cpu":
            channels_last = all(norm.num_features >= CACHE_LINE for norm in norms)
        else:
            channels_last = precision.name != "fp32"
    for embedder in embedders:
        if channels_last:
            embedder.backbone.to(memory_format=torch.channels_last)
        if config.runtime.compile:
            embedder.compile_for_training()


def schedule(config: Config, order: EpochOrder) -> Schedule:
    """Return the schedule; epochs become steps here and nowhere else."""
    training, per_epoch = config.training, order.steps_per_epoch
    return Schedule(
        lr_at=build.build_learning_rate(config, per_epoch),
        margin_at=partial(
            margin_ramp,
            initial=training.margin.initial,
            final=training.margin.final,
            start_step=round(training.margin.start_epoch * per_epoch),
            end_step=round(training.margin.end_epoch * per_epoch),
        ),
        total_steps=training.num_epochs * per_epoch,
        steps_per_epoch=per_epoch,
        valid_every_steps=training.valid_every_epochs * per_epoch,
        checkpoint_every_steps=training.checkpoint_every_steps,
        checkpoint_seconds=60 * config.runtime.checkpoint_minutes,
        log_every_steps=config.runtime.log_every_steps,
        frozen_steps=round(training.freeze_epochs * per_epoch),
    )


@dataclass(eq=False)
class TrainBatches:
    """This rank's micro-batches; another attempt has another order and other draws."""

    config: Config
    corpus: Corpus
    classes: Sequence[str]
    augment: Augment
    ranks: Ranks
    plan: BatchPlan

    def __post_init__(self) -> None:
        config, self.order = self.config, self.order_of(attempt=0)
        if config.training.epoch_hours is None and self.order.repeats > 1:
            text = "the corpus is shorter than a global batch: each epoch repeats it %.1f times"
            log.info(text, self.order.repeats)
        size, waves = build.crop_samples(config), config.data.features == "wave"
        self.stored = {} if waves else frames_to_read(self.corpus.train, config.frontend, size)
        asked, num_ranks = config.runtime.num_workers, self.ranks.local_size
        wanted = auto_workers(num_ranks) if asked == "auto" else asked
        size = batch_bytes(config, self.plan.micro_batch, noise=not self.corpus.noise_on_device)
        gpus = num_ranks if self.ranks.device.type == "cuda" else 0
        self.num_workers = fit_workers(wanted, batch_bytes=size, local_ranks=num_ranks, gpus=gpus)
        if self.num_workers < wanted:
            line = (
                f"runtime.num_workers: {wanted} for each of {num_ranks} ranks do not fit in "
                f"{SHARED_MEMORY}, {self.num_workers} do; enlarge it (docker run --shm-size=2g, or "
                "--ipc=host)"
            )
            if asked != "auto":
                raise ValueError(f"{line}, or lower runtime.num_workers (0 needs none)")
            log.info("%s", line)

    def read_from(self, step: int, attempt: int) -> Iterator[Batch]:
        order = self.order_of(attempt=attempt)
        positions = micro_batches(
            order,
            start_step=step,
            stop_step=self.config.training.num_epochs * order.steps_per_epoch,
            micro_batch=self.plan.micro_batch,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            crops_each=build.crops_each(self.config),
        )
        return train_loader(
            self.crops_of(attempt=attempt),
            positions,
            num_workers=self.num_workers,
            pin_memory=self.ranks.device.type == "cuda",
            stall_seconds=self.config.runtime.stall_seconds,
        )

    def order_of(self, *, attempt: int) -> EpochOrder:
        """Return the order of all epochs; every attempt has the same length."""
        training, train = self.config.training, self.corpus.train
        hours, per = training.epoch_hours, training.one_crop_per
        seconds = math.inf if per == "utterance" else per
        return EpochOrder(
            train.num_samples_N,
            crop_samples=build.crop_samples(self.config),
            global_batch=training.global_batch,
            seed=self.config.seed,
            attempt=attempt,
            epoch_samples=None if hours is None else hours * 3600 * train.sample_rate,
            one_crop_per=None if seconds is None else seconds * train.sample_rate,
            speaker_N=train.speaker_N,
            speaker_balance=training.speaker_balance,
        )

    def crops_of(self, *, attempt: int) -> TrainCrops:
        config = self.config
        return TrainCrops(
            self.corpus.train,
            self.augment.draws,
            crop_samples=build.crop_samples(config),
            **self.stored,
            speeds=config.augment.speeds,
            codecs=config.augment.codecs,
            label_KN=row_labels(config, self.corpus, self.classes),
            seed=config.seed,
            attempt=attempt,
            crops_each=build.crops_each(config),
            clean_crops=config.views.clean if config.task == "ssl" else 0,
        )


def facts(source: TrainBatches, used: Precision) -> dict[str, Any]:
    """Return facts about the run, for run.json, the model's card and the log."""
    ranks, plan, corpus = source.ranks, source.plan, source.corpus
    train, valid, (what, held_out) = corpus.train, corpus.valid, counted(source.config)
    objective = source.config.objective if source.config.task == "ssl" else None
    return {
        **provenance.environment(ranks.device),
        "precision": used.name,
        "precision_reason": used.reason,
        "autocast_dtype": None if used.name == "fp32" else str(used.dtype).removeprefix("torch."),
        "loss_scaling": used.scales_loss,
        "world_size": ranks.world_size,
        "batch": str(plan),
        "bn_batch": plan.bn_batch,
        "bn_joined_ranks": plan.joined_ranks,
        "seed": source.config.seed,
        f"train_{what}": len(train.speakers),
        "train_utterances": len(train),
        "classes": len(source.classes),
        "objective": None if objective is None else objective.name,  # without labels
        "train_hours": round(train.hours, 3),
        "train_sha256": train.sha256(),
        f"valid_{held_out}": len(valid if held_out == "utterances" else valid.speakers),
        "rooms": len(corpus.rooms),
        "noises": len(corpus.noise),
        "noise_on_device": corpus.noise_on_device,
        "steps_per_epoch": source.order.steps_per_epoch,
        "crops_dropped_per_epoch": source.order.num_dropped,
    }


def log_start(exp_dir: Path, config: Config, known: dict[str, Any], task: Task) -> None:
    """Log what is about to run; write run.json."""
    joined = f" of {known['bn_joined_ranks']} ranks" if known["bn_joined_ranks"] > 1 else ""
    (unit, _), (what, held_out) = build.batch_unit(config), counted(config)
    log.info("%s; BatchNorm sees %d %ss%s at once", known["batch"], known["bn_batch"], unit, joined)
    log.info(
        "%s%d utterances, %.2f h; %d validation %s; %d rooms, %d noises; "
        "%d steps per epoch, %d %ss of the incomplete last step dropped",
        "" if what == "utterances" else f"{known[f'train_{what}']} {what}, ",
        *(known["train_utterances"], known["train_hours"]),
        *(known[f"valid_{held_out}"], held_out, known["rooms"], known["noises"]),
        *(known["steps_per_epoch"], known["crops_dropped_per_epoch"], unit),
    )
    if config.task == "verification" and len(config.augment.speeds) > 1:
        effect = "make new speakers" if len(class_speeds(config)) > 1 else "keep the speaker"
        text = "%d classes: speeds %s (augment.speed_classes: %s)"
        log.info(text, known["classes"], effect, config.augment.speed_classes)
    training, per_epoch = config.training, known["steps_per_epoch"]
    scale = training.global_batch / training.lr_base_batch
    lr_at = build.build_learning_rate(config, per_epoch)
    last = lr_at(lr_at.total_steps - 1)
    log.info(
        "learning rate %g after the warm-up, %g at the end (schedule %s; training.lr: %g for a "
        "global batch of %d); gradients clipped at %g",
        *(lr_at(lr_at.warmup_steps), last, config.schedule.name),
        *(training.lr, training.lr_base_batch, training.clip_norm),
    )
    if scale > MAX_LR_SCALE:
        text = "training.lr: scaled by %.1f for the global batch; above %g training often diverges"
        log.warning(text, scale, MAX_LR_SCALE)
    for step, before in training.extended[-1:]:
        log.info(
            "step %d: %d instead of %d epochs; the learning rate continues at %.3g, to %.3g",
            *(step, training.num_epochs, before, lr_at(step), last),
        )
        if max(lr_at(step), last) <= lr_at.final:
            text = "training.num_epochs: the learning rate stays at %.3g; for a higher one, %s"
            log.warning(text, last, consistency.new_run(exp_dir))
    if training.num_epochs < max(training.warmup_epochs, training.margin.end_epoch):
        text = "training.num_epochs: %d ends before warmup_epochs (%g) or margin.end_epoch (%g)"
        log.warning(text, training.num_epochs, training.warmup_epochs, training.margin.end_epoch)
    parameters = sum(p.numel() for p in task.embedder.parameters())
    log.info("%s: %.2f M parameters", config.model.name, parameters / 1e6)
    write_json(exp_dir / "run.json", known)
