"""A classifier of six-sample waves that trains in microseconds, for tests of the loop.

Letters: B rows, S samples.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from speakerlab.core.batch import Batch, Crop
from speakerlab.data.loader import collate
from speakerlab.training.distributed import Ranks
from speakerlab.training.optimizers import sgd
from speakerlab.training.precision import Precision
from speakerlab.training.progress import LearningWatch
from speakerlab.training.run_state import RunState
from speakerlab.training.schedules import Schedule
from speakerlab.training.task import MicroBatch, Task, TaskOutput
from speakerlab.training.update import MetricSums, Updater
from speakerlab.training.writer import CheckpointWriter

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, world_size=1, local_size=1, device=CPU)
NUM_CLASSES = 3
NUM_SAMPLES = 6
# of a micro-batch
ROWS = 4


class NoAugmentation(nn.Module):
    """Returns the waves of a batch as they are."""

    def forward(self, batch: Batch) -> Tensor:
        return batch.wave_BS.float() / 32768

    def take_silent(self) -> Tensor:
        return torch.zeros(())


class ToyTask(Task):
    """A linear layer and a BatchNorm under a linear head; the margin lowers the true logit."""

    def __init__(self) -> None:
        embedder = nn.Sequential(
            nn.Linear(NUM_SAMPLES, 5),
            nn.BatchNorm1d(5),
        )
        embedder.compiled = ()  # as `Embedder` has it without torch.compile
        super().__init__(
            augment=NoAugmentation(),
            embedder=embedder,
            precision=Precision("fp32", "cpu", "tested"),
        )
        self.head = nn.Linear(5, NUM_CLASSES)
        # a random number of each forward pass
        self.draws: list[float] = []

    def forward(
        self,
        x_B: Tensor,
        label_B: Tensor,
        margin: float,
        *,
        batch: Batch | None = None,
        frozen: bool = False,
    ) -> TaskOutput:
        self.draws.append(float(torch.rand(())))
        logits_BC = self.head(self.embedder(x_B))
        is_label_BC = nn.functional.one_hot(label_B, NUM_CLASSES).bool()
        with_margin_BC = logits_BC - margin * is_label_BC
        loss = nn.functional.cross_entropy(with_margin_BC, label_B)
        is_correct_B = logits_BC.argmax(dim=1) == label_B
        num_correct = is_correct_B.sum()
        return TaskOutput(loss, num_correct)

    def drop_gradients(self, *, frozen: bool) -> None:
        if frozen:
            self.embedder.zero_grad(set_to_none=True)


def make_batch(number: int) -> Batch:
    """Return the micro-batch of a number."""
    generator = np.random.default_rng(number)
    crops = []
    for row in range(ROWS):
        samples = generator.integers(-9999, 9999, NUM_SAMPLES)
        crop = Crop(
            wave_S=samples.astype(np.int16),
            feats_TF=None,
            first=0,
            label=row % NUM_CLASSES,
            position=row,
            row=row,
            draws={},
        )
        crops.append(crop)
    return collate(crops)


def micro_batches(first: int = 0) -> Iterator[MicroBatch]:
    """Yield micro-batches from a number on, without end."""
    augment = NoAugmentation()
    number = first
    while True:
        batch = make_batch(number)
        yield MicroBatch(augment(batch), augment.take_silent(), batch)
        number += 1


class ToySource:
    """Micro-batches by their number; `reads` notes where reading began."""

    def __init__(self, accumulation: int) -> None:
        self.accumulation = accumulation
        # step, attempt
        self.reads: list[tuple[int, int]] = []

    def read_from(self, step: int, attempt: int) -> Iterator[Batch]:
        self.reads.append((step, attempt))
        number = 1000 * attempt + step * self.accumulation
        while True:
            yield make_batch(number)
            number += 1


def make_schedule(**changes: object) -> Schedule:
    """Return a schedule of eight steps that validates and saves every four."""
    values: dict = {
        "lr_at": lambda step: 0.1 / (step + 1),
        "margin_at": lambda step: 0.1 * step,
        "total_steps": 8,
        "steps_per_epoch": 4,
        "valid_every_steps": 4,
        "checkpoint_every_steps": 4,
        "checkpoint_seconds": math.inf,
        "log_every_steps": 2,
    }
    return Schedule(**(values | changes))


def make_state(folder: Path, *, seed: int = 0, stop: bool = False) -> RunState:
    """Return the state of a toy training at step 0; stop: if it does not learn."""
    torch.manual_seed(seed)
    task = ToyTask()
    updater = Updater(
        task,
        sgd(task.parameters(), lr=0.1),
        device=CPU,
        clip_norm=50.0,
        scale_loss=False,
    )
    return RunState(
        task=task,
        updater=updater,
        sums=MetricSums(ALONE),
        learning=LearningWatch(
            num_classes=NUM_CLASSES,
            warmup_steps=0,
            stop=stop,
        ),
        ranks=ALONE,
        writer=CheckpointWriter(folder, keep=3),
    )
