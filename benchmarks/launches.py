"""Count the operations that a training step launches on a GPU, without a GPU (fake_gpu.py).

    python benchmarks/launches.py --json FILE [--models campplus eres2net] [--precisions bf16]

One optimizer step of one micro-batch of 64 crops of 3 s, with every augmentation on every crop. A
small model is limited by the number of launches, each of which costs about 5 us. Rows are
`launches.MODEL.PRECISION.PART`, and `launches.MODEL.PRECISION.cuda_graph.PART` for a step with
`runtime.cuda_graph`:

- guard: what lets a bad step be undone;
- frontend: from the batch on the host to features;
- forward: backbone, head and loss; with a CUDA graph its replay, and zeros for the gradients;
- backward: with a graph, nothing;
- update: clipping and the optimizer;
- all: the parts, and the sums for the log.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fake_gpu import GPU, Kernels, fake_gpu, to_gpu
from models_cases import CASES, PRECISIONS
from rows import Row
from sides import ROOT, run_case, say, wants

from speakerlab.config import build
from speakerlab.config.build import crop_samples
from speakerlab.config.schema import Config, load_config
from speakerlab.core.batch import Batch, Crop
from speakerlab.data.loader import collate
from speakerlab.experiments import setup
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.distributed import Ranks
from speakerlab.training.graphs import WARM_UP, GraphedTask
from speakerlab.training.precision import DTYPES, Precision
from speakerlab.training.progress import LearningWatch, MetricSums
from speakerlab.training.run_state import RunState
from speakerlab.training.schedules import Schedule
from speakerlab.training.task import SpeakerTask
from speakerlab.training.trainer import Trainer
from speakerlab.training.update import Updater

PEERS = ()
QUICK = ("--models", "campplus", "eres2net")
CROPS, NUM_CLASSES = 64, 1000
ALL_ON = (
    *("augment.room_prob=1", "augment.noise_prob=1", "augment.telephone_prob=1"),
    *("augment.codec_prob=1", "augment.spec={num_freq_masks: 2, num_time_masks: 2}"),
)
GRAPHS = ("", ".cuda_graph")  # at the end of a row's name, before the part
PARTS = ("guard", "frontend", "forward", "backward", "update")
BACKBONE = "step/forward/backbone"
PART_OF = {  # regions of the step, of which the longest name that fits counts
    "step/guard": "guard",
    "step/optimizer/verdict": "guard",
    "step/transfer": "frontend",
    "step/front end": "frontend",
    "step/forward": "frontend",  # features and their masks
    BACKBONE: "forward",
    "step/forward/head": "forward",
    "step/replay": "forward",
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
    config: Config, precision: str, *, shards: Ranks | None = None, noise_on_device: bool = True
) -> SpeakerTask:
    """Build a task on the CPU, with short rooms and noises of every kind; shards: of its head."""
    noises, kinds = [np.ones(60000, np.int16)] * 9, ["noise"] * 2 + ["music"] * 2 + ["speech"] * 5
    banks = {"rooms": [np.ones(8000)], "noises": noises, "noise_kinds": kinds}
    task = build.build_task(
        config,
        num_classes=NUM_CLASSES,
        precision=Precision("fp32", "cuda", "counted"),
        augment=build.build_augment(config, **banks, noise_on_device=noise_on_device),
        shards=shards,
    )
    task.precision = Precision(precision, "cuda", "counted")  # see `build_trainer`
    setup.choose_kernels(config, task)
    return task


def draw_batch(config: Config, task: SpeakerTask, crops: int) -> Batch:
    """Return a batch, on the CPU, in which every augmentation has drawn."""
    rng, found = np.random.default_rng(0), []
    for row in range(crops):
        draws = {name: draw(rng) for name, draw in task.augment.draws.items()}
        draws = {name: draw for name, draw in draws.items() if draw is not None}
        speed = draws["speed"].group if "speed" in draws else 0
        wave_S = np.zeros(round(crop_samples(config) * config.augment.speeds[speed]), np.int16)
        numbers = {"first": 0, "label": row % NUM_CLASSES, "position": row, "row": row}
        found.append(Crop(wave_S=wave_S, feats_TF=None, draws=draws, **numbers))
    return collate(found)


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
    task.set_precision(task.precision)  # here, because torch finds no GPU outside `fake_gpu`
    ranks, margin = Ranks(0, 1, 1, device), config.training.margin.final
    updater = Updater(
        task,
        build.build_optimizer(config, task.parameters(), lr=0.1),
        device=device,
        clip_norm=config.training.clip_norm,
        scale_loss=task.precision.scales_loss,
        split=list(task.split.values()),
        sum_over_ranks=ranks.sum,
    )
    learning = LearningWatch(num_classes=NUM_CLASSES, warmup_steps=0, stop=False)
    none: Any = None
    parts: Any = {"task": task, "updater": updater, "learning": learning, "ranks": ranks}
    state = RunState(**parts, sums=MetricSums(ranks), writer=none)
    steps = {"valid_every_steps": 1, "checkpoint_every_steps": 1, "log_every_steps": 1}
    schedule = Schedule(
        lr_at=lambda step: 0.1 / (step + 1),
        margin_at=lambda step: margin / (step + 1),
        total_steps=100,
        steps_per_epoch=100,
        checkpoint_seconds=1e9,
        frozen_steps=frozen,
        **steps,
    )
    more: dict[str, Any] = dict.fromkeys(("report", "signals", "validation", "monitor"), none)
    trainer = Trainer(
        Path(),
        state=state,
        source=Batches(batch),
        plan=BatchPlan(len(batch.label_B), accumulation, 1, "counted"),
        schedule=schedule,
        crop_samples=build.crop_samples(config),
        seed=0,
        **more,
    )
    trainer.open()
    return trainer


def count_step(config: Config, precision: str, *, crops: int) -> dict[str, int]:
    """Return the launches of the second step, or of one that replays a CUDA graph, by part."""
    task, uses_graph = build_task(config, precision), config.runtime.cuda_graph == "on"
    batch = draw_batch(config, task, crops)
    with fake_gpu() as gpu:
        mark(task.embedder.backbone, gpu)
        to_gpu(task)
        trainer = build_trainer(config, task, on_host(batch))
        if uses_graph:
            trainer.graphed = GraphedTask(task, trainer.updater, accumulation=1)
        for _ in range(2 + uses_graph * WARM_UP):
            gpu.begin_step()
            gpu.launches.clear()
            trainer.train_step()
    counts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for region, launches in gpu.launches.items():
        names = [name for name in PART_OF if region.startswith(name)]
        if names:
            counts[PART_OF[max(names, key=len)]] += launches
    return {**counts, "all": gpu.launches.total()}


def on_host(batch: Batch) -> Batch:
    """Return the batch without its data; call it within `fake_gpu`."""
    return batch.map(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))


def mark(backbone: Any, gpu: Kernels) -> None:
    """Make the backbone a region of its own."""
    backbone.register_forward_pre_hook(lambda *_: gpu.regions.append(BACKBONE))
    backbone.register_forward_hook(lambda *_: gpu.regions.pop() and None)


def compare(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of every model and precision, with and without a graph."""
    for model, precision, graph in product(options.models, options.precisions, GRAPHS):
        name = f"launches.{model}.{precision}{graph}"
        if not any(wants(options, f"{name}.{part}") for part in (*PARTS, "all")):
            continue
        words = [*ALL_ON, *(["runtime.cuda_graph=on"] if graph else [])]
        config = load_config([ROOT / "conf" / f"{model}.yaml"], words)
        for part, count in count_step(config, precision, crops=CROPS).items():
            row = Row(name=f"{name}.{part}", ours=count, unit="launches")
            if wants(options, row.name):
                say(row.line())
                yield row


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=list(DTYPES))


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
