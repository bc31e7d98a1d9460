"""What all heads share, the softmax heads that compare an embedding with one row per class.

In: emb_BD in any float type, label_B. Out: loss and logits_BC, fp32 (fp64 if the head is).

Letters: B batch, C classes, D embedding; x_ND any rows.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import fp32_island, widened


class Head(nn.Module):
    """Base class with the defaults of the contract in `losses/__init__.py`."""

    takes_margin = True  # whether it uses a margin other than 0
    is_split = False  # whether other ranks have other rows, outside DDP
    weight_CD: nn.Parameter

    @property
    def row_range(self) -> tuple[int, int]:
        """Return the first class whose row this process has, and the one after the last."""
        return 0, len(self.weight_CD)

    def begin_step(self, key: int) -> None:
        """Prepare for a step; called before its first micro-batch, for heads that draw by `key`."""

    def count_correct(self, decided: Tensor, label_B: Tensor) -> Tensor:
        """Count the correct rows, given what `forward` returned beside the loss."""
        return (decided.argmax(dim=1) == label_B).sum()

    def gather_rows(self, own: Tensor) -> Tensor | None:
        """Return the rows of all ranks, on rank 0. Every rank must call it."""
        return own

    def gather_state(self) -> dict[str, Tensor]:
        """Return the state with the rows of all ranks, on rank 0. Every rank must call it."""
        whole = {name: self.gather_rows(own) for name, own in self.state_dict().items()}
        return {name: rows for name, rows in whole.items() if rows is not None}


class SoftmaxHead(Head, ABC):
    """Cross-entropy of scale * similarity, after the similarity to the target is made harder.

    A similarity is the inner product of a prepared embedding and a prepared row, plus `bias_C` if
    there is one. So the rows may be on several ranks (sharded.py).
    """

    scale: float = 1.0
    bias_C: nn.Parameter | None

    def __init__(self, *, embed_dim: int, num_classes: int) -> None:
        super().__init__()
        self.weight_CD = nn.Parameter(torch.empty(num_classes, embed_dim))
        self.register_parameter("bias_C", None)
        nn.init.xavier_uniform_(self.weight_CD)

    @abstractmethod
    def prepare(self, x_ND: Tensor) -> Tensor:
        """Transform embeddings, and rows, before they are compared; at least fp32."""

    @abstractmethod
    def harden(self, similarity: Tensor, margin: float | Tensor) -> Tensor:
        """Return the logits, with the margin, of similarities to the target."""

    def forward(
        self, emb_BD: Tensor, label_B: Tensor, margin: float | Tensor = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy with `margin`, and the logits (B, C) without it."""
        with fp32_island(emb_BD):
            rows_CD = self.prepare(self.weight_CD)
            similarity_BC = F.linear(self.prepare(emb_BD), rows_CD, self.bias_C)
            logits_BC, label_B1 = self.scale * similarity_BC, label_B.unsqueeze(1)
            hard_B1 = self.harden(similarity_BC.gather(1, label_B1), margin)
            return F.cross_entropy(logits_BC.scatter(1, label_B1, hard_B1), label_B), logits_BC


class Softmax(SoftmaxHead):
    """Affine layer and cross-entropy without a margin, as in the x-vector.

    Snyder et al., X-Vectors: Robust DNN Embeddings for Speaker Recognition, ICASSP 2018,
    doi 10.1109/ICASSP.2018.8461375.
    """

    takes_margin = False

    def __init__(self, *, embed_dim: int, num_classes: int) -> None:
        super().__init__(embed_dim=embed_dim, num_classes=num_classes)
        self.bias_C = nn.Parameter(torch.zeros(num_classes))

    def prepare(self, x_ND: Tensor) -> Tensor:
        return widened(x_ND)

    def harden(self, similarity: Tensor, margin: float | Tensor) -> Tensor:
        return similarity
