"""Circle loss against class weights.

Letters: B batch, C classes, D embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import fp32_island
from speakerlab.losses.head import Head
from speakerlab.losses.margin import cosines


class CircleLoss(Head):
    """Sun et al., Circle Loss: A Unified Perspective of Pair Similarity Optimization, CVPR 2020,
    arXiv 2002.10857; the form for class-level labels.

    With the cosine s_p of the target, s_n of another class and the margin m, the logits are
    scale * [1 + m - s_p]+ * (s_p - (1 - m)) and scale * [s_n + m]+ * (s_n - m). The brackets are
    weights, constant in the gradient, that pull harder on what is far from its optimum. The
    boundary between two classes is the circle s_n^2 + (1 - s_p)^2 = 2 m^2. So unlike in other heads
    a *smaller* margin demands more, and 0 the impossible: keep it at 0.25, without a ramp.
    `scale` is the paper's gamma (256 with m = 0.25 for faces).
    """

    def __init__(self, *, embed_dim: int, num_classes: int, scale: float = 256.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight_CD = nn.Parameter(torch.empty(num_classes, embed_dim))
        nn.init.xavier_uniform_(self.weight_CD)

    def forward(
        self, emb_BD: Tensor, label_B: Tensor, margin: float | Tensor = 0.25
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss with `margin` (a cosine), and scale * cosine (B, C) without it."""
        label_B1 = label_B.unsqueeze(1)
        with fp32_island(emb_BD):
            cos_BC = cosines(emb_BD, self.weight_CD)
            cos_B1 = cos_BC.gather(1, label_B1)
            positive_B1 = (1 + margin - cos_B1.detach()).relu() * (cos_B1 - 1 + margin)
            negative_BC = (cos_BC.detach() + margin).relu() * (cos_BC - margin)
            weighted_BC = self.scale * negative_BC.scatter(1, label_B1, positive_B1)
            return F.cross_entropy(weighted_BC, label_B), self.scale * cos_BC
