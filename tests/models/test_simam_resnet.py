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
    torch.testing.assert_close(y_BCFT, torch.full_like(y_BCFT, 7 * sigmoid(0.5)))
    assert x_BCFT.grad is not None and x_BCFT.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_simam_of_large_values_is_computed_in_fp32(dtype):
    """Squares of 1e6 are outside fp16; each value is a deviation from the mean, 0."""
    x_BCFT = torch.tensor([1000.0, -1000.0]).repeat(1, 1, 4, 50).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_BCFT = simam(x_BCFT)
    assert y_BCFT.dtype == dtype
    expected = 1000 * sigmoid(0.25 * 399 / 400 + 0.5)
    assert y_BCFT[..., 0].unique().item() == pytest.approx(expected, rel=4e-3)
