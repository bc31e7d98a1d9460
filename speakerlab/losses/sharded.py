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

The position of a target is given in two ways. The row of a label is its index into the rows of this
rank. The place of a label is its index into the rows that the step compares with. Without sampled
classes, the two are the same.

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
            comparison = self._choose_classes(label_G, margin)
            outputs: Any = _ShardedSoftmax.apply(
                prepared_GD,
                self.weight_CD,
                self.bias_C,
                comparison,
            )
        loss, is_correct_G = outputs

        # Every rank counts only its own embeddings: the trainer adds the counts of all ranks.
        is_correct_of_ranks = is_correct_G.chunk(shards.world_size)
        return loss, is_correct_of_ranks[shards.rank]

    def _choose_classes(self, label_G: Tensor, margin: float | Tensor) -> "_Comparison":
        """Choose the rows of this rank that take part, and find the targets among them."""
        first_class, end_class = self.row_range
        num_classes = end_class - first_class  # C
        label_row_G = label_G - first_class
        if self.sampled_share == 1:
            return _Comparison(
                head=self,
                margin=margin,
                row_S=None,
                num_rows=num_classes,
                # Outside of 0..C - 1 where another rank holds the target.
                place_G=label_row_G,
            )

        # Labels are used as indices below. The labels of other ranks would be out of range, so they
        # all point to an extra entry at the end.
        is_here_G = (label_row_G >= 0) & (label_row_G < num_classes)
        entry_G = label_row_G.where(is_here_G, num_classes)
        is_drawn_C = sample_classes(
            (first_class, end_class),
            key=self.key,
            share=self.sampled_share,
            device=label_G.device,
        )
        takes_part = F.pad(is_drawn_C, (0, 1))  # C + 1 entries
        takes_part.scatter_(0, entry_G, True)

        # The running sum numbers the rows that take part from 1, and places count from 0. The place
        # -1 stands for a target of another rank.
        numbers = takes_part.cumsum(0)
        place_G = numbers[entry_G] - 1
        place_G = place_G.where(is_here_G, -1)

        # The host does not know how many rows take part: to ask would wait for the GPU. So S is an
        # upper bound. Rows that take part come first, in order; the rows that fill the rest up to S
        # do not take part, and are masked later.
        is_masked_C = takes_part[:num_classes].logical_not()
        order_C = is_masked_C.argsort(stable=True)
        max_rows = self._max_sampled_rows(len(label_G))
        # If more took part, which EXCESS_PROBABILITY rules out, the last ones would be left out.
        row_S = order_C[:max_rows]
        is_masked_S = is_masked_C[row_S]
        return _Comparison(
            head=self,
            margin=margin,
            row_S=row_S,
            num_rows=len(row_S),
            place_G=place_G,
            is_masked_S1=is_masked_S.unsqueeze(1),
        )

    def _max_sampled_rows(self, num_targets: int) -> int:
        """Return a bound on the number of rows of this rank that take part."""
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
class _Comparison:
    """What a step compares with what: the rows of this rank, and each target's place among them.

    `_ShardedSoftmax` takes this one object besides tensors, so head and margin are here, too.
    """

    head: ShardedHead
    margin: float | Tensor
    # Indices into the rows of this rank; None: all rows in order.
    row_S: Tensor | None
    num_rows: int  # S
    # The place of each target. Outside of 0..S - 1 where another rank holds it. Without sampled
    # classes: below 0 if a lower rank holds it, S or more if a higher one does. So the smaller of
    # two places is the lower class, which `_ShardedSoftmax` needs to know where two similarities
    # are equal. With sampled classes: always -1.
    place_G: Tensor
    # Rows of `row_S` that do not take part; None: all rows take part.
    is_masked_S1: Tensor | None = None

    def index_of(self, start: int, stop: int) -> slice | Tensor:
        """Return the index, into this rank's rows, of the places start..stop - 1."""
        if self.row_S is None:
            return slice(start, stop)
        return self.row_S[start:stop]

    def swap_targets(self, block_SG: Tensor, start: int, value_G: Tensor) -> Tensor:
        """Replace the values at the targets, in place; return the old values.

        block_SG: rows from the place `start` on. A target outside of the block changes nothing;
        its old value is returned as 0, so that the results of all blocks can be added.
        """
        block_place_G = self.place_G - start
        block_rows = len(block_SG)
        is_inside_G = (block_place_G >= 0) & (block_place_G < block_rows)
        is_inside_1G = is_inside_G.unsqueeze(0)

        # A place outside of the block would raise, and boolean selection of the places inside would
        # wait for the GPU. So outside places read a row at the edge and write it back.
        nearest_G = block_place_G.clamp(0, block_rows - 1)
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

    In: prepared emb_GD, and this rank's rows. The backward pass is written by hand for memory:
    autograd would keep several matrices (S, G), and this keeps one, the similarities. All other
    tensors with a row per class are computed block by block, in both directions.

    In the matrix the similarities to the targets are -inf, so that they do not count in sums and
    maxima over rows. The target counts with its hardened logit, which is the same on every rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        emb_GD: Tensor,
        weight_CD: Tensor,
        bias_C: Tensor | None,
        comparison: _Comparison,
    ) -> tuple[Tensor, Tensor]:
        head = comparison.head
        shards = head.shards
        similarities = _compare(emb_GD, weight_CD, bias_C, comparison)
        similarity_SG = similarities.similarity_SG
        largest_G = similarities.largest_G
        # One rank holds a target; the others add 0.
        target_similarity_G = shards.sum(similarities.target_similarity_G)

        is_wrong_here_G = _find_wrong(
            similarities,
            target_similarity_G,
            target_place_G=comparison.place_G,
        )

        # The second output, the gradient of `harden`, is used for slope_G below.
        target_logit_G, harden_gradient = _differentiate(
            lambda similarity_G: head.harden(similarity_G, comparison.margin),
            target_similarity_G,
        )

        # log(sum of exponentials), with the largest logit subtracted first against overflow. All
        # ranks subtract the same one, or else their sums could not be added.
        largest_of_ranks_G = shards.max(largest_G)
        top_G = torch.maximum(head.scale * largest_of_ranks_G, target_logit_G)
        sum_G = torch.zeros_like(top_G)
        for start, stop in blocks_of(comparison.num_rows):
            logits_SG = similarity_SG[start:stop].mul(head.scale)
            exp_SG = logits_SG.sub_(top_G).exp_()
            sum_G += exp_SG.sum(0)

        # Sum over the ranks, in one exchange: the exponentials of all classes, and how many ranks
        # find an embedding wrong, because a target must beat the classes of all of them. A NaN on
        # one rank may get lost in `shards.max` above, but this sum brings it to all ranks.
        wrong_G = is_wrong_here_G.to(sum_G)
        stacked_2G = torch.stack([sum_G, wrong_G])
        sum_G, num_wrong_G = shards.sum(stacked_2G)
        is_correct_G = num_wrong_G == 0

        # The rows have -inf at the target, so its hardened logit is added only here.
        target_exp_G = (target_logit_G - top_G).exp()
        log_sum_G = top_G + (sum_G + target_exp_G).log()
        loss = (log_sum_G - target_logit_G).mean()

        # d loss / d target similarity: (probability of the target - 1) times the slope of `harden`.
        # `harden` takes each similarity by itself, so the gradient of ones is the slope of each.
        slope_G = harden_gradient(torch.ones_like(target_logit_G))
        probability_G = (target_logit_G - log_sum_G).exp()
        target_grad_G = (probability_G - 1) * slope_G

        ctx.comparison = comparison
        ctx.save_for_backward(
            emb_GD,
            weight_CD,
            bias_C,
            similarity_SG,
            log_sum_G,
            target_grad_G,
        )
        ctx.mark_non_differentiable(is_correct_G)
        return loss, is_correct_G

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_loss: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None]:
        comparison: _Comparison = ctx.comparison
        emb_GD, weight_CD, bias_C = ctx.saved_tensors[:3]
        similarity_SG, log_sum_G, target_grad_G = ctx.saved_tensors[3:]
        scale = comparison.head.scale
        grad_per_embedding = grad_loss / len(emb_GD)  # the loss is a mean over G

        # The loop writes the gradients of the rows that it visits. The other rows do not take part,
        # and need a gradient of zero. If the loop visits all rows, the zeros would only cost time.
        visits_all_rows = comparison.row_S is None
        allocate = torch.empty_like if visits_all_rows else torch.zeros_like
        grad_GD = torch.zeros_like(emb_GD)
        grad_CD = allocate(weight_CD)
        grad_C = None if bias_C is None else allocate(bias_C)

        for start, stop in blocks_of(comparison.num_rows):
            # The gradient of the logit of a class that is not the target is its probability, which
            # is exp(-inf) = 0 at the targets and in masked rows.
            logits_SG = similarity_SG[start:stop].mul(scale)
            probability_SG = logits_SG.sub_(log_sum_G).exp_()
            grad_SG = probability_SG.mul_(grad_per_embedding * scale)
            # At the targets, the zeros are replaced by their gradients. `target_grad_G` already has
            # the scale, through the slope of `harden`.
            comparison.swap_targets(grad_SG, start, target_grad_G * grad_per_embedding)

            # The gradients of similarity_SG = prepare(rows) @ emb_GD.T + bias:
            index = comparison.index_of(start, stop)
            prepared_SD, row_gradient = _differentiate(
                comparison.head.prepare,
                weight_CD[index],
            )
            grad_GD.addmm_(grad_SG.T, prepared_SD)
            grad_CD[index] = row_gradient(grad_SG @ emb_GD)
            if grad_C is not None:
                grad_C[index] = grad_SG.sum(1)
        return grad_GD, grad_CD, grad_C, None


