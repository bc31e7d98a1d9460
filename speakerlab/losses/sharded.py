"""A head for very many classes, whose rows are split over the ranks.

In: emb_BD and label_B of this rank. Out: the mean loss over the rows of all ranks, the same on
each, and which of this rank's rows were classified correctly.

Every rank compares the embeddings of all ranks with its own classes, in one matrix of similarities
(S, G). From the others the softmax needs only, for each embedding, the largest logit, the sum of
exponentials and the logit of the target.

Letters: B rows of a rank, C classes of a rank, D embedding, G rows of all ranks, S classes of this
rank that may take part.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from speakerlab.core.full_precision import fp32_island
from speakerlab.losses import HEADS
from speakerlab.losses.head import Head, SoftmaxHead
from speakerlab.losses.shards import Shards, blocks_of, draw_rows, take_part

SPLITTABLE = tuple(name for name, head in HEADS.items() if issubclass(head, SoftmaxHead))


class ShardedHead(Head):
    """A softmax head of which this rank has the rows `row_range`.

    Its parameters have the names and initial values of the whole head's. Losses and gradients are
    those of the whole head (An et al., Partial FC: Training 10 Million Identities on a
    Single Machine, ICCVW 2021, arXiv 2010.05222; Killing Two Birds with One Stone, CVPR 2022, arXiv
    2203.15565), if the parameters are left out of DistributedDataParallel:

    - the loss is the mean over the G rows of all ranks, and the gradient of a row is that of this
      loss, complete without a reduction;
    - the gradient that goes back into emb_BD is W times that of this loss, because DDP divides the
      sum over W ranks by W.

    With `sampled_share` below 1, a class takes part in a step if it is drawn by the step's key (see
    `take_part`) or is the label of a row of any rank; the softmax and `count_correct` are over
    these, without a correction for the others. The gradient of other rows is zero, not missing:
    momentum and weight decay continue for them.
    """

    is_split = True
    bias_C: nn.Parameter | None

    def __init__(
        self, make: Callable[[], nn.Module], *, shards: Shards, sampled_share: float = 1.0
    ) -> None:
        """Draw this rank's rows from torch's generator, seeded as for the whole head.

        make: builds the whole head; called on the meta device, where it takes no memory.
        """
        super().__init__()
        with torch.device("meta"):
            whole = make()
        assert isinstance(whole, SoftmaxHead), "one of SPLITTABLE"
        self.num_classes, embed_dim = whole.weight_CD.shape
        self.shards, self.sampled_share, self.key = shards, sampled_share, 0
        self.takes_margin, self.scale = whole.takes_margin, whole.scale
        self.prepare, self.harden = whole.prepare, whole.harden
        weight_CD = draw_rows(self.row_range, num_classes=self.num_classes, embed_dim=embed_dim)
        self.weight_CD = nn.Parameter(weight_CD)
        bias_C = None if whole.bias_C is None else nn.Parameter(torch.zeros(len(weight_CD)))
        self.register_parameter("bias_C", bias_C)

    @property
    def row_range(self) -> tuple[int, int]:
        return self._rows_of(self.shards.rank)

    def _rows_of(self, rank: int) -> tuple[int, int]:
        """Return the first row of a rank and the one after its last."""
        each = math.ceil(self.num_classes / self.shards.world_size)
        return min(rank * each, self.num_classes), min((rank + 1) * each, self.num_classes)

    def begin_step(self, key: int) -> None:
        """Draw the classes of a step by `key`, the same on every rank."""
        self.key = key

    def forward(
        self, emb_BD: Tensor, label_B: Tensor, margin: float | Tensor = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss over all ranks' rows, and whether this rank's are correct, (B,)."""
        with fp32_island(emb_BD):
            emb_GD: Any = _Gathered.apply(self.prepare(emb_BD), self.shards)
            problem = self._problem(self.shards.gather(label_B), margin)
            outputs: Any = _Softmax.apply(emb_GD, self.weight_CD, self.bias_C, problem)
        loss, right_G = outputs
        return loss, right_G.chunk(self.shards.world_size)[self.shards.rank]

    def _problem(self, label_G: Tensor, margin: float | Tensor) -> "_Problem":
        """Find the classes of this rank that take part, and the targets among them.

        The host does not know how many are drawn: S is a number that they do not exceed.
        """
        first, last = self.row_range
        target_G, num_own, share = label_G - first, last - first, self.sampled_share
        if share == 1:
            return _Problem(self, None, num_own, target_G, margin)
        is_own_G = (target_G >= 0) & (target_G < num_own)
        target_G = target_G.where(is_own_G, num_own)
        drawn_C = take_part((first, last), key=self.key, share=share, device=label_G.device)
        # One more stands for the targets of other ranks.
        takes_part_C = F.pad(drawn_C, (0, 1)).scatter_(0, target_G, True)
        place_G = (takes_part_C.cumsum(0)[target_G] - 1).where(is_own_G, -1)
        order_C = takes_part_C[:-1].logical_not().argsort(stable=True)
        row_S = order_C[: self._most_drawn(len(label_G))]
        is_left_out_S1 = takes_part_C[row_S].logical_not().unsqueeze(1)
        return _Problem(self, row_S, len(row_S), place_G, margin, is_left_out_S1)

    def _most_drawn(self, num_targets: int) -> int:
        """Return how many rows take part at most: eight standard deviations above the mean."""
        first, last = self.row_range
        mean = (last - first) * self.sampled_share
        most = mean + 8 * math.sqrt(mean * (1 - self.sampled_share))  # exceeded once in 1e15 draws
        return min(last - first, math.ceil(most) + num_targets)

    def count_correct(self, decided: Tensor, label_B: Tensor) -> Tensor:
        return decided.sum()

    @torch.no_grad()
    def gather_rows(self, own: Tensor) -> Tensor | None:
        """Return the rows of all ranks on rank 0, on the CPU; None on other ranks.

        They are gathered in blocks, of which W are held at a time.
        """
        world_size, whole = self.shards.world_size, None
        if self.shards.rank == 0:
            whole = torch.empty(self.num_classes, *own.shape[1:], dtype=own.dtype)
        spans = [self._rows_of(rank) for rank in range(world_size)]
        for start, stop in blocks_of(spans[0][1]):
            padded = own.new_zeros(stop - start, *own.shape[1:])
            part = own[start:stop]
            padded[: len(part)] = part
            blocks = self.shards.gather(padded).chunk(world_size)
            for (first, last), block in zip(spans, blocks):
                num_rows = min(last - first, stop) - start
                if whole is not None and num_rows > 0:
                    whole[first + start : first + start + num_rows] = block[:num_rows]
        return whole


