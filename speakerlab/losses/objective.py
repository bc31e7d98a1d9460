"""The base class of the self-supervised objectives, and SimCLR.

In: embeddings of several views of each utterance. Out: a loss that needs no labels.
Letters: V views of an utterance that the student sees, L long ones that the teacher sees, B
utterances of a rank, G of all ranks, W ranks, D embedding, N rows, K outputs of a projector or
prototypes.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import autocast_off, widened
from speakerlab.losses.shards import Shards


class Compared(NamedTuple):
    """Outcome of a micro-batch."""

    loss: Tensor  # scalar, fp32
    # Scalar: share of views for which the student chooses the same entry as its target.
    accuracy: Tensor
    # The largest entry of each target; None for an objective without prototypes.
    target_N: Tensor | None


class Objective(nn.Module):
    """Base class: its methods are the interface of an objective, their bodies the defaults.

    shards: all ranks, for objectives that compare the utterances of a whole batch.
    """

    has_teacher = True  # without a teacher, the student itself is published
    sees_long = True  # whether the student, too, sees the long views; they come first
    needs_whole_batch = False  # whether gradients may not be accumulated
    num_prototypes = 0  # outputs to choose from, 0 if there are none
    # Transforms emb_ND before the comparison; a teacher has a copy, a moving average of this one.
    projector: nn.Module
    shards: Shards | None

    @staticmethod
    def check_views(num_long: int, num_short: int) -> None:
        """Raise ValueError unless the objective can be computed for so many views."""
        raise NotImplementedError

    def begin_step(self, epoch: float) -> None:
        """Prepare for a step; epoch: number of epochs completed, with a fraction."""

    def drop_gradients(self) -> None:
        """Remove gradients of parameters that do not learn in this step, before the update."""

    def end_step(self, is_bad: Tensor) -> None:
        """Update statistics that have no gradient; is_bad: 1.0 for a skipped step, else 0.0."""

    def forward(
        self,
        emb_VBD: Tensor,
        emb_LBD: Tensor | None,
        teacher_projector: nn.Module | None,
    ) -> Compared:
        """Compare the student's embeddings with each other or with the teacher's.

        emb_LBD, teacher_projector: embeddings and projector of the teacher; None without a teacher.
        """
        raise NotImplementedError


class SimCLR(Objective):
    """Contrastive loss: each view must find the other one of its utterance in the batch.

    Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020,
    arXiv 2002.05709; for speakers, with these defaults, WeSpeaker's voxceleb/v3/simclr.
    hidden_dim: hidden width of a projector of two layers; 0 compares the embeddings themselves.
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
        self.shards = shards
        self.temperature = temperature
        # With a single width, `mlp` returns the identity.
        widths = [embed_dim]
        if hidden_dim:
            widths = [embed_dim, hidden_dim, embed_dim]
        self.projector = mlp(widths, batch_norm=False)

    @staticmethod
    def check_views(num_long: int, num_short: int) -> None:
        if (num_long, num_short) != (2, 0):
            raise ValueError(
                f"views: simclr compares 2 long views and no short ones, not {num_long}"
                f" and {num_short}; set views.long=2 views.short=0"
            )

    def forward(
        self,
        emb_VBD: Tensor,
        emb_LBD: Tensor | None,
        teacher_projector: nn.Module | None,
    ) -> Compared:
        del emb_LBD, teacher_projector
        with autocast_off(emb_VBD):
            out_2BD = of_views(self.projector, widened(emb_VBD))
            out_2GD = gather_utterances(out_2BD, self.shards)
            loss, accuracy = contrast(out_2GD, temperature=self.temperature)
            return Compared(loss=loss, accuracy=accuracy, target_N=None)


def contrast(out_2GD: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return SimCLR's loss (NT-Xent, eq. 1) of two views, and the share of correct matches.

    A view is compared by cosine with the other one of its utterance and with both views of all
    other utterances.
    """
    out_ND = out_2GD.flatten(0, 1)
    unit_ND = F.normalize(out_ND, dim=1)
    logits_NN = unit_ND @ unit_ND.T / temperature

    # A view must not find itself: its cosine with itself is always the largest.
    num_rows = len(unit_ND)
    device = logits_NN.device
    is_same_NN = torch.eye(num_rows, dtype=torch.bool, device=device)
    logits_NN = logits_NN.masked_fill(is_same_NN, -torch.inf)

    # All first views come before all second views, so partners are half of the rows apart.
    number_N = torch.arange(num_rows, device=device)
    partner_N = number_N.roll(num_rows // 2)
    loss = F.cross_entropy(logits_NN, partner_N)

    is_correct_N = logits_NN.argmax(1) == partner_N
    accuracy = is_correct_N.to(loss.dtype).mean()
    return loss, accuracy


def gather_utterances(x_VBD: Tensor, shards: Shards | None) -> Tensor:
    """Return x_VGD, the utterances of all ranks in order; x_VBD of this rank gets a gradient.

    Every rank computes the same loss over all utterances. The gradient of x_VBD is multiplied by W,
    because DistributedDataParallel divides the sum over W ranks by W.
    """
    if shards is None or shards.world_size == 1:
        return x_VBD
    # `gather` joins along the first axis, so the utterances must come first.
    x_BVD = x_VBD.transpose(0, 1)
    values_BVD = x_BVD.detach().contiguous()
    x_GVD = shards.gather(values_BVD)
    x_of_ranks = list(x_GVD.chunk(shards.world_size))

    # The collective has no gradient: put this rank's tensor, which has one, in its place.
    x_BVD = x_BVD * 1  # another tensor, whose gradient can be scaled
    if x_BVD.requires_grad:
        x_BVD.register_hook(lambda grad: grad * shards.world_size)
    x_of_ranks[shards.rank] = x_BVD
    x_GVD = torch.cat(x_of_ranks)
    return x_GVD.transpose(0, 1)


def of_views(module: nn.Module, x_VBD: Tensor) -> Tensor:
    """Return a module's output, computed for the rows of all views at once."""
    # In this way, a BatchNorm has the statistics of all views, not of each view.
    x_ND = x_VBD.flatten(0, 1)
    out_ND = module(x_ND)
    view_shape = x_VBD.shape[:2]  # (V, B)
    return out_ND.unflatten(0, view_shape)


def mlp(widths: list[int], *, batch_norm: bool) -> nn.Sequential:
    """Return affine layers of these widths, with (BatchNorm and) GELU between them.

    Weights are drawn with the deviation of DINO's, 0.02; biases are 0 at first.
    """
    layers = nn.Sequential()
    layer_widths = list(zip(widths, widths[1:]))
    for number, (in_dim, out_dim) in enumerate(layer_widths, start=1):
        affine = nn.Linear(in_dim, out_dim)
        # DINO truncates at 100 deviations, which is nowhere. torch's `trunc_normal_` sets some
        # weights to that bound in older versions; in newer ones, it needs tensors with data.
        nn.init.normal_(affine.weight, std=0.02)
        nn.init.zeros_(affine.bias)
        layers.append(affine)

        is_last = number == len(layer_widths)
        if is_last:
            continue
        if batch_norm:
            layers.append(nn.BatchNorm1d(out_dim))
        layers.append(nn.GELU())
    return layers
