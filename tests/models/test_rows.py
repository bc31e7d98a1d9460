"""Rounding of the operations on rows; test_dense.py compares their results with the plain code.

Letters: B batch, T frames, K channels, G channels that come out, J taps.
"""

import pytest
import torch
from torch.nn import functional as F

from speakerlab.models.cpu.rows import convolve, moments


def by_torch(x_KBT, weight_GKJ, dilation):
    padding = weight_GKJ.shape[2] // 2 * dilation
    y_BGT = F.conv1d(x_KBT.transpose(0, 1), weight_GKJ, padding=padding, dilation=dilation)
    return y_BGT.transpose(0, 1)


def test_in_16_bits_each_sum_is_rounded_once():
    torch.manual_seed(0)
    x_KBT = torch.randn(64, 2, 149, dtype=torch.bfloat16)
    weight_GKJ = (torch.randn(8, 64, 3) / 14).bfloat16()
    found = convolve(x_KBT, weight_GKJ, dilation=2)
    exact = by_torch(x_KBT.double(), weight_GKJ.double(), dilation=2)
    error = (found.double() - exact).abs() / exact.abs().clamp_min(2**-6)
    assert error.max() <= 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moments_are_fp32_and_a_large_mean_costs_no_digits(dtype):
    """The mean of squares minus the square of the mean would be off by more than the variance."""
    x_KBT = (torch.randn(3, 8, 1000) + (5000 if dtype == torch.float32 else 0)).to(dtype)
    mean_K, var_K = moments(x_KBT)
    exact = x_KBT.double().var((1, 2), correction=0)
    assert mean_K.dtype == var_K.dtype == torch.float32
    assert (var_K / exact - 1).abs().max() < 1e-4
    torch.testing.assert_close(mean_K.double(), x_KBT.double().mean((1, 2)), rtol=1e-5, atol=1e-5)
