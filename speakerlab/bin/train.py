"""Train a model into an experiment's folder, or resume where it was stopped.

Run by plain python as one process, or by torchrun as several ranks.
"""

import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from torch import nn

from speakerlab import build, process, setup_training
from speakerlab.batch import Batch
from speakerlab.bin.command import parser, run
from speakerlab.config import Config
from speakerlab.corpus import read_corpus
from speakerlab.data.loader import train_loader
from speakerlab.data.sampler import MicroBatches
from speakerlab.embedder import Embedder
from speakerlab.extraction import Validation
from speakerlab.initial import init_from
from speakerlab.published import publish, write_initial
from speakerlab.scoring.calibration import Calibration
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
    process.die_with_launcher()
    args = parse(words)
    config = setup_training.load(args.exp, args.config, args.set)
    ranks = start_ranks(timeout_minutes=config.runtime.timeout_minutes)
    locks: list[TextIO] = []  # open for as long as this process lives
    ranks.on_first(lambda: locks.append(lock_experiment(args.exp)))
    setup_training.log_to(args.exp, ranks)
    try:
        train(args.exp, args.init, config, ranks)
    except NumericError as error:
        log.error("%s", error)
        process.leave(process.EXIT_NUMERIC)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("train", __doc__)
    options.add_argument("--exp", type=Path, required=True, metavar="DIR")
    options.add_argument("--config", type=Path, nargs="+", required=True, metavar="YAML")
    options.add_argument("--init", type=Path, metavar="MODEL", help="a published model")
    settings = "e.g. training.lr=0.1, after all files"
    options.add_argument(
        "--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE", help=settings
    )
    return options.parse_args(words)


@dataclass(frozen=True)
class Training:
    """A trainer and what it leaves behind when it is done."""

    trainer: Trainer
    checkpoints: Checkpoints
    embedder: Embedder
    head: nn.Module
    classes: list[str]
    facts: dict[str, Any]
    calibrate: Callable[[], Calibration | None]


def build_training(exp_dir: Path, init: Path | None, config: Config, ranks: Ranks) -> Training:
    """Everything a training needs, each by its name."""
    precision = setup_training.precision(config, ranks)
    apply_backend_settings(deterministic=config.runtime.deterministic)
    corpus = read_corpus(config)
    initial_sha256 = setup_training.initial_model(config, init, exp_dir)
    classes = setup_training.classes(config, corpus, init, exp_dir, ranks)
    embedder = build.build_embedder(config)
    head = build.build_head(config, embed_dim=embedder.embed_dim, num_classes=len(classes))
    checkpoints = Checkpoints(exp_dir / "checkpoints", keep=config.training.keep_checkpoints)
    if init is not None and not checkpoints.list():
        init_from(init, embedder=embedder, head=head, classes=classes, config=config)
        ranks.on_first(lambda: write_initial(exp_dir, embedder))
    task = SpeakerTask(
        augment=build.build_augment(config, rooms=corpus.rooms, noises=corpus.noises),
        embedder=embedder,
        spec_augment=build.build_spec_augment(config),
        head=head,
        precision=precision,
    )
    plan = setup_training.plan_batch(config, ranks, task)
    slow_batchnorm(task, plan.accumulation)
    task.to(ranks.device)
    order = setup_training.epoch_order(config, corpus)
    schedule = setup_training.schedule(config, order)
    crops = setup_training.train_crops(config, corpus, classes)
    num_workers = setup_training.num_workers(config, ranks, crops, plan)
    validation = Validation(corpus.valid) if len(corpus.valid) else None
    if validation is not None and validation.num_halved and ranks.is_first:
        text = "%d validation speakers have one utterance: its halves are compared, which is easy"
        log.info(text, validation.num_halved)

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
            num_workers=num_workers,
            pin_memory=ranks.device.type == "cuda",
            stall_seconds=config.runtime.stall_seconds,
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
    facts = setup_training.facts(config, ranks, precision, plan, corpus, order)
    facts["init_sha256"] = initial_sha256
    if ranks.is_first:
        setup_training.describe(exp_dir, config, facts, task)

    def calibrate() -> Calibration | None:
        if validation is None:
            return None
        return validation.calibrate(embedder, ranks.device, source="validation speakers")

    return Training(trainer, checkpoints, embedder, head, classes, facts, calibrate)


def train(exp_dir: Path, init: Path | None, config: Config, ranks: Ranks) -> None:
    """Build, fit (or go on fitting), publish."""
    parts = build_training(exp_dir, init, config, ranks)
    monitor = partial(
        Monitor,
        exp_dir,
        total_steps=parts.trainer.schedule.total_steps,
        every_seconds=config.runtime.log_every_seconds,
    )
    state = {"classes": parts.classes, "config": config.to_dict()}
    num_steps = parts.trainer.fit(parts.checkpoints, lambda step: monitor(start_step=step), state)
    if num_steps == 0 and (exp_dir / "model").exists():
        log.info("%s: was trained to its end before, nothing changed", exp_dir)
    elif ranks.is_first:
        done = {"steps": parts.trainer.step, "best_valid_eer": parts.trainer.best_eer}
        digest = publish(
            exp_dir / "model",
            embedder=parts.embedder,
            head=parts.head,
            config=config,
            speakers=parts.classes,
            facts={**parts.facts, **done},
            calibration=parts.calibrate(),
        )
        log.info("published %s/model, sha256 %s", exp_dir, digest[:12])
    ranks.barrier("published")


if __name__ == "__main__":
    run(main, sys.argv[1:])
