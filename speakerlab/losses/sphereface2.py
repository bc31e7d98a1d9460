"""SphereFace2: a binary decision for every class instead of one choice among all.

Letters: B batch, C classes, D embedding.
"""

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Interval
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import autocast_off
from speakerlab.losses.head import Head
from speakerlab.losses.margin import add_margin, cosines, rotate


class SphereFace2(Head):
    """SphereFace2: each class is a yes-or-no question.

    Wen et al., SphereFace2: Binary Classification is All You Need for Deep Face Recognition,
    ICLR 2022, arXiv 2108.01513; for speakers: Han et al., Exploring Binary Classification Loss for
    Speaker Verification, ICASSP 2023, arXiv 2307.08205.

    With g(z) = 2 ((z + 1) / 2)^exponent - 1, the target adds
    positive_weight * softplus(-(scale * p + bias)), and every other class
    (1 - positive_weight) * softplus(scale * n + bias), where
    type A (additive angle): p = g(cos(theta + margin)), n = g(cos(theta - margin));
    type C (additive cosine): p = g(cos(theta)) - margin, n = g(cos(theta)) + margin.
    All classes share one bias. Usual margins are 0.2 for type C and 0.15 for type A; in
    large-margin fine-tuning 0.3 and 0.25.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_classes: int,
        scale: float = 32.0,
        margin_type: Literal["A", "C"] = "C",
        positive_weight: Annotated[float, Interval(gt=0, lt=1)] = 0.7,
        exponent: Annotated[int, Ge(1)] = 3,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.margin_type = margin_type
        self.positive_weight = positive_weight
        self.exponent = exponent
        weight_CD = torch.empty(num_classes, embed_dim)
        self.weight_CD = nn.Parameter(weight_CD)
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.xavier_uniform_(self.weight_CD)

    def forward(
        self,
        emb_BD: Tensor,
        label_B: Tensor,
        margin: float | Tensor = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss with `margin`, and scale * cosine (B, C) without it.

        margin: for type A an angle in radians, for type C a difference of values of g.
        """
        label_B1 = label_B.unsqueeze(1)
        with autocast_off(emb_BD):
            cos_BC = cosines(emb_BD, self.weight_CD)
            cos_B1 = cos_BC.gather(1, label_B1)

            # The margin makes both questions harder: the target's value is lowered, the others'
            # values are raised.
            margin = torch.as_tensor(margin, dtype=torch.float32)
            if self.margin_type == "A":
                hard_cos_B1 = add_margin(cos_B1, margin)
                positive_B1 = self._spread(hard_cos_B1)
                negative_BC = self._spread(rotate(cos_BC, -margin))
            else:
                positive_B1 = self._spread(cos_B1) - margin
                negative_BC = self._spread(cos_BC) + margin

            target_logit_B1 = self.scale * positive_B1 + self.bias
            target_loss_B1 = F.softplus(-target_logit_B1)
            target_loss_B = target_loss_B1.squeeze(1)

            # A logit of -inf takes the target out of the sum: softplus 0, slope 0.
            logits_BC = self.scale * negative_BC + self.bias
            logits_BC = logits_BC.scatter(1, label_B1, -torch.inf)
            others_loss_B = F.softplus(logits_BC).sum(dim=1)

            # The weight balances one target with many other classes.
            weight = self.positive_weight
            loss_B = weight * target_loss_B + (1 - weight) * others_loss_B
            return loss_B.mean(), self.scale * cos_BC

    def _spread(self, cos: Tensor) -> Tensor:
        """Return g of cosines; it spreads cosines near 0, where most are, over [-1, 1]."""
        between_0_and_1 = (cos + 1) / 2
        return 2 * between_0_and_1.pow(self.exponent) - 1
