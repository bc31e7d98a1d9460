"""Train a model: build every part, fit, publish."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speakerlab.checkpoints.model_files import read_source, weights_name
from speakerlab.checkpoints.published import INITIAL, publish, write_initial
from speakerlab.config import build
from speakerlab.config.layers import flatten, to_yaml
from speakerlab.config.schema import Config
from speakerlab.data.sampler import EpochOrder
from speakerlab.embedder import Embedder
from speakerlab.experiments import consistency, run_log
from speakerlab.experiments.averaging import average_newest, mix_with_initial
from speakerlab.experiments.conversations import SegmentationValidation
from speakerlab.experiments.corpus import Corpus, bank_sizes, has_labels
from speakerlab.experiments.hardware import choose_kernels, choose_precision
from speakerlab.experiments.initial import init_from, keep_the_better
from speakerlab.experiments.model_card import stated_of_corpora
from speakerlab.experiments.planning import DevicePlan, plan_device
from speakerlab.experiments.teachers import Teaching, prepare_teaching
from speakerlab.experiments.train_batches import TrainBatches
from speakerlab.experiments.validation import (
    ClassValidation,
    HeldOutValidation,
    PairValidation,
    TeacherValidation,
)
from speakerlab.frontend.pretrained import PretrainedFrontEnd
from speakerlab.inference.batches import embed_pieces
from speakerlab.losses.head import Head
from speakerlab.models.segmenter import Segmenter
from speakerlab.training.batch_size import slow_batchnorm
from speakerlab.training.checkpoint import was_begun
from speakerlab.training.distillation import CropTargets, DistillationTask
from speakerlab.training.distributed import Ranks
from speakerlab.training.monitor import Monitor
from speakerlab.training.nan_report import write_report
from speakerlab.training.precision import Precision
from speakerlab.training.progress import LearningWatch
from speakerlab.training.run_state import RunState
from speakerlab.training.schedules import Schedule, margin_ramp
from speakerlab.training.signals import Signals
from speakerlab.training.sync_batchnorm import join_batchnorms
from speakerlab.training.task import Task
from speakerlab.training.trainer import Trainer
from speakerlab.training.update import MetricSums, Updater
from speakerlab.training.writer import CheckpointWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """A trainer, and what is needed to publish the result."""

    exp_dir: Path
    config: Config
    trainer: Trainer
    source: TrainBatches
    # None if no speech is held out.
    validation: HeldOutValidation | SegmentationValidation | None
    embedder: Embedder | Segmenter  # what is published
    head: Head | None
    classes: list[str]


def start_training(
    exp_dir: Path,
    init: Path | None,
    config: Config,
    ranks: Ranks,
    signals: Signals,
    *,
    too_large: int | None = None,
) -> Training:
    """Read the corpus, build all parts of a training, and record its start in run.json.

    init: the model to start from. too_large: a micro-batch that ran out of memory; a smaller one is
    used.
    """
    precision = choose_precision(config, ranks)
    run_log.log_device(exp_dir, config, ranks, precision)
    corpus = consistency.agreed_corpus(config, ranks)
    teaching = None
    if config.task == "distil":
        teaching = prepare_teaching(
            config,
            precision,
            ranks,
            train=corpus.train,
            valid=corpus.valid,
        )
    init_sha256 = consistency.check_initial_model(config, init, exp_dir)
    training = build_training(
        exp_dir,
        init,
        config,
        corpus,
        precision,
        ranks,
        signals,
        too_large=too_large,
        teaching=teaching,
    )
    facts = {
        **run_log.collect_facts(training.source, precision),
        # What the folders of the corpora state, such as the licence.
        **stated_of_corpora(config),
        "init_sha256": init_sha256,
        "init_source": initial_source(config, init),
    }
    if teaching is not None:
        facts |= teaching.facts
    trainer = training.trainer
    # A finished run trains nothing, so its run.json must keep the facts of the training.
    is_finished = consistency.is_published(
        exp_dir, config, trainer.schedule.total_steps
    )
    if ranks.is_first and not is_finished:
        run_log.log_start(exp_dir, training.config, facts, trainer.task)
    return training


def initial_source(config: Config, init: Path | None) -> dict[str, Any] | None:
    """Return the origin of the --init model, None if it has none."""
    if init is None:
        return None
    return read_source(init, weights_name(config.task))


def build_training(
    exp_dir: Path,
    init: Path | None,
    config: Config,
    corpus: Corpus,
    precision: Precision,
    ranks: Ranks,
    signals: Signals,
    *,
    too_large: int | None = None,
    teaching: Teaching | None = None,
) -> Training:
    """Build all parts of a training on a corpus; teaching: only in the task `distil`."""
    # What is learned: the classes of the corpus.
    classes = consistency.record_classes(config, corpus, init, exp_dir, ranks)
    consistency.check_training_data(config, corpus, exp_dir)

    # How it fits into this machine: the micro-batch, and the place of the noise.
    device_plan = plan_device(
        config,
        ranks,
        num_classes=len(classes),
        precision=precision.name,
        banks=bank_sizes(config, corpus),
        too_large=too_large,
    )
    plan = device_plan.batch
    corpus = replace(corpus, noise_on_device=device_plan.noise_on_device)

    # What learns: the network with its initial weights, on the device.
    task = build_task(
        config,
        corpus,
        precision,
        ranks,
        num_classes=len(classes),
        teaching=teaching,
    )
    embedder = task.embedder
    assert isinstance(embedder, Embedder | Segmenter)  # Task itself takes any module
    # A resumed run takes the weights of its checkpoint instead, later.
    if not was_begun(exp_dir):
        load_initial_weights(
            task,
            embedder,
            init=init,
            classes=classes,
            config=config,
            exp_dir=exp_dir,
            ranks=ranks,
        )
    if teaching is not None:
        assert isinstance(embedder, Embedder)
        place_student(task, embedder, teaching)
    fit_to_machine(task, embedder, device_plan, config, ranks)

    # When things happen: the order of crops decides how many steps an epoch has.
    source = TrainBatches(
        config,
        corpus,
        classes,
        task.augment,
        ranks,
        plan,
        target_VND=None if teaching is None else teaching.train_target_VND,
        target_frames=() if teaching is None else teaching.train_frames,
    )
    # If the run was extended, the returned configuration also lists the earlier numbers of epochs
    # (`training.extended`): the learning rate decays again from the step of each extension.
    config = consistency.record_config(
        config,
        source.order.steps_per_epoch,
        exp_dir,
        ranks,
    )
    schedule = build_schedule(config, source.order)
    validation = build_validation(config, corpus, task, classes, teaching)
    if init is not None and validation is None:
        log.warning(
            "no speakers are held out, so the trained model is the result even if it is"
            " worse than %s; to compare the two, set data.valid_speakers",
            init,
        )

    # The model's card always has a key such as `best_valid_eer`; without validation, it is null.
    metric = PairValidation.metric if validation is None else validation.metric
    state = build_state(exp_dir, config, task, ranks, schedule, classes, metric=metric)

    def report_nan(findings: dict[str, Any]) -> None:
        write_report(
            findings,
            path=exp_dir / "nan_report.json",
            utterances=corpus.train.ids,
            facts=run_log.recorded_facts(exp_dir),
        )

    monitor = Monitor(
        exp_dir,
        total_steps=schedule.total_steps,
        every_seconds=config.runtime.log_every_seconds,
        # TensorBoard shows the configuration as text, and its values as hyper-parameters.
        config=to_yaml(config.to_dict()),
        settings=flatten(config.to_dict()),
    )
    trainer = Trainer(
        exp_dir,
        state=state,
        source=source,
        plan=plan,
        schedule=schedule,
        validation=validation,
        monitor=monitor if ranks.is_first else None,
        report=report_nan,
        signals=signals,
        crop_samples=build.crop_samples(config),
        seed=config.seed,
        crop_targets=build_crop_targets(config, task, teaching),
    )
    return Training(
        exp_dir=exp_dir,
        config=config,
        trainer=trainer,
        source=source,
        validation=validation,
        embedder=embedder,
        head=task.head,
        classes=classes,
    )


def build_task(
    config: Config,
    corpus: Corpus,
    precision: Precision,
    ranks: Ranks,
    *,
    num_classes: int,
    teaching: Teaching | None = None,
) -> Task:
    """Build the task, which computes the loss of a batch, on the CPU."""
    # In three cases, ranks exchange more than gradients: a self-supervised objective takes
    # statistics over all of them, losses of distillation compare embeddings of all of them, and a
    # large head may be split over them.
    needs_exchange = config.task in ("ssl", "distil") or build.is_head_split(
        config, ranks.world_size, num_classes
    )
    return build.build_task(
        config,
        precision=precision,
        num_classes=num_classes,
        # Noise and rooms are drawn from the banks of the corpus.
        augment=build.build_augment(config, **corpus.banks),
        # `Ranks` has the collectives that the protocol `Shards` asks for.
        shards=ranks if needs_exchange else None,
        target_dim=0 if teaching is None else teaching.target_dim,
        teacher_channels=0 if teaching is None else teaching.num_channels,
    )


def load_initial_weights(
    task: Task,
    embedder: Embedder | Segmenter,
    *,
    init: Path | None,
    classes: Sequence[str],
    config: Config,
    exp_dir: Path,
    ranks: Ranks,
) -> None:
    """Load the weights of --init, if there are any, into a new training."""
    # INITIAL may be left of an earlier run with --init that ended before its first checkpoint.
    # In a run without --init, nothing would replace it, and its weights might be published.
    ranks.on_first(lambda: (exp_dir / INITIAL).unlink(missing_ok=True))
    if init is None:
        return
    init_from(
        init,
        embedder=embedder,
        head=task.head,
        classes=classes,
        config=config,
    )
    # In self-supervised training the loaded network is the teacher: the student gets a copy.
    # Other tasks do nothing here.
    task.adopt_loaded_weights()
    # Kept, because `publish_result` compares the trained weights with the initial ones.
    ranks.on_first(lambda: write_initial(exp_dir, embedder))


def fit_to_machine(
    task: Task,
    embedder: Embedder | Segmenter,
    device_plan: DevicePlan,
    config: Config,
    ranks: Ranks,
) -> None:
    """Move the task to the device, and set up its BatchNorm and kernels for this machine."""
    plan = device_plan.batch
    if isinstance(embedder.frontend, PretrainedFrontEnd):
        embedder.frontend.recomputes_layers = device_plan.recomputes_layers
    # With small micro-batches, groups of neighbouring ranks share BatchNorm's statistics.
    if plan.joined_ranks > 1:
        join_batchnorms(task, ranks.neighbours(plan.joined_ranks))
    # BatchNorm's running statistics move with each micro-batch. In a whole step they should move
    # equally far, however many micro-batches it has.
    slow_batchnorm(task, plan.accumulation)
    task.to(ranks.device)
    choose_kernels(config, task)


def place_student(task: Task, embedder: Embedder, teaching: Teaching) -> None:
    """Copy what the teacher's embeddings have in common into the losses and the projection."""
    assert isinstance(task, DistillationTask)
    common_KD = torch.from_numpy(teaching.common_KD)
    task.distance.get_buffer("common_KD").copy_(common_KD)
    frame_units = teaching.frame_units
    if task.frame_distance is not None and frame_units is not None:
        mean_C = torch.from_numpy(frame_units.mean_C)
        deviation_C = torch.from_numpy(frame_units.deviation_C)
        task.frame_distance.get_buffer("mean_C").copy_(mean_C)
        task.frame_distance.get_buffer("deviation_C").copy_(deviation_C)
    # A student whose published embeddings lie in the teacher's space (`distil.projection: keep`).
    if embedder.projection is not None:
        embedder.projection.get_buffer("common_KD").copy_(common_KD)


