"""Trainings for measurements, built as in `speakerlab train`, and the speed of their models.

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
from speakerlab.embedder import Embedder
from speakerlab.experiments.device_memory import configured_micro_batch
from speakerlab.experiments.train import Training, start_training
from speakerlab.training.distributed import Ranks
from speakerlab.training.signals import Signals

NEVER = 1 << 40  # steps
NUM_EPOCHS = 10_000  # more than can be measured
WARM_UP = 2  # steps before the measurement
MICRO_BATCH = {"cpu": 8, "cuda": 64}  # if the configuration has no number


@contextmanager
def open_training(
    config: Config,
    ranks: Ranks,
    *,
    exp_dir: Path | None = None,
    has_data: bool = True,
) -> Iterator[Training]:
    """Yield an endless training without validation, checkpoints or frozen epochs.

    exp_dir: folder of the training (None: a temporary folder). has_data: whether the configuration
    names data; else the training uses a synthetic corpus.
    """
    # All ranks use the folder created by the first rank.
    folder = exp_dir
    if folder is None:
        name = ranks.on_first(lambda: tempfile.mkdtemp(prefix="speakerlab-"))
        folder = Path(name)

    def leave(signal_number: int) -> None:
        process.leave(process.EXIT_SIGNAL + signal_number)

    signals = Signals(leave)
    endless = {
        "num_epochs": NUM_EPOCHS,
        "checkpoint_every_steps": NEVER,
        "freeze_epochs": 0.0,
    }
    try:
        data = {} if has_data else write_corpus(folder)
        config = changed(config, training=endless, data=data)
        training = start_training(folder, None, config, ranks, signals)
        training.trainer.after_step.validation = None
        training.trainer.start()
        yield training
    finally:
        if exp_dir is None and ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """Return a configuration with other values in some sections."""
    changed_sections: dict[str, Any] = {}
    for name, values in sections.items():
        section = getattr(config, name)
        changed_sections[name] = section.model_copy(update=values)
    return config.model_copy(update=changed_sections)


def in_micro_batches(config: Config, ranks: Ranks) -> Config:
    """Return the configuration with one micro-batch per step, of its own or a default size."""
    usual_size = MICRO_BATCH[ranks.device.type]
    size = configured_micro_batch(config) or usual_size
    return changed(
        config,
        training={"global_batch": size, "bn_batch": None},
        runtime={"micro_batch": size},
    )


def train_row(training: Training, name: str, *, seconds: float) -> Row:
    """Measure the steps of a training, with everything `speakerlab train` does in a step."""
    trainer = training.trainer
    # Never log a row of metrics: it would reset the waiting times that are summed here.
    schedule = replace(trainer.schedule, log_every_steps=NEVER)
    trainer.after_step.schedule = schedule
    trainer.open()
    wait_seconds: list[float] = []  # for data, of each step
    with closing(trainer):
        laps = Laps(trainer.ranks.device)
        for _ in laps.repeat(count(), warm_up=WARM_UP, seconds=seconds):
            trainer.take_step()
            laps.end("step")
            wait_seconds.append(trainer.inputs.take_wait_seconds())

    # Skip the steps of the warm-up.
    waited = sum(wait_seconds[-laps.count :])
    size = trainer.plan.global_batch
    return Row(
        name=f"train.{name}.{trainer.task.precision.name}",
        ours=laps.count * size / laps.total,
        unit="utt/s",
        note=f"batch {size}, {waited / laps.total:.1%} waiting for data",
    )


def inference_row(training: Training, name: str, *, seconds: float) -> Row:
    """Measure the backbone of the extraction embedder on crops of noise."""
    trainer = training.trainer
    precision = trainer.task.precision
    size = trainer.plan.micro_batch
    device = trainer.ranks.device
    assert isinstance(training.embedder, Embedder)
    embedder = training.embedder.for_inference(precision)
    with torch.inference_mode():
        wave_BS = torch.randn(size, trainer.crop_samples, device=device)
        feats_BTF = embedder.features(wave_BS)
        blocks = block_seconds(
            lambda: embedder.embed_features(feats_BTF),
            device=device,
            seconds=seconds,
        )
    return Row(
        name=f"infer.{name}.{precision.name}",
        ours=size / statistics.median(blocks),
        unit="utt/s",
        note=f"batch {size}",
    )
