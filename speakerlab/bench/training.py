"""Trainings to measure, built as `speakerlab train` builds them, and the speed of their models.

Letters: B micro-batch, S samples, T frames, F mel bins.
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from speakerlab.bench.stopwatch import Laps, Row, block_seconds
from speakerlab.bench.synthetic import write_corpus
from speakerlab.config.schema import Config
from speakerlab.core import process
from speakerlab.experiments.planning import asked_micro_batch
from speakerlab.experiments.train import Training, build_training
from speakerlab.training.distributed import Ranks
from speakerlab.training.signals import Signals

NEVER = 1 << 40  # steps
NUM_EPOCHS = 10_000  # more than are measured
WARM_UP = 2  # steps before anything is measured
MICRO_BATCH = {"cpu": 8, "cuda": 64}  # if the configuration has no number


@contextmanager
def open_training(
    config: Config, ranks: Ranks, *, exp_dir: Path | None = None, has_data: bool = True
) -> Iterator[Training]:
    """Yield a training that has no end, validation, checkpoints and frozen epochs.

    exp_dir: where it writes; None: a temporary folder. has_data: else on a synthetic corpus.
    """
    folder = exp_dir or Path(ranks.on_first(lambda: tempfile.mkdtemp(prefix="speakerlab-")))
    signals = Signals(lambda number: process.leave(process.EXIT_SIGNAL + number))
    values = {"num_epochs": NUM_EPOCHS, "checkpoint_every_steps": NEVER, "freeze_epochs": 0.0}
    try:
        config = changed(config, training=values, data={} if has_data else write_corpus(folder))
        training = build_training(folder, None, config, ranks, signals)
        training.trainer.validation = None
        training.trainer.start()
        yield training
    finally:
        if exp_dir is None and ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """Return a configuration with other values in some sections."""
    update = {name: getattr(config, name).model_copy(update=v) for name, v in sections.items()}
    return config.model_copy(update=update)


def in_micro_batches(config: Config, ranks: Ranks) -> Config:
    """Return the same training with one micro-batch a step: its number, or a usual one."""
    size = asked_micro_batch(config) or MICRO_BATCH[ranks.device.type]
    training = {"global_batch": size, "bn_batch": None}
    return changed(config, training=training, runtime={"micro_batch": size})


def train_row(training: Training, name: str, *, seconds: float) -> Row:
    """Measure the steps of a training, all of what `speakerlab train` does in them."""
    trainer, waited = training.trainer, list[float]()
    trainer.schedule = replace(trainer.schedule, log_every_steps=NEVER)  # the log takes the waits
    trainer.open()
    with closing(trainer):
        laps = Laps(trainer.ranks.device)
        for _ in laps.repeat(count(), warm_up=WARM_UP, seconds=seconds):
            trainer.take_step()
            laps.end("step")
            waited.append(trainer.inputs.take_wait_seconds())
    size = trainer.plan.global_batch
    return Row(
        name=f"train.{name}.{trainer.task.precision.name}",
        ours=laps.count * size / laps.total,
        unit="utt/s",
        note=f"batch {size}, {sum(waited[-laps.count :]) / laps.total:.1%} waiting for data",
    )


def inference_row(training: Training, name: str, *, seconds: float) -> Row:
    """Measure the backbone of the embedder that extraction uses, on crops of noise."""
    trainer = training.trainer
    precision, size, device = trainer.task.precision, trainer.plan.micro_batch, trainer.ranks.device
    embedder = training.embedder.for_inference(precision)
    with torch.inference_mode():
        feats_BTF = embedder.features(torch.randn(size, trainer.crop_samples, device=device))
        took = block_seconds(
            lambda: embedder.embed_features(feats_BTF), device=device, seconds=seconds
        )
    rate, note = size / statistics.median(took), f"batch {size}"
    return Row(name=f"infer.{name}.{precision.name}", ours=rate, unit="utt/s", note=note)
