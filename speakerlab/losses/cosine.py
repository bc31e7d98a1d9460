"""Cosines that can be differentiated everywhere, and what the heads do with those of the target.

In: emb_BD in any float type, weights. Out: fp32, with finite slopes also at cosines of 1 and -1
and for vectors of zeros. To be called with autocast off.

Letters: B batch, C classes, D embedding.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

# The least squared sine. The slope of a square root at 0 is infinite, and vectors that point the
# same way do give a cosine of 1 or just above; this bounds the slope at 1 / sqrt(1e-7) = 3e3.
MIN_SINE_SQUARED = 1e-7

# A vector shorter than this has no direction: its cosines are 0 and so is its gradient, which
# grows as 1 / length and of a vector of zeros would leave the range of fp16, or fill that of fp32.
MIN_LENGTH = 1e-6


def cosines(emb_BD: Tensor, weight_CD: Tensor) -> Tensor:
    """The cosine of every row with every class, (B, C)."""
    return F.linear(unit_rows(emb_BD), unit_rows(weight_CD))


def unit_rows(x_BD: Tensor) -> Tensor:
    """Each row, at least in fp32, divided by its length; zeros if that is below MIN_LENGTH."""
    x_BD = at_least_fp32(x_BD)
    length_B1 = x_BD.norm(dim=1, keepdim=True)
    return x_BD / length_B1.masked_fill(length_B1 < MIN_LENGTH, torch.inf)


def at_least_fp32(x: Tensor) -> Tensor:
    """fp32 of all narrower types; fp64, which only tests of exactness use, stays what it is."""
    return x if x.dtype == torch.float64 else x.float()


def sines(cos: Tensor) -> Tensor:
    """sin(theta) of cos(theta) for theta in [0, pi]; never quite 0, so that its slope is finite."""
    return (1 - cos.square()).clamp_min(MIN_SINE_SQUARED).sqrt()


def at_target(x_BC: Tensor, label_B: Tensor) -> Tensor:
    """The value of each row at its label, (B,)."""
    return x_BC.gather(1, label_B.unsqueeze(1)).squeeze(1)


def with_target(x_BC: Tensor, label_B: Tensor, value_B: Tensor) -> Tensor:
    """A copy in which each row has `value_B` at its label."""
    return x_BC.scatter(1, label_B.unsqueeze(1), value_B.unsqueeze(1))
