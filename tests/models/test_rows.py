"""Rounding of the operations on rows; test_dense.py compares their results with the plain code.

Letters: B batch, T frames, K channels, G channels that come out, J taps.
"""

import pytest
import torch
from torch.nn import functional as F

from speakerlab.models.cpu.rows import convolve, moments


def by_torch(x_KBT, weight_GKJ, dilation):
    _, _, num_taps = weight_GKJ.shape
    x_BKT = x_KBT.transpose(0, 1)
    y_BGT = F.conv1d(
        x_BKT,
        weight_GKJ,
        padding=num_taps // 2 * dilation,
        dilation=dilation,
    )
    return y_BGT.transpose(0, 1)


def test_in_16_bits_each_sum_is_rounded_once():
    torch.manual_seed(0)
    x_KBT = torch.randn(64, 2, 149, dtype=torch.bfloat16)
    weight_GKJ = torch.randn(8, 64, 3) / 14
    weight_GKJ = weight_GKJ.bfloat16()
    output = convolve(x_KBT, weight_GKJ, dilation=2)
    exact = by_torch(x_KBT.double(), weight_GKJ.double(), dilation=2)
    difference = (output.double() - exact).abs()
    # One rounding to bfloat16 is an error of at most 2**-8.
    size = exact.abs().clamp_min(2**-6)
    error = difference / size
    assert error.max() <= 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moments_are_fp32_and_a_large_mean_costs_no_digits(dtype):
    """The mean of squares minus the square of the mean would be off by more than the variance."""
    large_mean = 5000 if dtype == torch.float32 else 0
    x_KBT = torch.randn(3, 8, 1000) + large_mean
    x_KBT = x_KBT.to(dtype)
    mean_K, var_K = moments(x_KBT)
    assert mean_K.dtype == torch.float32
    assert var_K.dtype == torch.float32
    exact_KBT = x_KBT.double()
    exact_mean_K = exact_KBT.mean((1, 2))
    exact_var_K = exact_KBT.var((1, 2), correction=0)
    error_K = var_K / exact_var_K - 1
    assert error_K.abs().max() < 1e-4
    torch.testing.assert_close(mean_K.double(), exact_mean_K, rtol=1e-5, atol=1e-5)
