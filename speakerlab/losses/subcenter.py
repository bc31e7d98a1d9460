"""AAM softmax with several centers a class and a penalty on the hardest of the other classes.

In: emb_BD in any float type, label_B. Out: loss and logits_BC, fp32.

Letters: B batch, C classes, K centers of a class, D embedding, H hardest other classes.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.losses.cosine import at_target, cosines, sines, with_target
from speakerlab.losses.head import Head
from speakerlab.losses.margin import add_margin

PENALTY_MARGIN = 0.2  # radians; the margin at which the penalty is the one that was asked for


class SubcenterTopkAAMSoftmax(Head):
    """Sub-center AAM softmax with inter-top-k penalty.

    Deng et al., Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web Faces, ECCV
    2020 (no arXiv number): a class is as near as the nearest of its centers. Zhao et al.,
    Multi-query Multi-head Attention Pooling and Inter-topK Penalty for Speaker Verification,
    ICASSP 2022, arXiv 2110.05042: the `top_k` nearest other classes are moved nearer by an angle.

    `margin` is that of AAM softmax, in radians: 0.2 is usual. The angle of the penalty is
    `top_k_penalty` at a margin of 0.2 and in proportion elsewhere. Large-margin fine-tuning has a
    margin of 0.5 and `top_k` 0, which leaves sub-centers alone.
    """

    takes_margin = True

    def __init__(
        self,
        *,
        embed_dim: int,
        num_classes: int,
        scale: float = 32.0,
        easy_margin: bool = False,
        num_centers: int = 3,
        top_k: int = 5,
        top_k_penalty: float = 0.06,
    ) -> None:
        super().__init__()
        if num_centers < 1 or top_k < 0:
            raise ValueError(
                f"aam_softmax_subcenter_topk: counts are too small, got num_centers {num_centers} "
                f"and top_k {top_k}; give at least 1 and 0"
            )
        self.scale, self.easy_margin = scale, easy_margin
        self.top_k = min(top_k, num_classes - 1)
        self.top_k_penalty = top_k_penalty
        # Named as in every head; here a row is that of K centers: (C, K, D).
        weight_ND = nn.init.xavier_uniform_(torch.empty(num_classes * num_centers, embed_dim))
        self.weight_CD = nn.Parameter(weight_ND.view(num_classes, num_centers, embed_dim))

    def forward(
        self, emb_BD: Tensor, label_B: Tensor, margin: float | Tensor = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy with `margin` (radians), and scale * cosine (B, C) without it.

        The cosine of a class is that of its nearest center; the others get a gradient of zero.
        """
        num_classes, num_centers, _ = self.weight_CD.shape
        with torch.autocast(emb_BD.device.type, enabled=False):
            cos_BN = cosines(emb_BD, self.weight_CD.flatten(0, 1))
            cos_BC = cos_BN.view(-1, num_classes, num_centers).max(dim=2).values
            logits_BC = self.scale * cos_BC
            cos_B = at_target(cos_BC, label_B)
            hard_B = self.scale * add_margin(cos_B, margin, easy_margin=self.easy_margin)
            harder_BC = self._penalised(cos_BC, logits_BC, label_B, margin)
            return F.cross_entropy(with_target(harder_BC, label_B, hard_B), label_B), logits_BC

    def _penalised(
        self, cos_BC: Tensor, logits_BC: Tensor, label_B: Tensor, margin: float | Tensor
    ) -> Tensor:
        """The logits, those of the hardest other classes being scale * cos(theta - penalty)."""
        if self.top_k == 0:
            return logits_BC
        penalty = self.top_k_penalty / PENALTY_MARGIN * torch.as_tensor(margin).float()
        others_BC = with_target(
            cos_BC.detach(), label_B, torch.full_like(label_B, -torch.inf, dtype=cos_BC.dtype)
        )
        class_BH = others_BC.topk(self.top_k, dim=1).indices
        cos_BH = cos_BC.gather(1, class_BH)
        nearer_BH = cos_BH * penalty.cos() + sines(cos_BH) * penalty.sin()
        return logits_BC.scatter(1, class_BH, self.scale * nearer_BH)
