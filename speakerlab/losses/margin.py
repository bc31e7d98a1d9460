"""Margin softmax over cosines: additive (AM) and additive angular (AAM).

In: emb_BD in any float type, label_B. Out: loss and logits_BC, fp32.

The margin is an argument of every call, never state, so a schedule is a function of the step alone
and a resumed run needs nothing but the step.

Letters: B batch, D embedding; x_ND any rows.
"""

import torch
from torch import Tensor

from speakerlab.losses.cosine import sines, unit_rows
from speakerlab.losses.head import SoftmaxHead


class AMSoftmax(SoftmaxHead):
    """Additive margin softmax (Wang et al., Additive Margin Softmax for Face Verification, IEEE
    Signal Processing Letters 2018, arXiv 1801.05599; CosFace: Wang et al., CosFace: Large Margin
    Cosine Loss for Deep Face Recognition, CVPR 2018, arXiv 1801.09414).

    The margin, a cosine, is taken off the target's cosine; 0.1 to 0.35 are usual.
    """

    takes_margin = True

    def __init__(self, *, embed_dim: int, num_classes: int, scale: float = 32.0) -> None:
        super().__init__(embed_dim=embed_dim, num_classes=num_classes)
        self.scale = scale

    def prepare(self, x_ND: Tensor) -> Tensor:
        return unit_rows(x_ND)

    def harden(self, similarity_B: Tensor, margin: float | Tensor) -> Tensor:
        return self.scale * similarity_B - self.scale * margin


class AAMSoftmax(AMSoftmax):
    """Additive angular margin softmax (Deng et al., ArcFace: Additive Angular Margin Loss for Deep
    Face Recognition, CVPR 2019, arXiv 1801.07698).

    The margin is added to the target's angle; 0.2 rad is usual, 0.5 in large-margin fine-tuning.
    """

    takes_margin = True

    def __init__(
        self, *, embed_dim: int, num_classes: int, scale: float = 32.0, easy_margin: bool = False
    ) -> None:
        super().__init__(embed_dim=embed_dim, num_classes=num_classes, scale=scale)
        self.easy_margin = easy_margin

    def harden(self, similarity_B: Tensor, margin: float | Tensor) -> Tensor:
        return self.scale * add_margin(similarity_B, margin, easy_margin=self.easy_margin)


def add_margin(cos_B: Tensor, margin: float | Tensor, *, easy_margin: bool) -> Tensor:
    """cos(theta + margin) of cos(theta), continued where it would rise again.

    From theta = pi - margin on, where it is -1, it is cos(theta) + cos(margin) - 1, which is -1
    there too and keeps falling. (The first ArcFace jumped to cos(theta) - margin * sin(margin);
    WeSpeaker and 3D-Speaker do as here.) With `easy_margin` the margin is left out instead
    wherever theta is beyond pi / 2.
    """
    m = torch.as_tensor(margin, dtype=cos_B.dtype)
    shifted_B = cos_B * m.cos() - sines(cos_B) * m.sin()
    if easy_margin:
        return torch.where(cos_B > 0, shifted_B, cos_B)
    return torch.where(cos_B > -m.cos(), shifted_B, cos_B + m.cos() - 1)
