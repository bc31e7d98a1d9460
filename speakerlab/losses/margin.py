"""Margin softmax over cosines: additive (AM) and additive angular (AAM).

In: emb_BD in any float type, label_B. Out: loss and logits_BC, fp32.

The margin is an argument of every call, never state, so a schedule is a function of the step alone
and a resumed run needs nothing but the step.

Letters: B batch, C classes, D embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.losses.cosine import at_target, cosines, sines, with_target


class AMSoftmax(nn.Module):
    """Additive margin softmax (Wang et al., Additive Margin Softmax for Face Verification, IEEE
    Signal Processing Letters 2018, arXiv 1801.05599; CosFace: Wang et al., CosFace: Large Margin
    Cosine Loss for Deep Face Recognition, CVPR 2018, arXiv 1801.09414).

    The margin is taken off the target's cosine; 0.1 to 0.35 are usual.
    """

    takes_margin = True

    def __init__(self, *, embed_dim: int, num_classes: int, scale: float = 32.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight_CD = nn.Parameter(torch.empty(num_classes, embed_dim))
        nn.init.xavier_uniform_(self.weight_CD)

    def forward(
        self, emb_BD: Tensor, label_B: Tensor, margin: float | Tensor = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy with `margin` (a cosine), and scale * cosine (B, C) without it."""
        with torch.autocast(emb_BD.device.type, enabled=False):
            logits_BC = self.scale * cosines(emb_BD, self.weight_CD)
            hard_B = at_target(logits_BC, label_B) - self.scale * margin
            return F.cross_entropy(with_target(logits_BC, label_B, hard_B), label_B), logits_BC


class AAMSoftmax(nn.Module):
    """Additive angular margin softmax (Deng et al., ArcFace: Additive Angular Margin Loss for Deep
    Face Recognition, CVPR 2019, arXiv 1801.07698).

    The margin is added to the target's angle; 0.2 rad is usual, 0.5 in large-margin fine-tuning.
    """

    takes_margin = True

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
            cos_BC = cosines(emb_BD, self.weight_CD)
            return margin_loss(
                cos_BC, label_B, margin, scale=self.scale, easy_margin=self.easy_margin
            )


def margin_loss(
    cos_BC: Tensor, label_B: Tensor, margin: float | Tensor, *, scale: float, easy_margin: bool
) -> tuple[Tensor, Tensor]:
    """Loss and logits of fp32 cosines; only the B target cosines meet a square root."""
    logits_BC = scale * cos_BC
    hard_B = scale * add_margin(at_target(cos_BC, label_B), margin, easy_margin=easy_margin)
    return F.cross_entropy(with_target(logits_BC, label_B, hard_B), label_B), logits_BC


def add_margin(cos_B: Tensor, margin: float | Tensor, *, easy_margin: bool) -> Tensor:
    """cos(theta + margin) of cos(theta), continued where it would rise again.

    From theta = pi - margin on, where it is -1, it is cos(theta) + cos(margin) - 1, which is -1
    there too and keeps falling. (The first ArcFace jumped to cos(theta) - margin * sin(margin);
    WeSpeaker and 3D-Speaker do as here.) With `easy_margin` the margin is left out instead
    wherever theta is beyond pi / 2.
    """
    m = torch.as_tensor(margin, dtype=torch.float32)
    shifted_B = cos_B * m.cos() - sines(cos_B) * m.sin()
    if easy_margin:
        return torch.where(cos_B > 0, shifted_B, cos_B)
    return torch.where(cos_B > -m.cos(), shifted_B, cos_B + m.cos() - 1)