@dataclass(frozen=True)
class _Problem:
    """What a softmax over shards needs besides its tensors."""

    head: ShardedHead
    row_S: Tensor | None  # the rows that take part, in order, and some others; None for all
    num_rows: int
    target_G: Tensor  # index of the target among these rows; outside them on another rank
    margin: float | Tensor
    is_left_out_S1: Tensor | None = None  # rows that do not take part

    def rows(self, start: int, stop: int) -> slice | Tensor:
        """Return the index of rows start..stop - 1 of those that take part."""
        return slice(start, stop) if self.row_S is None else self.row_S[start:stop]

    def swap_targets(self, block_SG: Tensor, start: int, value_G: Tensor) -> Tensor:
        """Replace the values at the targets within a block; return the old, 0 for other targets."""
        place_G = self.target_G - start
        inside_1G = ((place_G >= 0) & (place_G < len(block_SG))).unsqueeze(0)
        place_1G = place_G.clamp(0, len(block_SG) - 1).unsqueeze(0)
        old_1G = block_SG.gather(0, place_1G)
        block_SG.scatter_(0, place_1G, value_G.unsqueeze(0).where(inside_1G, old_1G))
        return old_1G.where(inside_1G, 0).squeeze(0)


class _Gathered(torch.autograd.Function):
    """The rows of all ranks; their gradient, summed over ranks, goes back times W (see above)."""

    @staticmethod
    def forward(ctx: Any, emb_BD: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return shards.gather(emb_BD)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_GD: Tensor
    ) -> tuple[Tensor, None]:
        shards: Shards = ctx.shards
        own_BD = shards.sum(grad_GD).chunk(shards.world_size)[shards.rank]
        return own_BD * shards.world_size, None


