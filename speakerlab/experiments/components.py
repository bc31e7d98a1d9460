"""Build the task and the schedule of a training from its configuration."""

from functools import partial

from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.data.sampler import EpochOrder
from speakerlab.experiments.corpus import Corpus
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import Precision
from speakerlab.training.schedules import Schedule, margin_ramp
from speakerlab.training.task import Task


def build_task(
    config: Config,
    corpus: Corpus,
    precision: Precision,
    ranks: Ranks,
    *,
    num_classes: int,
) -> Task:
    """Build the task, which computes the loss of a batch, on the CPU; a large head may be split."""
    # Ranks share the rows of a split head, and the statistics of a self-supervised objective.
    is_shared = config.task == "ssl" or build.is_head_split(
        config, ranks.world_size, num_classes
    )
    return build.build_task(
        config,
        precision=precision,
        num_classes=num_classes,
        # Noise and rooms are drawn from the banks of the corpus.
        augment=build.build_augment(config, **corpus.banks),
        shards=ranks if is_shared else None,
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
