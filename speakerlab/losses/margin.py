"""Margin softmax over cosines, additive (AM) and additive angular (AAM), and its trigonometry.

In: emb_BD in any float type, label_B. Out: loss and logits_BC, fp32. Gradients are finite
everywhere, also at cosines of 1 and -1 and for vectors of zeros.

Letters: B batch, C classes, D embedding; x_ND any rows.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from speakerlab.core.full_precision import widened
from speakerlab.losses.head import SoftmaxHead

# The least squared sine. The slope of a square root at 0 is infinite, and vectors with the same
# direction can have a cosine of 1 or just above; this bounds the slope at 1 / sqrt(1e-7) = 3e3.
MIN_SINE_SQUARED = 1e-7

# A vector shorter than this has no direction: its cosines are 0, and so is its gradient. Gradients
# of cosines grow as 1 / length, and would overflow near a length of 0.
MIN_LENGTH = 1e-6


class AMSoftmax(SoftmaxHead):
    """Additive margin softmax, also called CosFace.

    The margin, a cosine, is subtracted from the target's cosine; 0.1 to 0.35 are usual.

    Wang et al., Additive Margin Softmax for Face Verification, IEEE Signal Processing Letters 2018,
    arXiv 1801.05599; Wang et al., CosFace: Large Margin Cosine Loss for Deep Face Recognition, CVPR
    2018, arXiv 1801.09414.
    """

    def __init__(
        self, *, embed_dim: int, num_classes: int, scale: float = 32.0
    ) -> None:
        super().__init__(embed_dim=embed_dim, num_classes=num_classes)
        self.scale = scale

    def prepare(self, x_ND: Tensor) -> Tensor:
        return unit_rows(x_ND)

    def harden(self, similarity: Tensor, margin: float | Tensor) -> Tensor:
        return self.scale * similarity - self.scale * margin


class AAMSoftmax(AMSoftmax):
    """Additive angular margin softmax, also called ArcFace.

    The margin is added to the target's angle; 0.2 rad is usual, 0.5 in large-margin fine-tuning.

    Deng et al., ArcFace: Additive Angular Margin Loss for Deep Face Recognition, CVPR 2019, arXiv
    1801.07698.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_classes: int,
        scale: float = 32.0,
        easy_margin: bool = False,
    ) -> None:
        super().__init__(embed_dim=embed_dim, num_classes=num_classes, scale=scale)
        self.easy_margin = easy_margin

    def harden(self, similarity: Tensor, margin: float | Tensor) -> Tensor:
        hard_similarity = add_margin(
            similarity,
            margin,
            easy_margin=self.easy_margin,
        )
        return self.scale * hard_similarity


def unit_rows(x_ND: Tensor) -> Tensor:
    """Divide each row, in at least fp32, by its length; rows shorter than MIN_LENGTH become 0."""
    x_ND = widened(x_ND)
    length_N1 = x_ND.norm(dim=1, keepdim=True)
    # Divided by infinity, a row is 0 and so is its gradient.
    is_short_N1 = length_N1 < MIN_LENGTH
    divisor_N1 = length_N1.masked_fill(is_short_N1, torch.inf)
    return x_ND / divisor_N1


def cosines(emb_BD: Tensor, weight_CD: Tensor) -> Tensor:
    """Return the cosine of every row with every class, (B, C). Call it with autocast off."""
    unit_BD = unit_rows(emb_BD)
    unit_CD = unit_rows(weight_CD)
    return F.linear(unit_BD, unit_CD)


def rotate(cos: Tensor, angle: Tensor) -> Tensor:
    """Return cos(theta + angle) of cos(theta), theta in [0, pi], with a finite slope everywhere."""
    # The addition theorem needs no arccosine, whose slope at 1 and -1 is infinite.
    sin_squared = 1 - cos.square()
    sin = sin_squared.clamp_min(MIN_SINE_SQUARED).sqrt()
    return cos * angle.cos() - sin * angle.sin()


def add_margin(
    cos: Tensor,
    margin: float | Tensor,
    *,
    easy_margin: bool = False,
) -> Tensor:
    """Return cos(theta + margin) of cos(theta), continued where it would rise again.

    It falls to -1 at theta = pi - margin. From there on the result is cos(theta) + cos(margin) - 1,
    which also starts at -1 and keeps falling, as in WeSpeaker and 3D-Speaker. With `easy_margin`,
    the margin is left out instead where theta is beyond pi / 2.
    """
    margin = torch.as_tensor(margin, dtype=cos.dtype)
    rotated = rotate(cos, margin)
    if easy_margin:
        return torch.where(cos > 0, rotated, cos)
    # The cosine falls with the angle in [0, pi], so theta < pi - margin is the same as
    # cos(theta) > cos(pi - margin) = -cos(margin).
    is_falling = cos > -margin.cos()
    continued = cos + margin.cos() - 1
    return torch.where(is_falling, rotated, continued)
