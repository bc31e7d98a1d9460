"""Training with a teacher: a student learns to embed like a model that is already trained.

The teacher is no part of the task, which a checkpoint holds and DDP wraps: its embeddings arrive
with the batch, as targets. The loader reads them from a table, or `Inputs` asks the teacher.

Letters: B rows, C crops of which a batch has views, S samples, T frames, F mel bins, D dimensions
of the teacher.
"""

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from speakerlab.core.batch import Batch
from speakerlab.training.precision import Precision
from speakerlab.training.schedules import Schedule
from speakerlab.training.task import Task, TaskOutput


class Teacher(Protocol):
    """Embeds crops on the device of the training."""

    def __call__(self, wave_BS: Tensor) -> Tensor:
        """Return emb_BD, float32, of waves in [-1, 1]."""
        ...


class CropTargets:
    """The teacher's embeddings of the crops of a batch.

    augment: as of the task. hears_clean: the teacher hears crops in the voice that was drawn, but
    without room, noise and channel; else it hears what the student hears. views: so many rows of a
    batch, one after the other, are augmentations of one crop.
    """

    def __init__(
        self,
        teacher: Teacher,
        augment: Any,
        *,
        hears_clean: bool,
        views: int = 1,
    ) -> None:
        self.teacher = teacher
        self.augment = augment
        self.hears_clean = hears_clean
        self.views = views

    @torch.no_grad()
    def __call__(self, batch: Batch, wave_BS: Tensor) -> Tensor:
        """Return target_BD; wave_BS: the crops that the student hears."""
        heard_BS = self.augment.voices(batch) if self.hears_clean else wave_BS
        # All views of a crop are in the same voice: the teacher hears the first.
        with record_function("step/teacher"):
            target_CD = self.teacher(heard_BS[:: self.views])
        return target_CD.repeat_interleave(self.views, dim=0)


class DistillationTask(Task):
    """A student, its distance from the targets and, with labels, an ordinary head.

    augment: has a method `features`, which masks features (SpecAugment). distance: see
    losses/distillation.py. head: see `losses/__init__.py`; None: labels are not used. label_weight:
    weight of the head's loss.
    """

    def __init__(
        self,
        *,
        augment: Any,
        embedder: nn.Module,
        distance: Any,
        head: Any,
        label_weight: float,
        precision: Precision,
    ) -> None:
        super().__init__(augment=augment, embedder=embedder, precision=precision)
        self.distance = distance
        self.head = head
        self.label_weight = label_weight

    def begin_step(self, step: int, schedule: Schedule, key: int) -> None:
        if self.head is not None:
            self.head.begin_step(key)

    def forward(
        self,
        x_B: Tensor,
        label_B: Tensor,
        margin: float,
        *,
        batch: Batch | None = None,
        frozen: bool = False,
    ) -> TaskOutput:
        """Return the loss of augmented waves (B, S).

        batch: with the targets, and the draws of SpecAugment; None: a pass whose loss does not
        matter. The accuracy is the share of crops whose nearest target in the batch is their own.
        """
        del frozen  # refused by the configuration
        num_crops = len(x_B)
        target_BD = x_B.new_zeros((num_crops, self.distance.target_dim))
        mask_features = None
        if batch is not None:
            assert batch.target_BD is not None
            target_BD = batch.target_BD
            mask_features = partial(self.augment.features, batch=batch)
        with self.autocast, record_function("step/forward/embedder"):
            emb_BE: Tensor = self.embedder(x_B, mask_features)
        with record_function("step/forward/head"):
            loss, accuracy = self.distance(emb_BE, target_BD)
            if self.head is not None:
                label_loss, _ = self.head(emb_BE, label_B, margin)
                loss = loss + self.label_weight * label_loss
        # The sums of a step count rows, so the mean becomes a sum over the rows of the batch.
        num_correct = accuracy * num_crops
        return TaskOutput(loss, num_correct)