class _Similarities(NamedTuple):
    """Similarities of all embeddings to the rows of this rank."""

    similarity_SG: Tensor  # -inf at the targets, and in rows that do not take part
    target_similarity_G: Tensor  # 0 where another rank holds the target
    largest_G: Tensor  # of each column of `similarity_SG`
    largest_place_G: Tensor  # first place with this value


def _compare(
    emb_GD: Tensor,
    weight_CD: Tensor,
    bias_C: Tensor | None,
    comparison: _Comparison,
) -> _Similarities:
    """Compare prepared embeddings with the rows of this rank, block by block."""
    num_embeddings = len(emb_GD)
    similarity_SG = emb_GD.new_empty(comparison.num_rows, num_embeddings)
    target_similarity_G = emb_GD.new_zeros(num_embeddings)
    minus_inf_G = torch.full_like(target_similarity_G, -torch.inf)
    largest_G = minus_inf_G.clone()
    largest_place_G = torch.zeros_like(comparison.place_G)

    for start, stop in blocks_of(comparison.num_rows):
        index = comparison.index_of(start, stop)
        prepared_SD = comparison.head.prepare(weight_CD[index])
        block_SG = similarity_SG[start:stop]
        torch.mm(prepared_SD, emb_GD.T, out=block_SG)
        if bias_C is not None:
            block_SG += bias_C[index].unsqueeze(1)
        if comparison.is_masked_S1 is not None:
            is_masked_S1 = comparison.is_masked_S1[start:stop]
            block_SG.masked_fill_(is_masked_S1, -torch.inf)
        # The target must not count as one of the other classes.
        block_target_G = comparison.swap_targets(block_SG, start, minus_inf_G)
        target_similarity_G += block_target_G

        # The place changes only for a larger value, so the first of equal rows remains.
        block_largest_G, largest_in_block_G = block_SG.max(0)
        new_place_G = largest_in_block_G + start
        is_larger_G = block_largest_G > largest_G
        largest_place_G = torch.where(is_larger_G, new_place_G, largest_place_G)
        largest_G = torch.maximum(largest_G, block_largest_G)
    return _Similarities(
        similarity_SG=similarity_SG,
        target_similarity_G=target_similarity_G,
        largest_G=largest_G,
        largest_place_G=largest_place_G,
    )


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


def _differentiate(
    function: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return function(x) and its vector-Jacobian product, a function that may be called once.

    The product takes the gradient of function(x) and returns the gradient of x. A custom autograd
    function runs without gradients, so `prepare` and `harden` are differentiated by a graph of
    their own.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = function(x)

    def product(value_gradient: Tensor) -> Tensor:
        (x_gradient,) = torch.autograd.grad(value, x, value_gradient)
        return x_gradient

    return value.detach(), product
