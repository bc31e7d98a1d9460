"""Circle loss against class weights.

Letters: B batch, C classes, D embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import autocast_off
from speakerlab.losses.head import Head
from speakerlab.losses.margin import cosines


class CircleLoss(Head):
    """Circle loss in its form for class labels: cosines far from their optimum count more.

    Sun et al., Circle Loss: A Unified Perspective of Pair Similarity Optimization, CVPR 2020,
    arXiv 2002.10857.

    With the cosine s_p of the target, s_n of another class and the margin m, the logits are
    scale * [1 + m - s_p]+ * (s_p - (1 - m)) and scale * [s_n + m]+ * (s_n - m). The brackets are
    weights, constant in the gradient, that pull harder on cosines far from their optimum. The
    boundary between two classes is the circle s_n^2 + (1 - s_p)^2 = 2 m^2. So unlike in other heads
    a *smaller* margin is harder, and 0 cannot be reached: keep it at 0.25, without a ramp.
    `scale` is the paper's gamma (256 with m = 0.25 for faces).
    """

    def __init__(
        self, *, embed_dim: int, num_classes: int, scale: float = 256.0
    ) -> None:
        super().__init__()
        self.scale = scale
        weight_CD = torch.empty(num_classes, embed_dim)
        self.weight_CD = nn.Parameter(weight_CD)
        nn.init.xavier_uniform_(self.weight_CD)

    def forward(
        self,
        emb_BD: Tensor,
        label_B: Tensor,
        margin: float | Tensor = 0.25,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss with `margin` (a cosine), and scale * cosine (B, C) without it."""
        label_B1 = label_B.unsqueeze(1)
        with autocast_off(emb_BD):
            cos_BC = cosines(emb_BD, self.weight_CD)
            cos_B1 = cos_BC.gather(1, label_B1)

            # The weights are [1 + m - s_p]+ and [s_n + m]+. They are constants in the paper's
            # gradient, which is why they are computed from detached cosines.
            detached_B1 = cos_B1.detach()
            target_weight_B1 = (1 + margin - detached_B1).relu()
            target_B1 = target_weight_B1 * (cos_B1 - 1 + margin)

            detached_BC = cos_BC.detach()
            other_weight_BC = (detached_BC + margin).relu()
            others_BC = other_weight_BC * (cos_BC - margin)

            # `others_BC` also has the target's column, computed as if it were another class.
            logits_BC = self.scale * others_BC.scatter(1, label_B1, target_B1)
            loss = F.cross_entropy(logits_BC, label_B)
            return loss, self.scale * cos_BC