def build_crop_targets(
    config: Config,
    task: Task,
    teaching: Teaching | None,
) -> CropTargets | None:
    """Return the function that gets targets of each batch from the teachers.

    None if the targets were stored before (`distil.targets: utterance`).
    """
    if teaching is None or teaching.teacher is None:
        return None
    return CropTargets(
        teaching.teacher,
        task.augment,
        hears_clean=config.distil.hears == "clean",
        views=build.views_each(config),
    )


def build_schedule(config: Config, order: EpochOrder) -> Schedule:
    """Return the schedule; this is the only place that converts epochs to steps."""
    training = config.training
    steps_per_epoch = order.steps_per_epoch
    # Numbers of epochs may be fractions; numbers of steps are integers.
    return Schedule(
        lr_at=build.build_learning_rate(config, steps_per_epoch),
        margin_at=partial(
            margin_ramp,
            initial=training.margin.initial,
            final=training.margin.final,
            start_step=round(training.margin.start_epoch * steps_per_epoch),
            end_step=round(training.margin.end_epoch * steps_per_epoch),
        ),
        total_steps=training.num_epochs * steps_per_epoch,
        steps_per_epoch=steps_per_epoch,
        valid_every_steps=training.valid_every_epochs * steps_per_epoch,
        checkpoint_every_steps=training.checkpoint_every_steps,
        checkpoint_seconds=60 * config.runtime.checkpoint_minutes,
        log_every_steps=config.runtime.log_every_steps,
        frozen_steps=round(training.freeze_epochs * steps_per_epoch),
    )


