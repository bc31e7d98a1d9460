"""What every head is, and what those have in common whose loss is a softmax of one row a class.

In: emb_BD in any float type, label_B. Out: loss and logits_BC, fp32 (fp64 for modules of it).

Letters: B batch, C classes, D embedding; x_ND any rows.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.losses.cosine import at_target, with_target


class Head(nn.Module):
    """The contract of `losses/__init__.py`, as far as all heads keep it in the same way."""

    takes_margin: bool
    is_split = False  # whether other ranks have other rows: outside DDP, saved by each rank
    weight_CD: nn.Parameter

    @property
    def row_range(self) -> tuple[int, int]:
        """The first class of which this process has the row, and the one after the last."""
        return 0, len(self.weight_CD)

    def begin_step(self, key: int) -> None:
        """Called before the first micro-batch of a step, for heads that draw; this one does not."""

    def count_correct(self, decided: Tensor, label_B: Tensor) -> Tensor:
        """How many rows are decided right, from what `forward` gave beside the loss."""
        return (decided.argmax(dim=1) == label_B).sum()

    def own_rows(self, blocks: Iterable[tuple[int, Tensor]]) -> Tensor:
        """This process's rows of blocks (first row, rows) that any number of ranks have written."""
        return torch.cat([rows for _, rows in sorted(blocks, key=lambda block: block[0])])

    def gather_state(self) -> dict[str, Tensor]:
        """The state with the rows of all ranks, on rank 0. Every rank must call it."""
        return dict(self.state_dict())


class SoftmaxHead(Head):
    """Cross-entropy of scale * similarity, that of the target being made harder before.

    A similarity is the inner product of an embedding and a row, both prepared, plus `bias_C` where
    there is one. So the rows may lie in several places, and one need not see them together.
    """

    scale: float = 1.0
    bias_C: nn.Parameter | None

    def __init__(self, *, embed_dim: int, num_classes: int) -> None:
        super().__init__()
        self.weight_CD = nn.Parameter(torch.empty(num_classes, embed_dim))
        self.register_parameter("bias_C", None)
        nn.init.xavier_uniform_(self.weight_CD)

    def prepare(self, x_ND: Tensor) -> Tensor:
        """What is done to embeddings and rows before they meet; fp32 at least."""
        raise NotImplementedError

    def harden(self, similarity_B: Tensor, margin: float | Tensor) -> Tensor:
        """The logits of similarities to the target, with the margin."""
        raise NotImplementedError

    def forward(
        self, emb_BD: Tensor, label_B: Tensor, margin: float | Tensor = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy with `margin`, and the logits (B, C) without it.

        The logits carry no margin, so that an accuracy made from them is that of the classifier.
        """
        with torch.autocast(emb_BD.device.type, enabled=False):
            rows_CD = self.prepare(self.weight_CD)
            similarity_BC = F.linear(self.prepare(emb_BD), rows_CD, self.bias_C)
            return self.loss_of(similarity_BC, label_B, margin)

    def loss_of(
        self, similarity_BC: Tensor, label_B: Tensor, margin: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss and logits of similarities; only those of the targets meet the margin."""
        logits_BC = self.scale * similarity_BC
        hard_B = self.harden(at_target(similarity_BC, label_B), margin)
        return F.cross_entropy(with_target(logits_BC, label_B, hard_B), label_B), logits_BC
