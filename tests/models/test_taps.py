"""A convolution by matrix products against torch's own, and its gradients against autograd's.

Letters: B batch, T frames, K channels, G channels that come out, J taps.
"""

import pytest
import torch
from torch.nn import functional as F

from speakerlab.models.taps import convolve, gradients


def theirs(x_KBT, weight_GKJ, dilation):
    padding = weight_GKJ.shape[2] // 2 * dilation
    y_BGT = F.conv1d(x_KBT.transpose(0, 1), weight_GKJ, padding=padding, dilation=dilation)
    return y_BGT.transpose(0, 1)


@pytest.mark.parametrize(
    ("frames", "taps", "dilation"),
    [(149, 3, 2), (230, 3, 1), (40, 5, 3), (2, 5, 3), (1, 3, 2), (7, 1, 1)],
)
def test_values_and_gradients_are_torchs(frames, taps, dilation):
    torch.manual_seed(0)
    x_KBT = torch.randn(6, 3, frames, dtype=torch.float64, requires_grad=True)
    weight_GKJ = torch.randn(4, 6, taps, dtype=torch.float64, requires_grad=True)
    expected = theirs(x_KBT, weight_GKJ, dilation)
    given = [x_KBT.detach(), weight_GKJ.detach()]
    torch.testing.assert_close(convolve(*given, dilation=dilation), expected.detach())
    grad_GBT = torch.randn_like(expected)
    found = gradients(grad_GBT, *given, dilation=dilation)
    for ours, right in zip(found, torch.autograd.grad(expected, (x_KBT, weight_GKJ), grad_GBT)):
        torch.testing.assert_close(ours, right)


def test_in_16_bits_each_sum_is_rounded_once():
    torch.manual_seed(0)
    x_KBT = torch.randn(64, 2, 149, dtype=torch.bfloat16)
    weight_GKJ = (torch.randn(8, 64, 3) / 14).bfloat16()
    found = convolve(x_KBT, weight_GKJ, dilation=2)
    exact = theirs(x_KBT.double(), weight_GKJ.double(), dilation=2)
    error = (found.double() - exact).abs() / exact.abs().clamp_min(2**-6)
    assert error.max() <= 2**-8