def build_state(
    exp_dir: Path,
    config: Config,
    task: Task,
    ranks: Ranks,
    schedule: Schedule,
    classes: Sequence[str],
    *,
    metric: str,
) -> RunState:
    """Build what a checkpoint holds; metric: name of the validation metric."""
    training = config.training
    groups = build.parameter_groups(config, task)
    updater = Updater(
        task,
        build.build_optimizer(config, groups, lr=schedule.lr_at(0)),
        device=ranks.device,
        clip_norm=training.clip_norm,
        scale_loss=task.precision.scales_loss,
        # Each rank has other rows of a split head, so their gradient norm is summed over ranks.
        split=list(task.split_parameters.values()),
        sum_over_ranks=ranks.sum,
    )
    # A model that guesses among n choices has the loss log(n); a lower loss means that it has
    # learned something. The choices are classes, a self-supervised objective's prototypes or views,
    # or the targets of a batch in distillation without labels.
    num_choices = len(classes) or build.num_choices(config)
    learning = LearningWatch(
        num_classes=num_choices,
        warmup_steps=round(training.warmup_epochs * schedule.steps_per_epoch),
        stop=training.on_divergence == "stop",
    )
    # The checkpoints to average must still be there at the end.
    writer = CheckpointWriter(
        exp_dir / "checkpoints",
        keep=max(training.keep_checkpoints, training.average_checkpoints),
    )
    return RunState(
        task=task,
        updater=updater,
        sums=MetricSums(ranks),
        learning=learning,
        ranks=ranks,
        writer=writer,
        metric=metric,
    )


