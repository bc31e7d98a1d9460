"""Train a model: build every part, fit, publish."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from speakerlab.checkpoints.model_files import read_source
from speakerlab.checkpoints.published import publish, write_initial
from speakerlab.config import build
from speakerlab.config.embedder import Embedder
from speakerlab.config.schema import Config
from speakerlab.experiments import consistency, setup
from speakerlab.experiments.averaging import average_newest
from speakerlab.experiments.corpus import Corpus
from speakerlab.experiments.initial import compare_with_initial, init_from
from speakerlab.experiments.model_card import stated_of_corpora
from speakerlab.experiments.planning import plan_batch
from speakerlab.experiments.validation import ClassValidation, HeldOut, Validation
from speakerlab.inference.batches import embed_pieces
from speakerlab.losses.head import Head
from speakerlab.training.batch_size import slow_batchnorm
from speakerlab.training.checkpoint import was_begun
from speakerlab.training.distributed import Ranks
from speakerlab.training.graphs import graph_task
from speakerlab.training.monitor import Monitor
from speakerlab.training.nan_report import write_report
from speakerlab.training.progress import LearningWatch, MetricSums
from speakerlab.training.run_state import RunState
from speakerlab.training.signals import Signals
from speakerlab.training.sync_batchnorm import join_batchnorms
from speakerlab.training.trainer import Trainer
from speakerlab.training.update import Updater
from speakerlab.training.writer import CheckpointWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """A trainer, and what is needed to publish the result."""

    exp_dir: Path
    config: Config
    trainer: Trainer
    embedder: Embedder
    head: Head | None
    classes: list[str]
    facts: dict[str, Any]


def build_training(
    exp_dir: Path,
    init: Path | None,
    config: Config,
    ranks: Ranks,
    signals: Signals,
    *,
    below: int | None = None,
) -> Training:
    """Build all parts of a training; below: only use micro-batches smaller than this."""
    training = config.training
    precision = setup.precision(config, ranks)
    setup.log_device(exp_dir, config, ranks, precision)
    corpus = consistency.agreed_corpus(config, ranks)
    init_sha256 = consistency.check_initial_model(config, init, exp_dir)
    classes = consistency.record_classes(config, corpus, init, exp_dir, ranks)

    task = setup.build_task(config, corpus, precision, ranks, num_classes=len(classes))
    embedder, head = task.embedder, task.head
    assert isinstance(embedder, Embedder)
    if init is not None and not was_begun(exp_dir):
        init_from(init, embedder=embedder, head=head, classes=classes, config=config)
        task.restart()
        ranks.on_first(lambda: write_initial(exp_dir, embedder))
    plan = plan_batch(config, ranks, task, below=below)
    if plan.joined_ranks > 1:
        join_batchnorms(task, ranks.neighbours(plan.joined_ranks))
    slow_batchnorm(task, plan.accumulation)
    task.to(ranks.device)
    setup.choose_kernels(config, task)

    source = setup.TrainBatches(config, corpus, classes, task.augment, ranks, plan)
    config = consistency.record_config(config, source.order.steps_per_epoch, exp_dir, ranks)
    schedule = setup.schedule(config, source.order)
    validation = build_validation(config, corpus, head, classes)
    if init is not None and validation is None:
        text = (
            "no speakers are held out, so the result replaces %s even if it is worse; to compare "
            "them, set data.valid_speakers"
        )
        log.warning(text, init)
    learned = [p for p in task.parameters() if p.requires_grad]
    updater = Updater(
        task,
        build.build_optimizer(config, learned, lr=schedule.lr_at(0)),
        device=ranks.device,
        clip_norm=training.clip_norm,
        scale_loss=precision.scales_loss,
        split=list(task.split.values()),
        sum_over_ranks=ranks.sum,
    )
    learning = LearningWatch(
        num_classes=len(classes) or build.num_choices(config),
        warmup_steps=round(training.warmup_epochs * schedule.steps_per_epoch),
        stop=training.on_divergence == "stop",
    )
    writer = CheckpointWriter(
        exp_dir / "checkpoints",
        keep=max(training.keep_checkpoints, training.average_checkpoints),
    )
    state = RunState(
        task=task,
        updater=updater,
        sums=MetricSums(ranks),
        learning=learning,
        ranks=ranks,
        writer=writer,
        metric=(validation or Validation).metric,
    )
    monitor = Monitor(
        exp_dir,
        total_steps=schedule.total_steps,
        every_seconds=config.runtime.log_every_seconds,
    )
    origin = {"init_sha256": init_sha256, "init_source": init and read_source(init)}
    facts = {**setup.facts(source, precision), **stated_of_corpora(config), **origin}
    where = exp_dir / "nan_report.json"
    report = partial(write_report, path=where, utterances=corpus.train.ids, facts=facts)
    trainer = Trainer(
        exp_dir,
        state=state,
        source=source,
        plan=plan,
        schedule=schedule,
        validation=validation,
        monitor=monitor if ranks.is_first else None,
        report=report,
        signals=signals,
        crop_samples=build.crop_samples(config),
        seed=config.seed,
        graphed=graph_task(
            config.runtime.cuda_graph,
            *(task, updater, ranks),
            accumulation=plan.accumulation,
            crop_samples=build.crop_samples(config),
        ),
    )
    if ranks.is_first and not consistency.is_published(exp_dir, schedule.total_steps):
        setup.log_start(exp_dir, config, facts, task)
    return Training(exp_dir, config, trainer, embedder, head, classes, facts)


def build_validation(
    config: Config, corpus: Corpus, head: Head | None, classes: Sequence[str]
) -> HeldOut | None:
    """Return the validation of the held-out utterances; None if there are none."""
    if not len(corpus.valid):
        return None
    if config.task == "identification":
        assert head is not None
        return ClassValidation(corpus.valid, head=head, classes=classes)
    validation = Validation(corpus.valid)
    if validation.num_cut:
        text = "%d validation speakers have one utterance, whose pieces are compared instead"
        log.info(text, validation.num_cut)
    return validation


def train(training: Training) -> None:
    """Fit, or resume, then publish the last checkpoint or the mean of the last ones.

    The model of --init is published instead if its validation EER is not higher.
    """
    exp_dir, trainer, ranks = training.exp_dir, training.trainer, training.trainer.ranks
    if trainer.fit() == 0 and consistency.is_published(exp_dir, trainer.state.step):
        log.info("%s: already trained to the end, nothing changed", exp_dir)
        ranks.barrier("nothing changed")
        return
    config, head = training.config, training.head
    num, averaged = config.training.average_checkpoints, list[int]()
    if ranks.is_first and num > 1:
        decides = config.task == "identification"  # else the head is only for further training
        averaged = average_newest(exp_dir, num, training.embedder, head if decides else None)
    head_state = None if head is None else head.gather_state()  # every rank may hold rows of it
    if ranks.is_first:
        state, calibration, validation = trainer.state, None, trainer.validation
        done: dict[str, Any] = {"attempt": state.attempt, "steps": state.step, "averaged": averaged}
        done[f"best_valid_{state.metric}"] = state.best
        if isinstance(validation, Validation):
            embedder = training.embedder
            done |= compare_with_initial(exp_dir, embedder, validation, config, ranks.device)
            emb_ND = embed_pieces(training.embedder, validation.pieces, device=ranks.device)
            calibration = validation.calibrate(emb_ND, source="validation speakers")
        digest = publish(
            exp_dir / "model",
            embedder=training.embedder,
            head=head_state,
            config=config,
            speakers=training.classes,
            facts={**training.facts, **done},
            calibration=calibration,
        )
        log.info("published %s/model, sha256 %s", exp_dir, digest[:12])
    ranks.barrier("published")
