"""Plain softmax: an affine layer and cross-entropy, without a cosine or a margin.

In: emb_BD in any float type, label_B. Out: loss and logits_BC, fp32.

Letters: B batch, C classes, D embedding; x_ND any rows.
"""

import torch
from torch import Tensor, nn

from speakerlab.losses.cosine import at_least_fp32
from speakerlab.losses.head import SoftmaxHead


class Softmax(SoftmaxHead):
    """The head of the x-vector (Snyder et al., X-Vectors: Robust DNN Embeddings for Speaker
    Recognition, ICASSP 2018, doi 10.1109/ICASSP.2018.8461375). It has no margin.
    """

    takes_margin = False

    def __init__(self, *, embed_dim: int, num_classes: int) -> None:
        super().__init__(embed_dim=embed_dim, num_classes=num_classes)
        self.bias_C = nn.Parameter(torch.zeros(num_classes))

    def prepare(self, x_ND: Tensor) -> Tensor:
        return at_least_fp32(x_ND)

    def harden(self, similarity_B: Tensor, margin: float | Tensor) -> Tensor:
        """The similarities. Raises ValueError for a margin other than 0."""
        if margin != 0:
            raise ValueError(
                f"softmax: takes no margin, got {float(margin):g}; "
                "set training.margin.initial and final to 0, or use head am_softmax"
            )
        return similarity_B
