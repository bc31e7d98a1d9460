"""Train a model into an experiment's folder, or resume where it was stopped.

Run by plain python as one process, or by torchrun as several ranks.
"""

import logging
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from speakerlab import build, lifetime, setup_training
from speakerlab.batch import Batch
from speakerlab.bin.command import parser, run
from speakerlab.config import Config
from speakerlab.data.loader import train_loader
from speakerlab.data.sampler import MicroBatches
from speakerlab.embedder import init_from, publish
from speakerlab.extraction import Validation
from speakerlab.training.batch_size import slow_batchnorm
from speakerlab.training.checkpoint import Checkpoints
from speakerlab.training.distributed import Ranks, start_ranks
from speakerlab.training.guard import NumericError
from speakerlab.training.lock import lock_experiment
from speakerlab.training.monitor import Monitor
from speakerlab.training.precision import apply_backend_settings
from speakerlab.training.task import SpeakerTask
from speakerlab.training.trainer import Trainer

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab train --exp DIR --config YAML... [--init MODEL] [--set key=value ...]`"""
    lifetime.die_with_parent()
    lifetime.check_parent()
    args = parse(words)
    config = setup_training.load(args.exp, args.config, args.set)
    ranks = start_ranks(timeout_minutes=config.runtime.timeout_minutes)
    lock = ranks.on_first(lambda: None if not ranks.is_first else lock_experiment(args.exp))
    setup_training.log_to(args.exp, ranks)
    try:
        train(args, config, ranks)
    except NumericError as error:
        log.error("%s", error)
        lifetime.leave(lifetime.EXIT_NUMERIC)
    finally:
        if lock is not None:
            lock.close()


def parse(words: Sequence[str]) -> Namespace:
    options = parser("train", __doc__)
    options.add_argument("--exp", type=Path, required=True, metavar="DIR")
    options.add_argument("--config", type=Path, nargs="+", required=True, metavar="YAML")
    options.add_argument("--init", type=Path, metavar="MODEL", help="a published model")
    options.add_argument("--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE")
    return options.parse_args(words)


def train(args: Namespace, config: Config, ranks: Ranks) -> None:
    """Everything a training needs, each by its name, then `fit` and `publish`."""
    precision = setup_training.precision(config, ranks)
    apply_backend_settings(deterministic=config.runtime.deterministic)
    corpus = setup_training.read_corpus(config)
    classes = setup_training.classes(config, corpus, args.init, args.exp, ranks)
    embedder = build.build_embedder(config)
    head = build.build_head(config, embed_dim=embedder.embed_dim, num_classes=len(classes))
    checkpoints = Checkpoints(args.exp / "checkpoints", keep=config.training.keep_checkpoints)
    if args.init is not None and not checkpoints.list():
        init_from(
            args.init,
            embedder=embedder,
            head=head,
            classes=classes,
            head_rows=config.training.init_head,
        )
    task = SpeakerTask(
        augment=build.build_augment(config, rooms=corpus.rooms, noises=corpus.noises),
        embedder=embedder,
        spec_augment=build.build_spec_augment(config),
        head=head,
        precision=precision,
    )
    plan = setup_training.plan_batch(config, ranks, task)
    order = setup_training.epoch_order(config, corpus)
    schedule = setup_training.schedule(config, order)
    crops = setup_training.train_crops(config, corpus, classes)
    slow_batchnorm(task, plan.accumulation)
    task.to(ranks.device)
    facts = setup_training.describe(args.exp, config, ranks, precision, plan, corpus, order, task)
    validation = Validation(corpus.valid) if len(corpus.valid) else None

    def batches(start_step: int) -> Iterable[Batch]:
        positions = MicroBatches(
            order,
            start_step=start_step,
            stop_step=schedule.total_steps,
            micro_batch=plan.micro_batch,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        return train_loader(
            crops,
            positions,
            num_workers=setup_training.num_workers(config, ranks),
            pin_memory=ranks.device.type == "cuda",
        )

    trainer = Trainer(
        task=task,
        optimizer=build.build_optimizer(config, task.parameters(), lr=schedule.lr_at(0)),
        schedule=schedule,
        plan=plan,
        ranks=ranks,
        batches=batches,
        throw_away_batch=setup_training.throw_away_batch(config, ranks.device),
        validate=partial(validation.run, embedder, ranks.device) if validation else None,
        clip_norm=config.training.clip_norm,
        seed=config.seed,
    )
    trainer.fit(
        checkpoints,
        lambda start_step: Monitor(
            args.exp,
            start_step=start_step,
            total_steps=schedule.total_steps,
            every_seconds=config.runtime.log_every_seconds,
        ),
        {"classes": classes, "config": config.to_dict()},
    )
    if ranks.is_first:
        digest = publish(
            args.exp / "model",
            embedder=embedder,
            head=head,
            config=config,
            speakers=classes,
            facts={**facts, "steps": trainer.step, "best_valid_eer": trainer.best_eer},
        )
        log.info("published %s/model, sha256 %s", args.exp, digest[:12])
    ranks.barrier("published")


if __name__ == "__main__":
    run(main, sys.argv[1:])