class _Softmax(torch.autograd.Function):
    """Prepared embeddings and this rank's rows -> loss, and which embeddings are correct.

    Keeps one matrix, the similarities with those of the targets set to -inf: a target counts with
    its hardened logit, which is the same on every rank. Everything else with a row per class is
    computed block by block, in both directions.
    """

    @staticmethod
    def forward(
        ctx: Any, emb_GD: Tensor, weight_CD: Tensor, bias_C: Tensor | None, problem: _Problem
    ) -> tuple[Tensor, Tensor]:
        head, shards = problem.head, problem.head.shards
        similarity_SG, target_G, most_G, place_G = _similarities(emb_GD, weight_CD, bias_C, problem)
        target_G = shards.sum(target_G)
        # Of equal classes the first wins, as with argmax; NaN is never correct.
        is_first_G = (target_G == most_G) & (problem.target_G < place_G)
        right_G = (target_G > most_G) | is_first_G
        hard_G, back = _with_gradient(lambda x_G: head.harden(x_G, problem.margin), target_G)
        top_G = torch.maximum(head.scale * shards.max(most_G), hard_G)
        sum_G = torch.zeros_like(top_G)
        for start, stop in blocks_of(problem.num_rows):
            sum_G += similarity_SG[start:stop].mul(head.scale).sub_(top_G).exp_().sum(0)
        # Sums spread NaN to all ranks; the maximum of a number and NaN may be the number.
        sum_G, num_wrong_G = shards.sum(torch.stack([sum_G, (~right_G).to(sum_G)]))
        log_sum_G = top_G + (sum_G + (hard_G - top_G).exp()).log()
        pull_G = ((hard_G - log_sum_G).exp() - 1) * back(torch.ones_like(hard_G))
        ctx.problem = problem
        ctx.save_for_backward(emb_GD, weight_CD, bias_C, similarity_SG, log_sum_G, pull_G)
        right_G = num_wrong_G == 0
        ctx.mark_non_differentiable(right_G)
        return (log_sum_G - hard_G).mean(), right_G

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_loss: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None]:
        problem: _Problem = ctx.problem
        emb_GD, weight_CD, bias_C, similarity_SG, log_sum_G, pull_G = ctx.saved_tensors
        each = grad_loss / len(emb_GD)
        new = torch.empty_like if problem.row_S is None else torch.zeros_like
        grad_GD, grad_CD = torch.zeros_like(emb_GD), new(weight_CD)
        grad_C = None if bias_C is None else new(bias_C)
        scale = problem.head.scale
        for start, stop in blocks_of(problem.num_rows):
            share_SG = similarity_SG[start:stop].mul(scale).sub_(log_sum_G).exp_()
            grad_SG = share_SG.mul_(each * scale)
            problem.swap_targets(grad_SG, start, pull_G * each)
            rows = problem.rows(start, stop)
            prepared_SD, back = _with_gradient(problem.head.prepare, weight_CD[rows])
            grad_GD.addmm_(grad_SG.T, prepared_SD)
            grad_CD[rows] = back(grad_SG @ emb_GD)
            if grad_C is not None:
                grad_C[rows] = grad_SG.sum(1)
        return grad_GD, grad_CD, grad_C, None


def _similarities(
    emb_GD: Tensor, weight_CD: Tensor, bias_C: Tensor | None, problem: _Problem
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return similarities (S, G) with -inf at the targets, and the targets', 0 if not here.

    Also the largest of each column, and its first place.
    """
    similarity_SG = emb_GD.new_empty(problem.num_rows, len(emb_GD))
    target_G = emb_GD.new_zeros(len(emb_GD))
    most_G = nowhere_G = torch.full_like(target_G, -torch.inf)
    place_G = torch.zeros_like(problem.target_G)
    for start, stop in blocks_of(problem.num_rows):
        rows = problem.rows(start, stop)
        prepared_SD = problem.head.prepare(weight_CD[rows])
        block_SG = torch.mm(prepared_SD, emb_GD.T, out=similarity_SG[start:stop])
        if bias_C is not None:
            block_SG += bias_C[rows].unsqueeze(1)
        if problem.is_left_out_S1 is not None:
            block_SG.masked_fill_(problem.is_left_out_S1[start:stop], -torch.inf)
        target_G += problem.swap_targets(block_SG, start, nowhere_G)
        value_G, index_G = block_SG.max(0)
        place_G = torch.where(value_G > most_G, index_G + start, place_G)
        most_G = torch.maximum(most_G, value_G)
    return similarity_SG, target_G, most_G, place_G


def _with_gradient(
    function: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return function(x), and a function that takes a gradient back through it, once."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = function(x)
    return y.detach(), lambda grad: torch.autograd.grad(y, x, grad)[0]
