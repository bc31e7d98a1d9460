"""Margin softmax over cosines.

In: emb_BD in any float type, label_B. Out: loss and logits_BC, fp32.

The margin is an argument of every call, never state, so a schedule is a function of the step alone
and a resumed run needs nothing but the step.

Letters: B batch, C classes, D embedding.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The least squared sine. The slope of a square root at 0 is infinite, and vectors that point the
# same way do give a cosine of 1 or just above; this bounds the slope at 1 / sqrt(1e-7) = 3e3.
MIN_SINE_SQUARED = 1e-7


class AAMSoftmax(nn.Module):
    """Additive angular margin softmax (ArcFace: Deng et al., CVPR 2019, arXiv 1801.07698)."""

    def __init__(
        self, *, embed_dim: int, num_classes: int, scale: float = 32.0, easy_margin: bool = False
    ) -> None:
        super().__init__()
        self.scale = scale
        self.easy_margin = easy_margin
        self.weight_CD = nn.Parameter(torch.empty(num_classes, embed_dim))
        nn.init.xavier_uniform_(self.weight_CD)

    def forward(
        self, emb_BD: Tensor, label_B: Tensor, margin: float | Tensor = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy with `margin` (radians), and scale * cosine (B, C) without it.

        The logits carry no margin, so that an accuracy made from them is that of the classifier.
        """
        with torch.autocast(emb_BD.device.type, enabled=False):
            cos_BC = F.linear(F.normalize(emb_BD.float()), F.normalize(self.weight_CD.float()))
            return margin_loss(
                cos_BC, label_B, margin, scale=self.scale, easy_margin=self.easy_margin
            )


def margin_loss(
    cos_BC: Tensor, label_B: Tensor, margin: float | Tensor, *, scale: float, easy_margin: bool
) -> tuple[Tensor, Tensor]:
    """Loss and logits of fp32 cosines; only the B target cosines meet a square root."""
    logits_BC = scale * cos_BC
    target_B1 = label_B.unsqueeze(1)
    cos_B = cos_BC.gather(1, target_B1).squeeze(1)
    hard_B = scale * add_margin(cos_B, margin, easy_margin=easy_margin)
    loss = F.cross_entropy(logits_BC.scatter(1, target_B1, hard_B.unsqueeze(1)), label_B)
    return loss, logits_BC


def add_margin(cos_B: Tensor, margin: float | Tensor, *, easy_margin: bool) -> Tensor:
    """cos(theta + margin) of cos(theta), continued where it would rise again.

    Beyond theta = pi - margin it is cos(theta) - margin * sin(margin), which keeps falling. With
    `easy_margin` the margin is left out instead wherever theta is beyond pi / 2.
    """
    m = torch.as_tensor(margin, dtype=torch.float32)
    sin_B = (1 - cos_B.square()).clamp_min(MIN_SINE_SQUARED).sqrt()
    shifted_B = cos_B * m.cos() - sin_B * m.sin()
    if easy_margin:
        return torch.where(cos_B > 0, shifted_B, cos_B)
    return torch.where(cos_B > (math.pi - m).cos(), shifted_B, cos_B - m * m.sin())
