"""Plain softmax: an affine layer and cross-entropy, without a cosine or a margin.

In: emb_BD in any float type, label_B. Out: loss and logits_BC, fp32.

Letters: B batch, C classes, D embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Softmax(nn.Module):
    """The head of the x-vector (Snyder et al., X-Vectors: Robust DNN Embeddings for Speaker
    Recognition, ICASSP 2018, doi 10.1109/ICASSP.2018.8461375). It has no margin.
    """

    takes_margin = False

    def __init__(self, *, embed_dim: int, num_classes: int) -> None:
        super().__init__()
        self.weight_CD = nn.Parameter(torch.empty(num_classes, embed_dim))
        self.bias_C = nn.Parameter(torch.zeros(num_classes))
        nn.init.xavier_uniform_(self.weight_CD)

    def forward(
        self, emb_BD: Tensor, label_B: Tensor, margin: float | Tensor = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy and its logits. Raises ValueError for a margin other than 0."""
        if margin != 0:
            raise ValueError(
                f"softmax: takes no margin, got {float(margin):g}; "
                "set training.margin.initial and final to 0, or use head am_softmax"
            )
        with torch.autocast(emb_BD.device.type, enabled=False):
            logits_BC = F.linear(emb_BD.float(), self.weight_CD.float(), self.bias_C.float())
            return F.cross_entropy(logits_BC, label_B), logits_BC
