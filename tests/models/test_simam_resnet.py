"""SimAM-ResNet: the attention by hand, its precision, and the pooling.

Letters: B batch, T frames, F mel bins, C channels.
"""

import math

import pytest
import torch
from torch import nn

from speakerlab.models.simam_resnet import AttentivePooling, simam


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_simam_by_hand():
    """Of 1, 2, 3, 6: mean 3, unbiased variance (4 + 1 + 0 + 9) / 3."""
    x_BCFT = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]])
    scale = 4 * (14 / 3 + 1e-4)
    expected = [x * sigmoid((x - 3) ** 2 / scale + 0.5) for x in (1, 2, 3, 6)]
    assert simam(x_BCFT).flatten().tolist() == pytest.approx(expected, rel=1e-6)


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


@torch.no_grad()
def test_pooling_follows_its_scores():
    """The scores of the first channel are made high where the channel is: its mean rises."""
    pool = AttentivePooling(2).eval()
    for parameter in pool.parameters():
        nn.init.zeros_(parameter)
    nn.init.ones_(pool.get_parameter("attention.2.weight"))
    pool.get_parameter("attention.0.weight")[0, 0] = 1.0
    pool.get_parameter("attention.3.weight")[0, 0] = 2.0
    x_BCT = torch.tensor([[[0.0, 1.0], [0.0, 1.0]]])
    share = sigmoid(2.0)  # of the second frame; BatchNorm, of initial statistics, changes 1e-5
    expected = [share, 0.5, (share * (1 - share)) ** 0.5, 0.5]
    assert pool(x_BCT)[0].tolist() == pytest.approx(expected, rel=1e-4)
