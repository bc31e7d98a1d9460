"""A head for very many classes, whose rows are split over the ranks.

The weights of a head have a row per class. Here each rank holds the rows of a range of classes
(`shards.py` says which), so that 8 GPUs hold 8 times as many speakers. A step goes like this:

1. Every rank gathers the embeddings and the labels of all ranks: G = B * W embeddings.
2. It compares all of them with its own rows, in one matrix of similarities (S, G).
3. The softmax of an embedding runs over the classes of all ranks. Four numbers per embedding are
   exchanged for it, instead of a matrix with all classes: the similarity to the target (a sum,
   because one rank holds the target and the others add 0), the largest logit (a maximum), the
   sum of exponentials (a sum), and how many ranks find the embedding wrong (a sum).
4. In the backward pass a rank computes the whole gradient of its own rows, without an exchange.
   The gradient of the embeddings is summed over the ranks, and each rank takes its own embeddings'
   part.

With sampled classes, a step compares the embeddings with a part of the rows only: all targets, and
other classes that are drawn at random. This saves memory and time in steps 2 to 4.

In: emb_BD and label_B of this rank. Out: the mean loss over the embeddings of all ranks, the same
on each rank, and a boolean per embedding of this rank, true if it was classified correctly.

A target, the class of a label, has two indices on the rank that holds it: its row, among all rows
of the rank, and its place, among the rows that a step compares with. For example, rank 1 of 2 holds
the classes 5 to 9, and 6 and 9 take part in a step. Then class 9 has row 4 and place 1. Without
sampled classes all rows are compared, and place and row are the same.

Letters: B embeddings of a rank, W ranks, G embeddings of all ranks, C classes of this rank, S rows
of this rank that a step compares with, D embedding; x_1G broadcasts over rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from speakerlab.core.full_precision import autocast_off
from speakerlab.losses import HEADS
from speakerlab.losses.head import Head, SoftmaxHead
from speakerlab.losses.shards import Shards, blocks_of, draw_rows, sample_classes

# `_ShardedSoftmax` computes the loss of a `SoftmaxHead`, so only these heads can be split.
SPLITTABLE = tuple(
    name for name, head in HEADS.items() if issubclass(head, SoftmaxHead)
)

# Probability at most that a step samples more classes than the bound of `_max_sampled_rows`.
EXCESS_PROBABILITY = 1e-15


class ShardedHead(Head):
    """A softmax head of which this rank holds the rows `row_range`.

    The method is Partial FC (An et al., Training 10 Million Identities on a Single Machine, ICCVW
    2021, arXiv 2010.05222; Killing Two Birds with One Stone, CVPR 2022, arXiv 2203.15565).

    Its parameters have the names and initial values of the unsplit head. Its loss and gradients are
    also equal, if DistributedDataParallel (DDP) does not manage its parameters:

    - The loss is the mean over the G embeddings of all ranks. The gradient of a row is complete on
      the rank that holds it, and must not be averaged over the ranks.
    - The gradient that returns into emb_BD is multiplied by W. The backbone is managed by DDP,
      which sums gradients over the W ranks and divides the sum by W.

    With `sampled_share` below 1, a class takes part in a step if it is drawn by the step's key (see
    `sample_classes`), or if it is the label of an embedding on any rank. Softmax and
    `count_correct` consider only these classes, without a correction for the others. The gradient
    of a row that does not take part is zero, not None: momentum and weight decay still apply to it.
    """

    is_split = True
    bias_C: nn.Parameter | None

    def __init__(
        self,
        make: Callable[[], nn.Module],
        *,
        shards: Shards,
        sampled_share: float = 1.0,
    ) -> None:
        """Draw this rank's rows from torch's generator.

        The caller seeds the generator as for the unsplit head, and the rows are the same.
        make: builds the unsplit head; called on the meta device, where it takes no memory.
        """
        super().__init__()
        with torch.device("meta"):
            unsplit_head = make()
        assert isinstance(unsplit_head, SoftmaxHead), "one of SPLITTABLE"
        self.num_classes, embed_dim = unsplit_head.weight_CD.shape
        self.shards = shards
        self.sampled_share = sampled_share
        self.key = 0

        # Take over how the unsplit head compares embeddings, but not its rows: these methods use no
        # parameters. `prepare` scales embeddings and rows to unit length, in heads that compare by
        # cosine. `harden` turns the target's similarity into its logit, with margin and scale.
        self.takes_margin = unsplit_head.takes_margin
        self.scale = unsplit_head.scale
        self.prepare = unsplit_head.prepare
        self.harden = unsplit_head.harden

        weight_CD = draw_rows(
            self.row_range,
            num_classes=self.num_classes,
            embed_dim=embed_dim,
        )
        self.weight_CD = nn.Parameter(weight_CD)
        bias_C = None
        if unsplit_head.bias_C is not None:
            zeros_C = torch.zeros(len(weight_CD))
            bias_C = nn.Parameter(zeros_C)
        self.register_parameter("bias_C", bias_C)

    @property
    def row_range(self) -> tuple[int, int]:
        return self._row_range_of(self.shards.rank)

    def _row_range_of(self, rank: int) -> tuple[int, int]:
        """Return the first class of a rank and the one after its last."""
        rows_per_rank = math.ceil(self.num_classes / self.shards.world_size)
        # Rounding up may leave the last ranks fewer classes, or none.
        first_class = min(rank * rows_per_rank, self.num_classes)
        end_class = min(first_class + rows_per_rank, self.num_classes)
        return first_class, end_class

    def begin_step(self, key: int) -> None:
        """Remember the key by which the step's classes are drawn, the same on every rank."""
        self.key = key

    def forward(
        self,
        emb_BD: Tensor,
        label_B: Tensor,
        margin: float | Tensor = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss over all ranks, and which embeddings are correct, (B,)."""
        shards = self.shards
        # Autocast is off inside; the cast from 16 bits to fp32 is done by `prepare`.
        with autocast_off(emb_BD):
            prepared_BD = self.prepare(emb_BD)
            prepared_GD: Any = _GatherEmbeddings.apply(prepared_BD, shards)
            label_G = shards.gather(label_B)
            if self.sampled_share == 1:
                rows = self._all_rows(label_G)
            else:
                rows = self._sample_rows(label_G)
            outputs: Any = _ShardedSoftmax.apply(
                prepared_GD,
                self.weight_CD,
                self.bias_C,
                self,
                margin,
                rows,
            )
        loss, is_correct_G = outputs

        # Every rank counts only its own embeddings: the trainer adds the counts of all ranks.
        is_correct_of_ranks = is_correct_G.chunk(shards.world_size)
        return loss, is_correct_of_ranks[shards.rank]

    def _all_rows(self, label_G: Tensor) -> "_StepRows":
        """Compare with all rows of this rank."""
        first_class, end_class = self.row_range
        return _StepRows(
            index_S=None,
            num_rows=end_class - first_class,
            target_place_G=label_G - first_class,
        )

    def _sample_rows(self, label_G: Tensor) -> "_StepRows":
        """Compare with the rows that take part in this step: drawn classes, and all targets.

        For example, this rank holds the classes 10 to 14, of which 11 and 13 are drawn, and the
        labels are 14, 11 and 27:

            takes part, by row    no, yes, no, yes, yes
            index_S               1, 3, 4, 0, 2, of which the last two are masked
            target_place_G        2, 0, and -1 for 27, which another rank holds
        """
        first_class, end_class = self.row_range
        num_classes = end_class - first_class  # C
        is_drawn_C = sample_classes(
            (first_class, end_class),
            key=self.key,
            share=self.sampled_share,
            device=label_G.device,
        )

        # The targets of other ranks are no rows here. They all point to an extra entry at the end,
        # because to leave them out would wait for the GPU.
        target_row_G = label_G - first_class
        is_here_G = (target_row_G >= 0) & (target_row_G < num_classes)
        entry_G = target_row_G.where(is_here_G, num_classes)
        takes_part = F.pad(is_drawn_C, (0, 1))  # C + 1 entries
        takes_part.scatter_(0, entry_G, True)

        # The place of a row that takes part is the number of such rows before it.
        places = takes_part.cumsum(0) - 1
        target_place_G = places[entry_G]
        target_place_G = target_place_G.where(is_here_G, -1)

        # The host does not know how many rows take part: to ask would wait for the GPU. So S is an
        # upper bound. Rows that take part come first, in order; the rows that fill the rest up to S
        # do not take part, and are masked later.
        is_masked_C = takes_part[:num_classes].logical_not()
        order_C = is_masked_C.argsort(stable=True)
        max_rows = self._max_sampled_rows(len(label_G))
        # If more took part, which EXCESS_PROBABILITY rules out, the last ones would be left out.
        index_S = order_C[:max_rows]
        is_masked_S = is_masked_C[index_S]
        return _StepRows(
            index_S=index_S,
            num_rows=len(index_S),
            target_place_G=target_place_G,
            is_masked_S1=is_masked_S.unsqueeze(1),
        )

    def _max_sampled_rows(self, num_targets: int) -> int:
        """Return a bound on the number of rows of this rank that take part.

        Of 10,000 rows and a share of 0.1, it is 1262 and the number of targets.
        """
        first_class, end_class = self.row_range
        num_classes = end_class - first_class  # C
        # The number of drawn rows has a binomial distribution. By Bernstein's inequality it exceeds
        # mean + t with a probability of at most exp(-t^2 / (2 variance + 2 t / 3)). Set equal to
        # EXCESS_PROBABILITY and solved for t:
        mean = num_classes * self.sampled_share
        variance = mean * (1 - self.sampled_share)
        exponent = -math.log(EXCESS_PROBABILITY)
        third = exponent / 3
        t = third + math.sqrt(third**2 + 2 * exponent * variance)
        max_drawn = math.ceil(mean + t)
        # All targets may be on this rank, and none of them drawn.
        return min(num_classes, max_drawn + num_targets)

    def count_correct(self, decided: Tensor, label_B: Tensor) -> Tensor:
        """Count the correct embeddings, given the second output of `forward`: booleans here."""
        return decided.sum()

    @torch.no_grad()
    def gather_rows(self, rows: Tensor) -> Tensor | None:
        """Return the rows of all ranks on rank 0, on the CPU; None on other ranks.

        rows: of this rank. They are gathered in blocks, of which W are held at a time.
        """
        world_size = self.shards.world_size
        row_shape = rows.shape[1:]
        all_rows = None
        if self.shards.rank == 0:
            all_rows = torch.empty(self.num_classes, *row_shape, dtype=rows.dtype)

        # Rank 0 has the most rows. Its range begins at 0, so the end of the range is their number.
        # A collective takes tensors of one shape, so ranks with fewer rows send zeros, which are
        # dropped below.
        _, max_rows = self._row_range_of(0)
        for start, stop in blocks_of(max_rows):
            padded = rows.new_zeros(stop - start, *row_shape)
            block_rows = rows[start:stop]
            padded[: len(block_rows)] = block_rows
            gathered = self.shards.gather(padded)
            if all_rows is None:
                continue

            for rank, block in enumerate(gathered.chunk(world_size)):
                first_class, end_class = self._row_range_of(rank)
                block_start = first_class + start
                block_end = min(first_class + stop, end_class)
                num_held = block_end - block_start
                if num_held > 0:
                    all_rows[block_start:block_end] = block[:num_held]
        return all_rows


@dataclass(frozen=True, kw_only=True)
class _StepRows:
    """The rows of this rank that a step compares with, and each target's place among them."""

    # Of each place, the index into the rows of this rank; None: all rows in order.
    index_S: Tensor | None
    num_rows: int  # S
    # Outside of 0..S - 1 where another rank holds the target. Without sampled classes it is below 0
    # if a lower rank holds it, and S or more if a higher one does: so a smaller place always is a
    # lower class, as `_find_wrong` needs. With sampled classes it is -1.
    target_place_G: Tensor
    # Places whose rows do not take part; None: all take part.
    is_masked_S1: Tensor | None = None

    def index_of(self, start: int, stop: int) -> slice | Tensor:
        """Return the index, into this rank's rows, of the places start..stop - 1."""
        if self.index_S is None:
            return slice(start, stop)
        return self.index_S[start:stop]

    def swap_targets(self, block_SG: Tensor, start: int, value_G: Tensor) -> Tensor:
        """Replace the values at the targets, in place; return the old values.

        block_SG: rows from the place `start` on. A target outside of the block changes nothing;
        its old value is returned as 0, so that the results of all blocks can be added.
        """
        # For example, in a block of 3 rows from the place 4 on, the targets 5, 2 and 9 have the
        # rows 1, -2 and 5, and only the first is inside.
        block_rows = len(block_SG)
        target_row_G = self.target_place_G - start
        is_inside_G = (target_row_G >= 0) & (target_row_G < block_rows)
        is_inside_1G = is_inside_G.unsqueeze(0)

        # To index with the targets outside would raise, and to select those inside would wait for
        # the GPU. So the targets outside read a row at the edge, and write it back: 1, 0 and 2.
        nearest_G = target_row_G.clamp(0, block_rows - 1)
        nearest_1G = nearest_G.unsqueeze(0)
        old_1G = block_SG.gather(0, nearest_1G)
        value_1G = value_G.unsqueeze(0)
        new_1G = value_1G.where(is_inside_1G, old_1G)
        block_SG.scatter_(0, nearest_1G, new_1G)

        old_or_0_1G = old_1G.where(is_inside_1G, 0)
        return old_or_0_1G.squeeze(0)


class _GatherEmbeddings(torch.autograd.Function):
    """Gathers the embeddings of all ranks, emb_BD -> emb_GD.

    Every rank's loss depends on every embedding through its own rows, so the gradients are summed
    over the ranks. They are then multiplied by W, for DDP (see `ShardedHead`).
    """

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
        sum_GD = shards.sum(grad_GD)
        sums_of_ranks = sum_GD.chunk(shards.world_size)
        grad_BD = sums_of_ranks[shards.rank]
        return grad_BD * shards.world_size, None


class _ShardedSoftmax(torch.autograd.Function):
    """Cross-entropy of all embeddings over the classes of all ranks, and which are correct.

    In: prepared embeddings, and this rank's rows before `prepare`. The backward pass is written by
    hand for memory: autograd would keep several matrices (S, G), and this keeps one, the
    similarities. All other tensors with a row per class are computed block by block, in both
    directions.

    In the matrix the similarities to the targets are -inf, so that they do not count in sums and
    maxima over rows. The target counts with its hardened logit, which is the same on every rank.

    For example, scale is 10, and an embedding has the similarities 0.5 and 0.3 to the two rows of
    rank 0, and 0.4 and 0.1 to those of rank 1. Its target is the first class, and a margin lowers
    the target's similarity to 0.3:

        rank 0   row of the matrix  -inf, 0.3   target 0.5   exp(3 - 4)
        rank 1   row of the matrix   0.4, 0.1   target 0     exp(4 - 4) + exp(1 - 4)
        all      largest logit 4, target's logit 3, sum of exponentials with the target's 1.786
                 loss = 4 + log(1.786) - 3 = 1.58
    """

    @staticmethod
    def forward(
        ctx: Any,
        emb_GD: Tensor,
        weight_CD: Tensor,
        bias_C: Tensor | None,
        head: ShardedHead,
        margin: float | Tensor,
        rows: _StepRows,
    ) -> tuple[Tensor, Tensor]:
        shards = head.shards
        similarities = _compare(emb_GD, weight_CD, bias_C, head, rows)
        # One rank holds a target; the others add 0.
        target_similarity_G = shards.sum(similarities.of_target_G)
        is_wrong_here_G = _find_wrong(
            similarities,
            target_similarity_G,
            target_place_G=rows.target_place_G,
        )

        target_logit_G, slope_G = _harden_targets(head, target_similarity_G, margin)

        # log(sum of exponentials), with the largest logit subtracted first against overflow. All
        # ranks subtract the same one, or else their sums could not be added.
        largest_of_ranks_G = shards.max(similarities.largest_G)
        top_G = torch.maximum(head.scale * largest_of_ranks_G, target_logit_G)
        sum_G = _sum_exponentials(
            similarities.matrix_SG,
            scale=head.scale,
            top_G=top_G,
        )

        # Sum over the ranks, in one exchange: the exponentials of all classes, and how many ranks
        # find an embedding wrong, because a target must beat the classes of all of them. A NaN on
        # one rank may get lost in `shards.max` above, but this sum brings it to all ranks.
        wrong_G = is_wrong_here_G.to(sum_G)
        stacked_2G = torch.stack([sum_G, wrong_G])
        sum_G, num_wrong_G = shards.sum(stacked_2G)
        is_correct_G = num_wrong_G == 0

        # The matrix has -inf at the target, so its hardened logit is added only here.
        target_exp_G = (target_logit_G - top_G).exp()
        log_sum_G = top_G + (sum_G + target_exp_G).log()
        loss = (log_sum_G - target_logit_G).mean()

        # d loss / d target similarity: (probability of the target - 1) times the slope of `harden`.
        probability_G = (target_logit_G - log_sum_G).exp()
        target_grad_G = (probability_G - 1) * slope_G

        ctx.head = head
        ctx.rows = rows
        ctx.save_for_backward(
            emb_GD,
            weight_CD,
            bias_C,
            similarities.matrix_SG,
            log_sum_G,
            target_grad_G,
        )
        ctx.mark_non_differentiable(is_correct_G)
        return loss, is_correct_G

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_loss: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        head: ShardedHead = ctx.head
        rows: _StepRows = ctx.rows
        emb_GD, weight_CD, bias_C = ctx.saved_tensors[:3]
        matrix_SG, log_sum_G, target_grad_G = ctx.saved_tensors[3:]
        grad_per_embedding = grad_loss / len(emb_GD)  # the loss is a mean over G

        # The loop writes the gradients of the rows that it visits. The other rows do not take part,
        # and need a gradient of zero. If the loop visits all rows, the zeros would only cost time.
        visits_all_rows = rows.index_S is None
        allocate = torch.empty_like if visits_all_rows else torch.zeros_like
        grad_GD = torch.zeros_like(emb_GD)
        grad_CD = allocate(weight_CD)
        grad_C = None if bias_C is None else allocate(bias_C)

        for start, stop in blocks_of(rows.num_rows):
            # The gradient of the logit of a class that is not the target is its probability, which
            # is exp(-inf) = 0 at the targets and in masked rows.
            logits_SG = matrix_SG[start:stop].mul(head.scale)
            probability_SG = logits_SG.sub_(log_sum_G).exp_()
            grad_SG = probability_SG.mul_(grad_per_embedding * head.scale)
            # At the targets, the zeros are replaced by their gradients. `target_grad_G` already has
            # the scale, through the slope of `harden`.
            rows.swap_targets(grad_SG, start, target_grad_G * grad_per_embedding)

            # The block is prepared again, now with a graph, instead of being kept.
            index = rows.index_of(start, stop)
            with torch.enable_grad():
                weight_SD = weight_CD[index].detach().requires_grad_()
                graph_SD = head.prepare(weight_SD)
            prepared_SD = graph_SD.detach()

            # The gradients of matrix_SG = prepared_SD @ emb_GD.T + bias:
            grad_GD.addmm_(grad_SG.T, prepared_SD)
            (grad_CD[index],) = torch.autograd.grad(
                graph_SD, weight_SD, grad_SG @ emb_GD
            )
            if grad_C is not None:
                grad_C[index] = grad_SG.sum(1)
        return grad_GD, grad_CD, grad_C, None, None, None


class _Similarities(NamedTuple):
    """Similarities of all embeddings to the rows of this rank."""

    matrix_SG: Tensor  # -inf at the targets, and in rows that do not take part
    of_target_G: Tensor  # 0 where another rank holds the target
    largest_G: Tensor  # of each column of the matrix
    largest_place_G: Tensor  # first place with this value


def _compare(
    emb_GD: Tensor,
    weight_CD: Tensor,
    bias_C: Tensor | None,
    head: ShardedHead,
    rows: _StepRows,
) -> _Similarities:
    """Compare prepared embeddings with the rows of this rank, block by block."""
    num_embeddings = len(emb_GD)
    matrix_SG = emb_GD.new_empty(rows.num_rows, num_embeddings)
    of_target_G = emb_GD.new_zeros(num_embeddings)
    minus_inf_G = torch.full_like(of_target_G, -torch.inf)
    largest_G = minus_inf_G.clone()
    largest_place_G = torch.zeros_like(rows.target_place_G)

    for start, stop in blocks_of(rows.num_rows):
        index = rows.index_of(start, stop)
        prepared_SD = head.prepare(weight_CD[index])
        block_SG = matrix_SG[start:stop]
        torch.mm(prepared_SD, emb_GD.T, out=block_SG)
        if bias_C is not None:
            block_SG += bias_C[index].unsqueeze(1)
        if rows.is_masked_S1 is not None:
            block_SG.masked_fill_(rows.is_masked_S1[start:stop], -torch.inf)
        # The target must not count as one of the other classes.
        of_target_G += rows.swap_targets(block_SG, start, minus_inf_G)

        # The place changes only for a larger value, so the first of equal rows remains.
        block_largest_G, largest_in_block_G = block_SG.max(0)
        new_place_G = largest_in_block_G + start
        is_larger_G = block_largest_G > largest_G
        largest_place_G = torch.where(is_larger_G, new_place_G, largest_place_G)
        largest_G = torch.maximum(largest_G, block_largest_G)
    return _Similarities(
        matrix_SG=matrix_SG,
        of_target_G=of_target_G,
        largest_G=largest_G,
        largest_place_G=largest_place_G,
    )


def _harden_targets(
    head: ShardedHead, similarity_G: Tensor, margin: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logits of targets, with the margin, and their slopes, d logit / d similarity."""
    # In a custom function, autograd is off.
    with torch.enable_grad():
        similarity_G = similarity_G.detach().requires_grad_()
        logit_G = head.harden(similarity_G, margin)
    # `harden` takes each similarity by itself, so the gradient of ones is the slope of each.
    (slope_G,) = torch.autograd.grad(
        logit_G,
        similarity_G,
        torch.ones_like(logit_G),
    )
    return logit_G.detach(), slope_G


def _sum_exponentials(matrix_SG: Tensor, *, scale: float, top_G: Tensor) -> Tensor:
    """Return the sum of exp(scale * similarity - top) over the rows of this rank, (G,)."""
    sum_G = torch.zeros_like(top_G)
    for start, stop in blocks_of(len(matrix_SG)):
        logits_SG = matrix_SG[start:stop].mul(scale)
        exp_SG = logits_SG.sub_(top_G).exp_()
        sum_G += exp_SG.sum(0)
    return sum_G


def _find_wrong(
    similarities: _Similarities,
    target_similarity_G: Tensor,
    *,
    target_place_G: Tensor,
) -> Tensor:
    """Return which embeddings this rank finds wrong: one of its classes beats the target.

    Of equal classes the first wins, as with argmax; NaN is never correct. With sampled classes, a
    target that another rank holds has the place -1 and wins every tie here: only the accuracy could
    differ, and equal similarities are rare.
    """
    largest_G = similarities.largest_G
    is_tied_G = target_similarity_G == largest_G
    comes_first_G = target_place_G < similarities.largest_place_G
    wins_tie_G = is_tied_G & comes_first_G
    is_largest_G = target_similarity_G > largest_G
    return ~(is_largest_G | wins_tie_G)
