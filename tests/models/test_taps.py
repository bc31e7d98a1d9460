"""Convolution and context of a dense layer by matrix products against torch's own convolution.

Letters: B batch, T frames, K channels, G channels that come out, J taps, S segments.
"""

import pytest
import torch
from torch.nn import functional as F

from speakerlab.models.pooling import segment_context, segment_members
from speakerlab.models.taps import convolve_with_context


@pytest.mark.parametrize(
    ("frames", "taps", "dilation"),
    [(149, 3, 2), (230, 3, 1), (100, 3, 1), (40, 5, 3), (2, 5, 3), (1, 3, 2), (7, 1, 1)],
)
def test_values_and_gradients_are_torchs(frames, taps, dilation):
    torch.manual_seed(0)
    x_KBT = torch.randn(6, 3, frames, dtype=torch.float64, requires_grad=True)
    weight_GKJ = torch.randn(4, 6, taps, dtype=torch.float64, requires_grad=True)
    members_TS = segment_members(frames, 100, like=x_KBT)

    def theirs():
        x_BKT = x_KBT.transpose(0, 1)
        y_BGT = F.conv1d(x_BKT, weight_GKJ, padding=taps // 2 * dilation, dilation=dilation)
        return y_BGT.transpose(0, 1), segment_context(x_KBT, members_TS)

    ours = convolve_with_context(x_KBT, weight_GKJ, dilation=dilation, members_TS=members_TS)
    expected = theirs()
    torch.testing.assert_close(ours, expected)
    weights = [torch.randn_like(y) for y in expected]
    for found, right in zip(
        torch.autograd.grad(ours, (x_KBT, weight_GKJ), weights),
        torch.autograd.grad(expected, (x_KBT, weight_GKJ), weights),
    ):
        torch.testing.assert_close(found, right)


def test_in_16_bits_each_sum_is_rounded_once():
    torch.manual_seed(0)
    x_KBT = torch.randn(64, 2, 149, dtype=torch.bfloat16)
    weight_GKJ = (torch.randn(8, 64, 3) / 14).bfloat16()
    members_TS = segment_members(149, 100, like=x_KBT)
    found, _ = convolve_with_context(x_KBT, weight_GKJ, dilation=2, members_TS=members_TS)
    x_BKT, wide = x_KBT.transpose(0, 1).double(), weight_GKJ.double()
    exact = F.conv1d(x_BKT, wide, padding=2, dilation=2).transpose(0, 1)
    error = (found.double() - exact).abs() / exact.abs().clamp_min(2**-6)
    assert error.max() <= 2**-8
