"""The base class of the self-supervised objectives, and SimCLR.

In: embeddings of several views of each utterance. Out: a loss that needs no labels.
Letters: V views of an utterance that the student sees, L long ones that the teacher sees, B
utterances of a rank, G of all ranks, D embedding, N rows, K outputs of a projector or prototypes.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import fp32_island, widened
from speakerlab.losses.shards import Shards


class Compared(NamedTuple):
    """Outcome of a micro-batch."""

    loss: Tensor  # scalar, fp32
    accuracy: Tensor  # scalar, share of the views for which the student decides as its target
    target_N: Tensor | None  # the largest entry of each target; None without prototypes


class Objective(nn.Module):
    """Base class: its methods are the interface of an objective, their bodies the defaults.

    shards: all ranks, for objectives that compare the utterances of a whole batch.
    """

    has_teacher = True  # else `targets` are not given, and the student itself is published
    sees_long = True  # whether the student, too, sees the long views; they come first
    needs_whole_batch = False  # whether a batch may not be accumulated
    num_prototypes = 0  # outputs to choose from, 0 if there are none
    projector: nn.Module  # emb_ND -> what is compared; a teacher has a copy that follows this one
    shards: Shards | None

    @staticmethod
    def check_views(num_long: int, num_short: int) -> None:
        """Raise ValueError unless the objective can be computed for so many views."""
        raise NotImplementedError

    def begin_step(self, epoch: float) -> None:
        """Prepare for a step; epoch: those completed, a function of the step."""

    def drop_gradients(self) -> None:
        """Remove the gradients of what does not learn in this step, before the update."""

    def end_step(self, is_bad: Tensor) -> None:
        """Update what no gradient updates, unless the step was bad: 1.0, else 0.0."""

    def forward(
        self, emb_VBD: Tensor, emb_LBD: Tensor | None, teacher: nn.Module | None
    ) -> Compared:
        """Compare the student's embeddings with each other or with the teacher's.

        teacher: the teacher's projector.
        """
        raise NotImplementedError


class SimCLR(Objective):
    """Contrastive loss: each view must find the other one of its utterance in the batch.

    Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020,
    arXiv 2002.05709; for speakers, with these defaults, WeSpeaker's voxceleb/v3/simclr.
    hidden_dim: of a projector of two layers; 0 compares the embeddings themselves.
    """

    has_teacher = False
    needs_whole_batch = True

    def __init__(
        self,
        *,
        embed_dim: int,
        shards: Shards | None = None,
        temperature: float = 0.07,
        hidden_dim: int = 0,
    ) -> None:
        super().__init__()
        self.shards, self.temperature = shards, temperature
        widths = [embed_dim, hidden_dim, embed_dim] if hidden_dim else [embed_dim]
        self.projector = mlp(widths, batch_norm=False)

    @staticmethod
    def check_views(num_long: int, num_short: int) -> None:
        if (num_long, num_short) != (2, 0):
            raise ValueError(
                f"views: simclr compares 2 long views and no short ones, not {num_long} and "
                f"{num_short}; set views.long=2 views.short=0"
            )

    def forward(
        self, emb_VBD: Tensor, emb_LBD: Tensor | None, teacher: nn.Module | None
    ) -> Compared:
        del emb_LBD, teacher
        with fp32_island(emb_VBD):
            out_2BD = of_views(self.projector, widened(emb_VBD))
            out_2GD = gather_utterances(out_2BD, self.shards)
            return Compared(*contrast(out_2GD, temperature=self.temperature), None)


def contrast(out_2GD: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return SimCLR's loss (NT-Xent, eq. 1) of two views, and the share of views that find theirs.

    A view is compared by cosine with the other one of its utterance and with both views of all
    other utterances.
    """
    unit_ND = F.normalize(out_2GD.flatten(0, 1), dim=1)
    logits_NN = unit_ND @ unit_ND.T / temperature
    num = len(unit_ND)
    logits_NN = logits_NN.masked_fill(
        torch.eye(num, dtype=torch.bool, device=logits_NN.device), -torch.inf
    )
    other_N = torch.arange(num, device=logits_NN.device).roll(num // 2)
    accuracy = (logits_NN.argmax(1) == other_N).to(logits_NN.dtype).mean()
    return F.cross_entropy(logits_NN, other_N), accuracy


def gather_utterances(x_VBD: Tensor, shards: Shards | None) -> Tensor:
    """Return x_VGD, the utterances of all ranks in order; the gradient of own ones comes back.

    Every rank computes the same loss of all of them. Its own gradient is taken W times, because
    DistributedDataParallel divides the sum over W ranks by W.
    """
    if shards is None or shards.world_size == 1:
        return x_VBD
    own_BVD = x_VBD.transpose(0, 1)
    parts = list(shards.gather(own_BVD.detach().contiguous()).chunk(shards.world_size))
    own_BVD = own_BVD * 1  # another tensor, whose gradient can be scaled
    if own_BVD.requires_grad:
        own_BVD.register_hook(lambda grad: grad * shards.world_size)
    parts[shards.rank] = own_BVD
    return torch.cat(parts).transpose(0, 1)


def of_views(module: nn.Module, x_VBD: Tensor) -> Tensor:
    """Return a module's output of all rows at once, split into views again."""
    return module(x_VBD.flatten(0, 1)).unflatten(0, x_VBD.shape[:2])


def mlp(widths: list[int], *, batch_norm: bool) -> nn.Sequential:
    """Return affine layers of these widths, with (BatchNorm and) GELU between them.

    Weights are drawn as in DINO: truncated normal, deviation 0.02, no bias at first.
    """
    layers = nn.Sequential()
    for index, (before, after) in enumerate(zip(widths, widths[1:])):
        affine = nn.Linear(before, after)
        nn.init.trunc_normal_(affine.weight, std=0.02)
        nn.init.zeros_(affine.bias)
        layers.append(affine)
        if index < len(widths) - 2:
            layers.extend([nn.BatchNorm1d(after)] if batch_norm else [])
            layers.append(nn.GELU())
    return layers
