"""SimAM-ResNet: precision and gradient of the attention.

Letters: B batch, T frames, F mel bins, C channels.
"""

import math

import pytest
import torch

from speakerlab.models.simam_resnet import simam


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_simam_of_a_constant_map_is_even():
    x_BCFT = torch.full((1, 2, 3, 4), 7.0, requires_grad=True)
    y_BCFT = simam(x_BCFT)
    y_BCFT.sum().backward()
    # Every value is the mean: the inverse energy is 1/2 everywhere.
    value = 7 * sigmoid(0.5)
    expected = torch.full_like(y_BCFT, value)
    torch.testing.assert_close(y_BCFT, expected)
    assert x_BCFT.grad is not None
    assert x_BCFT.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_simam_of_large_values_is_computed_in_fp32(dtype):
    """Squares of 1e6 are outside fp16; each value is a deviation from the mean, 0."""
    values = torch.tensor([1000.0, -1000.0])
    x_BCFT = values.repeat(1, 1, 4, 50).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y_BCFT = simam(x_BCFT)
    assert y_BCFT.dtype == dtype
    # (x - mean)^2 / (4 variance) + 1/2, with the unbiased variance of 400 values.
    attention = sigmoid(0.25 * 399 / 400 + 0.5)
    expected = 1000 * attention
    output = y_BCFT[..., 0].unique().item()
    assert output == pytest.approx(expected, rel=4e-3)
