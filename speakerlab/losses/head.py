"""The base class of all heads, and the softmax heads, which compare with one row per class.

In: emb_BD in any float type, label_B. Out: loss and logits_BC, fp32 (fp64 if the head is).

Letters: B batch, C classes, D embedding; x_ND any rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import autocast_off, widened


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
        """Count the correct rows, given the second output of `forward`."""
        predicted_B = decided.argmax(dim=1)
        is_correct_B = predicted_B == label_B
        return is_correct_B.sum()

    def gather_rows(self, rows: Tensor) -> Tensor | None:
        """Return the rows of all ranks, on rank 0. Every rank must call it."""
        return rows

    def gather_state(self) -> dict[str, Tensor]:
        """Return the state with the rows of all ranks, on rank 0. Every rank must call it."""
        gathered: dict[str, Tensor] = {}
        for name, rows in self.state_dict().items():
            all_rows = self.gather_rows(rows)
            if all_rows is not None:
                gathered[name] = all_rows
        return gathered


class SoftmaxHead(Head, ABC):
    """Cross-entropy of scale * similarity, after the similarity to the target is made harder.

    A similarity is the inner product of a prepared embedding and a prepared row, plus `bias_C` if
    there is one. No class needs the row of another class, so the rows can be split over ranks
    (sharded.py).
    """

    scale: float = 1.0
    # None in heads that compare by cosine.
    bias_C: nn.Parameter | None

    def __init__(self, *, embed_dim: int, num_classes: int) -> None:
        super().__init__()
        weight_CD = torch.empty(num_classes, embed_dim)
        self.weight_CD = nn.Parameter(weight_CD)
        self.register_parameter("bias_C", None)
        nn.init.xavier_uniform_(self.weight_CD)

    @abstractmethod
    def prepare(self, x_ND: Tensor) -> Tensor:
        """Transform embeddings, and rows, before they are compared; at least fp32."""

    @abstractmethod
    def harden(self, similarity: Tensor, margin: float | Tensor) -> Tensor:
        """Return the logits, with the margin, of similarities to the target."""

    def forward(
        self,
        emb_BD: Tensor,
        label_B: Tensor,
        margin: float | Tensor = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy with `margin`, and the logits (B, C) without it."""
        with autocast_off(emb_BD):
            rows_CD = self.prepare(self.weight_CD)
            prepared_BD = self.prepare(emb_BD)
            similarity_BC = F.linear(prepared_BD, rows_CD, self.bias_C)
            logits_BC = self.scale * similarity_BC

            # Only the target's logit has the margin.
            label_B1 = label_B.unsqueeze(1)
            target_B1 = similarity_BC.gather(1, label_B1)
            hard_B1 = self.harden(target_B1, margin)
            hard_BC = logits_BC.scatter(1, label_B1, hard_B1)
            loss = F.cross_entropy(hard_BC, label_B)
            return loss, logits_BC


class Softmax(SoftmaxHead):
    """Affine layer and cross-entropy without a margin, as in the x-vector.

    Snyder et al., X-Vectors: Robust DNN Embeddings for Speaker Recognition, ICASSP 2018,
    doi 10.1109/ICASSP.2018.8461375.
    """

    takes_margin = False

    def __init__(self, *, embed_dim: int, num_classes: int) -> None:
        super().__init__(embed_dim=embed_dim, num_classes=num_classes)
        zeros_C = torch.zeros(num_classes)
        self.bias_C = nn.Parameter(zeros_C)

    def prepare(self, x_ND: Tensor) -> Tensor:
        return widened(x_ND)

    def harden(self, similarity: Tensor, margin: float | Tensor) -> Tensor:
        return similarity


def class_names(speakers: Sequence[str], speeds: Sequence[float]) -> list[str]:
    """Return the name of each row of a head: a speaker, or `id#0.9` at another speed."""
    names: list[str] = []
    for speed in speeds:
        suffix = "" if speed == 1.0 else f"#{speed:g}"
        names += [f"{speaker}{suffix}" for speaker in speakers]
    return names