def build_validation(
    config: Config,
    corpus: Corpus,
    task: Task,
    classes: Sequence[str],
    teaching: Teaching | None = None,
) -> HeldOutValidation | SegmentationValidation | None:
    """Return the validation of the held-out utterances; None if there are none."""
    if not len(corpus.valid):
        return None
    if config.task == "segmentation":
        return SegmentationValidation(
            config, corpus.valid, corpus.references, task.augment
        )
    if config.task == "identification":
        return ClassValidation(corpus.valid, head=task.head, classes=classes)
    # Distillation with labels has a head, and is validated by the pairs below.
    learns_without_labels = not config.has_head
    if learns_without_labels and isinstance(task, DistillationTask):
        assert teaching is not None
        return TeacherValidation(
            corpus.valid,
            target_ND=task.distance.targets_of(teaching.valid_target_ND),
            project=task.distance.project,
            # Labels that training does not use still give an EER.
            has_labels=has_labels(config),
        )
    validation = PairValidation(corpus.valid)
    if validation.num_cut:
        log.info(
            "%d validation speakers have one utterance, whose pieces are compared"
            " instead",
            validation.num_cut,
        )
    return validation


def train(training: Training) -> None:
    """Fit, or resume, then publish the last checkpoint or the mean of the last ones.

    Where validation compares pairs, the model of --init is published instead if its EER is not
    higher, unless training.keep_better is false.
    """
    exp_dir = training.exp_dir
    trainer = training.trainer
    ranks = trainer.ranks
    num_steps = trainer.fit()
    # Publishing again would write the same model with a new date, and results that were computed
    # from it would look out of date. The model changes if more steps were trained, or if
    # `training.keep_better` now chooses the other one.
    is_unchanged = (
        num_steps == 0
        and consistency.is_published(exp_dir, training.config, trainer.state.step)
        and consistency.is_choice_published(exp_dir, training.config)
    )
    if is_unchanged:
        log.info("%s: already trained to the end, nothing changed", exp_dir)
        # No rank exits before all have looked: a launcher ends the others as soon as one exits.
        ranks.barrier("nothing changed")
        return

    # Rank 0 averages, because it publishes. It has all weights for that: only the head of
    # identification is averaged, and it is never split.
    averaged_steps: list[int] = []
    if ranks.is_first:
        averaged_steps = average_checkpoints(training)
        mix_with_initial(exp_dir, training.embedder, training.config)
    # Every rank must take part, because each may hold rows of the head.
    head_state = None if training.head is None else training.head.gather_state()
    if ranks.is_first:
        publish_result(training, head_state, averaged_steps)
    ranks.barrier("published")


