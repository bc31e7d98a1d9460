"""A training, put together and run. In: `Config`, the experiment's folder, the ranks. Out: a model.

`build_training` names every part; `train` lets it run and publishes what it has learned.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from speakerlab.checkpoints.published import publish, write_initial
from speakerlab.config import build
from speakerlab.config.embedder import Embedder
from speakerlab.config.schema import Config
from speakerlab.core.atomic import write_json, write_text
from speakerlab.core.batch import Batch
from speakerlab.data.loader import train_loader
from speakerlab.data.sampler import MicroBatches
from speakerlab.experiments import consistency
from speakerlab.experiments import setup as setup_training
from speakerlab.experiments.averaging import average_newest
from speakerlab.experiments.corpus import Corpus
from speakerlab.experiments.initial import init_from
from speakerlab.experiments.validation import ClassValidation, Validation
from speakerlab.experiments.validation_pictures import pictures_of
from speakerlab.losses.head import Head
from speakerlab.training.batch_size import slow_batchnorm
from speakerlab.training.checkpoint import read_latest, was_begun
from speakerlab.training.distributed import Ranks
from speakerlab.training.gradients import Gradients
from speakerlab.training.learning import LearningWatch
from speakerlab.training.metric_sums import Window
from speakerlab.training.monitor import Monitor
from speakerlab.training.run_state import Keeper
from speakerlab.training.signals import Signals
from speakerlab.training.sync_batchnorm import join_batchnorms
from speakerlab.training.trainer import Trainer
from speakerlab.training.update import Updater
from speakerlab.training.writer import CheckpointWriter, run_word

log = logging.getLogger(__name__)
REPORT = "nan_report.json"
OUT_OF_MEMORY = "out_of_memory"  # has the micro-batch that did not fit; run.sh reads it


@dataclass(frozen=True)
class Training:
    """A trainer and what it leaves behind when it is done."""

    trainer: Trainer
    embedder: Embedder
    head: Head
    classes: list[str]
    facts: dict[str, Any]
    validation: Validation | ClassValidation | None


def build_training(
    exp_dir: Path,
    init: Path | None,
    config: Config,
    ranks: Ranks,
    signals: Signals,
    *,
    below: int | None = None,
) -> Training:
    """Everything a training needs, each by its name; `below`: only smaller micro-batches."""
    precision = setup_training.precision(config, ranks)
    corpus = consistency.agreed_corpus(config, ranks)
    initial_sha256 = consistency.initial_model(config, init, exp_dir)
    classes = consistency.classes(config, corpus, init, exp_dir, ranks)
    task = setup_training.build_task(config, corpus, precision, ranks, num_classes=len(classes))
    embedder, head = task.embedder, task.head
    assert isinstance(embedder, Embedder)
    if init is not None and not was_begun(exp_dir):
        init_from(init, embedder=embedder, head=head, classes=classes, config=config)
        ranks.on_first(lambda: write_initial(exp_dir, embedder))
    plan = setup_training.plan_batch(config, ranks, task, below=below)
    if plan.joined_ranks > 1:
        join_batchnorms(task, ranks.neighbours(plan.joined_ranks), device=ranks.device)
    slow_batchnorm(task, plan.accumulation)
    task.to(ranks.device)
    setup_training.choose_kernels(config, task)
    order = setup_training.epoch_order(config, corpus)
    schedule = setup_training.schedule(config, order)
    crops = setup_training.train_crops(config, corpus, classes, task.augment)
    num_workers = setup_training.num_workers(config, ranks, crops, plan)
    validation = validation_of(config, corpus, head, classes)
    facts = setup_training.facts(config, ranks, precision, plan, corpus, order)
    facts["init_sha256"] = initial_sha256

    def batches(start_step: int, attempt: int) -> Iterable[Batch]:
        """This rank's micro-batches; another attempt has another order and other draws."""
        positions = MicroBatches(
            setup_training.epoch_order(config, corpus, attempt),
            start_step=start_step,
            stop_step=schedule.total_steps,
            micro_batch=plan.micro_batch,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        return train_loader(
            setup_training.train_crops(config, corpus, classes, task.augment, attempt),
            positions,
            num_workers=num_workers,
            pin_memory=ranks.device.type == "cuda",
            stall_seconds=config.runtime.stall_seconds,
        )

    keeper = Keeper(
        task=task,
        updater=Updater(
            task,
            build.build_optimizer(config, task.parameters(), lr=schedule.lr_at(0)),
            device=ranks.device,
            clip_norm=config.training.clip_norm,
            scale_loss=precision.scales_loss,
            split=list(task.split.values()),
            sum_over_ranks=ranks.sum,
        ),
        window=Window(ranks.device),
        learning=LearningWatch(
            num_classes=len(classes),
            warmup_steps=round(config.training.warmup_epochs * schedule.steps_per_epoch),
            stop=config.training.on_divergence == "stop",
        ),
        ranks=ranks,
        writer=CheckpointWriter(
            exp_dir / "checkpoints",
            keep=max(config.training.keep_checkpoints, config.training.average_checkpoints),
            run=ranks.on_first(run_word),
            rank=ranks.rank,
            num_parts=ranks.world_size if task.split else 0,
        ),
        read_latest=partial(read_latest, exp_dir / "checkpoints"),
        facts={"classes": classes, "config": config.to_dict()},
        figure=validation.figure if validation else Validation.figure,
    )
    trainer = Trainer(
        gradients=Gradients(
            task=task,
            plan=plan,
            ranks=ranks,
            batches=batches,
            throw_away_batch=setup_training.throw_away_batch(config, ranks.device),
            frozen_steps=schedule.frozen_steps,
            seed=config.seed,
        ),
        keeper=keeper,
        schedule=schedule,
        validate=partial(validation.run, embedder, ranks) if validation else None,
        report=partial(report, exp_dir, corpus, facts),
        note_memory=partial(write_text, exp_dir / OUT_OF_MEMORY, f"{plan.micro_batch}\n"),
        signals=signals,
    )
    if ranks.is_first:
        setup_training.describe(exp_dir, config, facts, task)
    return Training(trainer, embedder, head, classes, facts, validation)


def validation_of(
    config: Config, corpus: Corpus, head: Head, classes: Sequence[str]
) -> Validation | ClassValidation | None:
    """What judges the training on what is held out of it, if anything is."""
    if not len(corpus.valid):
        return None
    if config.task == "identification":
        return ClassValidation(corpus.valid, head=head, classes=classes)
    validation = Validation(corpus.valid)
    if validation.num_halved:
        text = "%d validation speakers have one utterance: its halves are compared, which is easy"
        log.info(text, validation.num_halved)
    return validation


def train(exp_dir: Path, config: Config, ranks: Ranks, parts: Training) -> None:
    """Fit (or go on fitting), then publish the last checkpoint, or the mean of the last ones."""
    validation = parts.validation
    monitor = partial(
        Monitor,
        exp_dir,
        total_steps=parts.trainer.schedule.total_steps,
        every_seconds=config.runtime.log_every_seconds,
        pictures=partial(pictures_of, validation) if validation else None,
    )
    num_steps = parts.trainer.fit(lambda step: monitor(start_step=step))
    if num_steps == 0 and (exp_dir / "model").exists():
        log.info("%s: was trained to its end before, nothing changed", exp_dir)
        ranks.barrier("nothing changed")
        return
    num, averaged = config.training.average_checkpoints, list[int]()
    if ranks.is_first and num > 1:
        decides = config.task == "identification"  # else the head is for further training alone
        averaged = average_newest(exp_dir, num, parts.embedder, parts.head if decides else None)
    head = parts.head.gather_state()  # every rank has a part
    if ranks.is_first:
        keeper, calibration = parts.trainer.keeper, None
        progress = keeper.progress
        done = {"steps": progress.step, f"best_valid_{keeper.figure}": progress.best}
        done["averaged"] = averaged
        if isinstance(validation, Validation):
            source = "validation speakers"
            calibration = validation.calibrate(parts.embedder, ranks.device, source=source)
        digest = publish(
            exp_dir / "model",
            embedder=parts.embedder,
            head=head,
            config=config,
            speakers=parts.classes,
            facts={**parts.facts, "attempt": progress.attempt, **done},
            calibration=calibration,
        )
        log.info("published %s/model, sha256 %s", exp_dir, digest[:12])
    ranks.barrier("published")


def report(exp_dir: Path, corpus: Corpus, facts: dict[str, Any], found: dict[str, Any]) -> None:
    """Write what was not finite, with the names of its utterances, and say the gist."""
    for one in found["micro_batches"]:
        one["utterances"] = [corpus.train.ids[row] for row in one.pop("rows")]
    known = {name: facts[name] for name in ("device", "precision", "torch", "commit")}
    write_json(exp_dir / REPORT, {**found, **known})
    log.error("%s", found["error"])
    bad = [one for one in found["micro_batches"] if not one["is_finite"]]
    for one in bad[:3]:
        log.error("%s", describe(one))
    if not bad:
        log.error("computed again, all of step %d is finite", found["step"])
    log.error("more in %s", exp_dir / REPORT)


def describe(found: dict[str, Any]) -> str:
    """One line on one bad micro-batch of a report."""
    what, where = "output", found["module"]
    if where is None:
        what, where = "gradient", found["gradient"]
    names = found["utterances"]
    line = f"rank {found['rank']}: the first {what} that is not finite is that of {where}"
    line += f", at {', '.join(names[:3])}" + (" and others" if len(names) > 3 else "")
    return line + ("; in fp32 it is finite" if found.get("is_finite_in_fp32") else "")
