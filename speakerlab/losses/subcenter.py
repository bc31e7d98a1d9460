"""AAM softmax with several centers per class and a penalty on the hardest of the other classes.

Letters: B batch, C classes, K centers of a class, D embedding, H hardest other classes.
"""

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import autocast_off
from speakerlab.losses.head import Head
from speakerlab.losses.margin import add_margin, cosines, rotate

PENALTY_MARGIN = 0.2  # radians; the margin at which the penalty is `top_k_penalty`


class SubcenterTopkAAMSoftmax(Head):
    """Sub-center AAM softmax with inter-top-k penalty.

    Deng et al., Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web Faces, ECCV
    2020 (no arXiv number): a class has the cosine of its nearest center. Zhao et al.,
    Multi-query Multi-head Attention Pooling and Inter-topK Penalty for Speaker Verification,
    ICASSP 2022, arXiv 2110.05042: the `top_k` nearest other classes are moved nearer by an angle.

    `margin` means the same as in AAM softmax, in radians: 0.2 is usual. The angle of the penalty is
    `top_k_penalty` at a margin of 0.2 and proportional to the margin. Large-margin fine-tuning uses
    a margin of 0.5 and `top_k` 0, that is, sub-centers only.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_classes: int,
        scale: float = 32.0,
        easy_margin: bool = False,
        num_centers: Annotated[int, Ge(1)] = 3,
        top_k: Annotated[int, Ge(0)] = 5,
        top_k_penalty: float = 0.06,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.easy_margin = easy_margin
        self.top_k = min(top_k, num_classes - 1)  # all but the target
        self.top_k_penalty = top_k_penalty
        # Named as in every head, but a class has a row for each of its centers: (C, K, D).
        weight_ND = torch.empty(num_classes * num_centers, embed_dim)
        nn.init.xavier_uniform_(weight_ND)
        weight_CKD = weight_ND.view(num_classes, num_centers, embed_dim)
        self.weight_CD = nn.Parameter(weight_CKD)

    def forward(
        self,
        emb_BD: Tensor,
        label_B: Tensor,
        margin: float | Tensor = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss with `margin` (radians), and scale * cosine (B, C) without it."""
        num_classes, num_centers, _ = self.weight_CD.shape
        label_B1 = label_B.unsqueeze(1)
        with autocast_off(emb_BD):
            # The cosine of a class is the largest cosine of its centers.
            center_ND = self.weight_CD.flatten(0, 1)
            cos_BN = cosines(emb_BD, center_ND)
            cos_BCK = cos_BN.view(-1, num_classes, num_centers)
            cos_BC = cos_BCK.max(dim=2).values
            logits_BC = self.scale * cos_BC

            # The target is moved away by the margin, the hardest other classes nearer.
            cos_B1 = cos_BC.gather(1, label_B1)
            hard_cos_B1 = add_margin(
                cos_B1,
                margin,
                easy_margin=self.easy_margin,
            )
            hard_B1 = self.scale * hard_cos_B1
            hard_BC = self._penalise(cos_BC, logits_BC, label_B1, margin)
            hard_BC = hard_BC.scatter(1, label_B1, hard_B1)
            loss = F.cross_entropy(hard_BC, label_B)
            return loss, logits_BC

    def _penalise(
        self,
        cos_BC: Tensor,
        logits_BC: Tensor,
        label_B1: Tensor,
        margin: float | Tensor,
    ) -> Tensor:
        """Replace the logits of the hardest other classes by scale * cos(theta - penalty)."""
        if self.top_k == 0:
            return logits_BC
        penalty_per_margin = self.top_k_penalty / PENALTY_MARGIN
        penalty = penalty_per_margin * torch.as_tensor(margin).float()

        # The target is not one of the other classes, so it must not be among the nearest.
        detached_BC = cos_BC.detach()
        others_BC = detached_BC.scatter(1, label_B1, -torch.inf)
        nearest = others_BC.topk(self.top_k, dim=1)
        class_BH = nearest.indices

        cos_BH = cos_BC.gather(1, class_BH)
        nearer_BH = rotate(cos_BH, -penalty)
        return logits_BC.scatter(1, class_BH, self.scale * nearer_BH)
