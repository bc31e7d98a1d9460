"""Training steps of the package's own trainer on tensors without data, and their launches.

A step has one micro-batch, with every augmentation on every crop; `count_step` counts the
operations that it launches on a GPU (fake_gpu.py), by these parts:

- guard: what lets a bad step be undone;
- frontend: from the batch on the host to features;
- forward: backbone, head and loss;
- backward;
- update: clipping and the optimizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fake_gpu import GPU, Kernels, fake_gpu, to_gpu

from speakerlab.config import build
from speakerlab.config.build import crop_samples
from speakerlab.config.schema import Config
from speakerlab.core.batch import Batch, Crop
from speakerlab.data.loader import collate
from speakerlab.experiments import hardware
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import Precision
from speakerlab.training.progress import LearningWatch
from speakerlab.training.run_state import RunState
from speakerlab.training.schedules import Schedule
from speakerlab.training.task import SpeakerTask
from speakerlab.training.trainer import Trainer
from speakerlab.training.update import MetricSums, Updater

NUM_CLASSES = 1000
# Settings with which every crop gets every augmentation.
ALL_ON = (
    "augment.room_prob=1",
    "augment.noise_prob=1",
    "augment.telephone_prob=1",
    "augment.codec_prob=1",
    "augment.spec={num_freq_masks: 2, num_time_masks: 2}",
)
PARTS = ("guard", "frontend", "forward", "backward", "update")
BACKBONE = "step/forward/backbone"
# Regions of the step; of the names that a region begins with, the longest counts.
PART_OF = {
    "step/guard": "guard",
    "step/optimizer/verdict": "guard",
    "step/transfer": "frontend",
    "step/front end": "frontend",
    "step/forward": "frontend",  # features and their masks
    BACKBONE: "forward",
    "step/forward/head": "forward",
    "step/backward": "backward",
    "step/optimizer": "update",
}


@dataclass
class Batches:
    """Yields one batch again and again, in page-locked memory."""

    batch: Batch

    def read_from(self, step: int, attempt: int) -> Iterator[Batch]:
        while True:
            yield self.batch.pin_memory()


def build_task(
    config: Config,
    precision: str,
    *,
    shards: Ranks | None = None,
    noise_on_device: bool = True,
) -> SpeakerTask:
    """Build a task on the CPU, with short rooms and noises of every kind; shards: of its head."""
    noise_S = np.ones(60000, np.int16)
    kinds = 2 * ["noise"] + 2 * ["music"] + 5 * ["speech"]
    augment = build.build_augment(
        config,
        rooms=[np.ones(8000)],
        noises=len(kinds) * [noise_S],
        noise_kinds=kinds,
        noise_on_device=noise_on_device,
    )
    task = build.build_task(
        config,
        num_classes=NUM_CLASSES,
        precision=Precision("fp32", "cuda", "counted"),
        augment=augment,
        shards=shards,
    )
    # Only noted here: torch finds no GPU outside of `fake_gpu`. `build_trainer` applies it.
    task.precision = Precision(precision, "cuda", "counted")
    hardware.choose_kernels(config, task)
    return task


def draw_batch(config: Config, task: SpeakerTask, num_crops: int) -> Batch:
    """Return a batch, on the CPU, in which every augmentation has drawn."""
    rng = np.random.default_rng(0)
    crops = []
    for row in range(num_crops):
        draws = {}
        for name, draw in task.augment.draws.items():
            drawn = draw(rng)
            if drawn is not None:
                draws[name] = drawn

        # A crop whose speed will be changed is read with more or fewer samples.
        group = 0
        if "speed" in draws:
            group = draws["speed"].group
        speed = config.augment.speeds[group]
        num_samples = round(crop_samples(config) * speed)
        crop = Crop(
            wave_S=np.zeros(num_samples, np.int16),
            feats_TF=None,
            draws=draws,
            first=0,
            label=row % NUM_CLASSES,
            position=row,
            row=row,
        )
        crops.append(crop)
    return collate(crops)


def build_trainer(
    config: Config,
    task: SpeakerTask,
    batch: Batch,
    *,
    accumulation: int = 1,
    frozen: int = 1,
    device: torch.device = GPU,
) -> Trainer:
    """Return a trainer of a task on its device, which neither logs nor saves nor validates.

    Call it within `fake_gpu`. frozen: steps at the start in which only the head learns. Learning
    rate and margin differ in each step.
    """
    task.set_precision(task.precision)
    ranks = Ranks(0, 1, 1, device)
    margin = config.training.margin.final
    optimizer = build.build_optimizer(config, task.parameters(), lr=0.1)
    updater = Updater(
        task,
        optimizer,
        device=device,
        clip_norm=config.training.clip_norm,
        scale_loss=task.precision.scales_loss,
        split=list(task.split_parameters.values()),
        sum_over_ranks=ranks.sum,
    )
    nothing: Any = None  # not used in the steps of these tests
    learning = LearningWatch(
        num_classes=NUM_CLASSES,
        warmup_steps=0,
        stop=False,
    )
    state = RunState(
        task=task,
        updater=updater,
        learning=learning,
        ranks=ranks,
        sums=MetricSums(ranks),
        writer=nothing,
    )
    schedule = Schedule(
        lr_at=lambda step: 0.1 / (step + 1),
        margin_at=lambda step: margin / (step + 1),
        total_steps=100,
        steps_per_epoch=100,
        checkpoint_seconds=1e9,
        frozen_steps=frozen,
        valid_every_steps=1,
        checkpoint_every_steps=1,
        log_every_steps=1,
    )
    plan = BatchPlan(len(batch.label_B), accumulation, 1, "counted")
    trainer = Trainer(
        Path(),
        state=state,
        source=Batches(batch),
        plan=plan,
        schedule=schedule,
        crop_samples=build.crop_samples(config),
        seed=0,
        report=nothing,
        signals=nothing,
        validation=nothing,
        monitor=nothing,
    )
    trainer.open()
    return trainer


def count_step(config: Config, precision: str, *, crops: int) -> dict[str, int]:
    """Return the launches of the second step, by part, and `all`."""
    task = build_task(config, precision)
    batch = draw_batch(config, task, crops)
    with fake_gpu() as gpu:
        mark(task.embedder.backbone, gpu)
        to_gpu(task)
        trainer = build_trainer(config, task, on_host(batch))
        for _ in range(2):
            gpu.begin_step()
            gpu.launches.clear()
            trainer.train_step()

    counts = dict.fromkeys(PARTS, 0)
    for region, launches in gpu.launches.items():
        names = [name for name in PART_OF if region.startswith(name)]
        if names:
            longest_name = max(names, key=len)
            part = PART_OF[longest_name]
            counts[part] += launches
    counts["all"] = gpu.launches.total()
    return counts


def on_host(batch: Batch) -> Batch:
    """Return the batch without its data; call it within `fake_gpu`."""

    def without_data(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    return batch.map(without_data)


def mark(backbone: Any, gpu: Kernels) -> None:
    """Make the backbone a region of its own."""

    def enter(*_: Any) -> None:
        gpu.regions.append(BACKBONE)

    def leave(*_: Any) -> None:
        gpu.regions.pop()

    backbone.register_forward_pre_hook(enter)
    backbone.register_forward_hook(leave)
