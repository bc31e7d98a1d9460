"""Training with a teacher: a student learns to embed like a model that is already trained.

The teacher is no part of the task, which a checkpoint holds and DDP wraps: its embeddings arrive
with the batch, as targets. The loader reads them from a table, or `Inputs` asks the teacher.

Letters: B rows, S samples, T frames, C channels of the teacher's frames, D dimensions of its
embeddings.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from speakerlab.core.batch import Batch
from speakerlab.training.precision import Precision
from speakerlab.training.schedules import Schedule
from speakerlab.training.task import Augment, Task, TaskOutput


class Heard(NamedTuple):
    """Output of a teacher for a batch of crops."""

    emb_BD: Tensor  # float32
    frames_BCT: Tensor | None  # float32; None unless the student learns frames


class Teacher(Protocol):
    """Hears crops on the device of the training."""

    def __call__(self, wave_BS: Tensor) -> Heard:
        """Return embeddings, and frames, of waves in [-1, 1]."""
        ...


class CropTargets:
    """Targets of a batch: the outputs of the teacher for its crops.

    hears_clean: the teacher hears the crops in the voices that were drawn, but without room, noise
    and channel; otherwise it hears what the student hears. views: number of consecutive rows of a
    batch that are augmentations of the same crop.
    """

    def __init__(
        self,
        teacher: Teacher,
        augment: Augment,
        *,
        hears_clean: bool,
        views: int = 1,
    ) -> None:
        self.teacher = teacher
        self.augment = augment
        self.hears_clean = hears_clean
        self.views = views

    @torch.no_grad()
    def __call__(self, batch: Batch, wave_BS: Tensor) -> Batch:
        """Return the batch with its targets; wave_BS: the crops that the student hears."""
        heard_BS = self.augment.voices(batch) if self.hears_clean else wave_BS
        # All views of a crop are in the same voice: the teacher hears only the first view.
        with record_function("step/teacher"):
            heard = self.teacher(heard_BS[:: self.views])
        target_BD = heard.emb_BD.repeat_interleave(self.views, dim=0)
        target_BCT = heard.frames_BCT
        if target_BCT is not None:
            target_BCT = target_BCT.repeat_interleave(self.views, dim=0)
        return batch._replace(target_BD=target_BD, target_BCT=target_BCT)


class DistillationTask(Task):
    """A student, its distances from the targets and, with labels, an ordinary head.

    distance: of the embeddings. frame_distance: of the frames; None: frames are not learned. Both
    are in losses/distillation.py. head: see `losses/__init__.py`; None: labels are not used.
    frame_weight, label_weight: weights of the losses of frame_distance and head.
    """

    def __init__(
        self,
        *,
        augment: Augment,
        embedder: nn.Module,
        distance: Any,
        frame_distance: Any,
        frame_weight: float,
        head: Any,
        label_weight: float,
        precision: Precision,
    ) -> None:
        super().__init__(augment=augment, embedder=embedder, precision=precision)
        self.distance = distance
        self.frame_distance = frame_distance
        self.frame_weight = frame_weight
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
        target_BD, target_BCT = self._targets(batch, x_B)
        mask_features = self.masking_of(batch)
        noting_frames: Any = nullcontext()
        if self.frame_distance is not None:
            embedder: Any = self.embedder
            noting_frames = embedder.noting_frames()
        with (
            self.autocast,
            record_function("step/forward/embedder"),
            noting_frames as noted,
        ):
            emb_BE: Tensor = self.embedder(x_B, mask_features)
        with record_function("step/forward/head"):
            loss, accuracy = self.distance(emb_BE, target_BD)
            if self.frame_distance is not None:
                assert target_BCT is not None
                # Its layer is large, and computes in the precision of the student's layers.
                with self.autocast:
                    frame_loss = self.frame_distance(noted.take(), target_BCT)
                loss = loss + self.frame_weight * frame_loss
            if self.head is not None:
                label_loss, _ = self.head(emb_BE, label_B, margin)
                loss = loss + self.label_weight * label_loss
        # The sums of a step count rows, so the mean becomes a sum over the rows of the batch.
        num_correct = accuracy * len(x_B)
        return TaskOutput(loss, num_correct)

    def _targets(
        self, batch: Batch | None, x_B: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the targets of a batch, embeddings and frames; without a batch, zeros."""
        if batch is not None:
            assert batch.target_BD is not None
            return batch.target_BD, batch.target_BCT
        num_crops = len(x_B)
        zeros_BD = x_B.new_zeros((num_crops, self.distance.target_dim))
        if self.frame_distance is None:
            return zeros_BD, None
        num_channels = len(self.frame_distance.mean_C)
        zeros_BCT = x_B.new_zeros((num_crops, num_channels, 1))
        return zeros_BD, zeros_BCT