def average_checkpoints(training: Training) -> list[int]:
    """Set the weights to the mean of the newest checkpoints, if so configured.

    Return their steps; none if the last checkpoint is published as it is.
    """
    config = training.config
    num_checkpoints = config.training.average_checkpoints
    if num_checkpoints == 1:
        return []
    # The head classifies in identification; in other tasks, it is only kept for further training.
    head = training.head if config.task == "identification" else None
    return average_newest(training.exp_dir, num_checkpoints, training.embedder, head)


def publish_result(
    training: Training,
    head_state: dict[str, Tensor] | None,
    averaged_steps: Sequence[int],
) -> None:
    """Write the model folder, with a calibration where pairs of held-out speech are scored."""
    exp_dir = training.exp_dir
    config = training.config
    embedder = training.embedder
    state = training.trainer.state
    validation = training.validation
    device = training.trainer.ranks.device
    outcome: dict[str, Any] = {
        "attempt": state.attempt,
        "steps": state.step,
        "averaged": list(averaged_steps),
        f"best_valid_{state.metric}": state.best,
    }
    # Without held-out speech, without labels, and in identification, there are no pairs, and no
    # calibration.
    pairs: PairValidation | None = None
    if isinstance(validation, SegmentationValidation):
        outcome |= keep_the_better(exp_dir, embedder, validation, config, device)
    elif isinstance(validation, PairValidation):
        # If training did not improve on the model of --init, this puts its weights back into the
        # embedder (training.keep_better). The head stays the trained one.
        outcome |= keep_the_better(exp_dir, embedder, validation, config, device)
        pairs = validation
    elif isinstance(validation, TeacherValidation):
        pairs = validation.pairs
    calibration = None
    if pairs is not None:
        assert isinstance(embedder, Embedder)
        emb_ND = embed_pieces(embedder, pairs.pieces, device=device)
        calibration = pairs.calibrate(emb_ND, source="validation speakers")
    digest = publish(
        exp_dir / "model",
        embedder=embedder,
        head=head_state,
        config=config,
        speakers=training.classes,
        facts={**run_log.recorded_facts(exp_dir), **outcome},
        calibration=calibration,
    )
    log.info("published %s/model, sha256 %s", exp_dir, digest[:12])
