"""Losses of distillation: a student's embeddings beside those of its teacher, without labels.

In: embeddings of the same crops by student and teacher. Out: scalars; smaller is more alike.
Only directions are compared, without the parts that all embeddings of the teacher have in common
(core/directions.py), which the last BatchNorm of many students could not learn.

Letters: B crops of a rank, G crops of all ranks, N utterances, K common directions, D dimensions
of the teacher, E of the student, T frames, S channels of a frame of the student, C of the teacher.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.directions import NUM_COMMON, direction_without
from speakerlab.core.full_precision import autocast_off, widened
from speakerlab.losses.objective import gather_utterances
from speakerlab.losses.shards import Shards


def cosine(student_GD: Tensor, teacher_GD: Tensor, *, temperature: float) -> Tensor:
    """Return 1 minus the mean cosine of each crop with its own target.

    Wang et al., Knowledge Distillation for Small Foot-print Deep Speaker Embedding, ICASSP 2019,
    doi 10.1109/ICASSP.2019.8683443, eq. 6. In: vectors of length 1.
    """
    del temperature
    cosine_G = (student_GD * teacher_GD).sum(dim=1)
    return 1 - cosine_G.mean()


def relations(student_GD: Tensor, teacher_GD: Tensor, *, temperature: float) -> Tensor:
    """Return the mean squared difference of the two matrices of cosines between crops.

    Tung and Mori, Similarity-Preserving Knowledge Distillation, ICCV 2019, arXiv 1907.09682, eq. 4,
    with cosines in place of products whose rows are normalised. In: vectors of length 1.
    """
    del temperature
    student_GG = student_GD @ student_GD.T
    teacher_GG = teacher_GD @ teacher_GD.T
    return (student_GG - teacher_GG).square().mean()


def contrast(student_GD: Tensor, teacher_GD: Tensor, *, temperature: float) -> Tensor:
    """Return the cross-entropy of two distributions over all targets, teacher's and student's.

    Each is the softmax of an embedding's cosines with the targets of the batch, divided by the
    temperature. Fang et al., SEED: Self-supervised Distillation for Visual Representation, ICLR
    2021, arXiv 2101.04731, eq. 5, with the batch as the queue. In: vectors of length 1.
    """
    student_logits_GG = student_GD @ teacher_GD.T / temperature
    teacher_logits_GG = teacher_GD @ teacher_GD.T / temperature
    teacher_share_GG = teacher_logits_GG.softmax(dim=1)
    return F.cross_entropy(student_logits_GG, teacher_share_GG)


DistillationLoss = Callable[..., Tensor]
# Each takes unit vectors of student and teacher, and the temperature, which only `contrast` uses.
DISTILLATION_LOSSES: Mapping[str, DistillationLoss] = {
    "cosine": cosine,
    "relations": relations,
    "contrast": contrast,
}
# Losses that compare each crop with its own target alone, so a batch may be divided.
SINGLE_CROP_LOSSES = frozenset({"cosine"})


class Distillation(nn.Module):
    """Weighted sum of distillation losses.

    embed_dim: dimensions of the student. target_dim: dimensions of the teacher, or of all teachers
    together. weights: name in `DISTILLATION_LOSSES` -> weight; losses of weight 0 are not computed.
    is_projected: whether a linear layer, which is not published, maps the student to the teacher's
    dimensions. shards: the ranks whose crops are compared.
    """

    common_KD: Tensor

    def __init__(
        self,
        *,
        embed_dim: int,
        target_dim: int,
        weights: Mapping[str, float],
        temperature: float,
        is_projected: bool,
        shards: Shards | None = None,
    ) -> None:
        super().__init__()
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.temperature = temperature
        self.shards = shards
        self.target_dim = target_dim
        # The directions that all embeddings of the teacher have in common.
        self.register_buffer("common_KD", torch.zeros(NUM_COMMON, target_dim))
        # Without a bias, like a projection that is published.
        self.projection: nn.Module = nn.Identity()
        if is_projected:
            self.projection = nn.Linear(embed_dim, target_dim, bias=False)

    @torch.inference_mode()
    def project(self, emb_NE: np.ndarray) -> np.ndarray:
        """Return the student's directions as vectors of length 1, as in training."""
        emb = torch.from_numpy(emb_NE).to(self.common_KD.device)
        return self._student_directions(emb).cpu().numpy()

    @torch.inference_mode()
    def targets_of(self, target_ND: np.ndarray) -> np.ndarray:
        """Return the teacher's directions as vectors of length 1, as in training."""
        target = torch.from_numpy(target_ND).to(self.common_KD.device)
        return self._teacher_directions(target).cpu().numpy()

    def _student_directions(self, emb_BE: Tensor) -> Tensor:
        projected_BD = self.projection(widened(emb_BE))
        return direction_without(projected_BD, self.common_KD)

    def _teacher_directions(self, target_BD: Tensor) -> Tensor:
        return direction_without(widened(target_BD), self.common_KD)

    def forward(self, emb_BE: Tensor, target_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, fp32, and the share of crops whose nearest target is their own."""
        with autocast_off(emb_BE):
            student_BD = self._student_directions(emb_BE)
            teacher_BD = self._teacher_directions(target_BD)
            # `gather_utterances` expects an axis of views in front; here it has length 1.
            student_GD = gather_utterances(student_BD[None], self.shards)[0]
            teacher_GD = gather_utterances(teacher_BD[None], self.shards)[0]
            loss = student_GD.new_zeros(())
            for name, weight in self.weights.items():
                compare = DISTILLATION_LOSSES[name]
                value = compare(student_GD, teacher_GD, temperature=self.temperature)
                loss = loss + weight * value

            with torch.no_grad():
                nearest_G = (student_GD @ teacher_GD.T).argmax(dim=1)
                number_G = torch.arange(len(nearest_G), device=nearest_G.device)
                accuracy = (nearest_G == number_G).to(loss.dtype).mean()
            return loss, accuracy


class FrameDistance(nn.Module):
    """Distance of a student's frames from its teacher's, which are in standard units per channel.

    Romero et al., FitNets: Hints for Thin Deep Nets, ICLR 2015, arXiv 1412.6550, eq. 3: a layer
    that is not published maps the student's frames to the teacher's channels, and the mean squared
    difference is the loss. In this way, a crop has many targets, and not only one vector.
    """

    mean_C: Tensor
    deviation_C: Tensor

    def __init__(self, *, student_channels: int, teacher_channels: int) -> None:
        super().__init__()
        self.to_teacher = nn.Conv1d(student_channels, teacher_channels, kernel_size=1)
        self.register_buffer("mean_C", torch.zeros(teacher_channels))
        self.register_buffer("deviation_C", torch.ones(teacher_channels))

    def forward(self, student_BST: Tensor, teacher_BCT: Tensor) -> Tensor:
        """Return the mean squared difference, fp32; the number of frames may differ.

        The layer computes in the precision of the caller, like the layers of the student.
        """
        mapped_BCT = self.to_teacher(student_BST)
        with autocast_off(mapped_BCT):
            mapped_BCT = widened(mapped_BCT)
            target_BCT = widened(teacher_BCT) - self.mean_C[:, None]
            target_BCT = target_BCT / self.deviation_C[:, None]
            num_frames = mapped_BCT.shape[2]
            if target_BCT.shape[2] != num_frames:
                target_BCT = F.interpolate(target_BCT, size=num_frames, mode="linear")
            return F.mse_loss(mapped_BCT, target_BCT)


def compares_crops(weights: Mapping[str, float]) -> bool:
    """Return whether a loss compares crops with each other, so that no batch may be divided."""
    used = {name for name, weight in weights.items() if weight}
    return not used <= SINGLE_CROP_LOSSES
