"""The trigonometry of margins: finite slopes, and the angle plus its margin from 0 to beyond pi.

Letters: B batch, C classes, D embedding.
"""

import math

import pytest
import torch
from torch.nn import functional as F

from speakerlab.losses.margin import add_margin, rotate, unit_rows

ONE_ULP_ABOVE = 1 + 1.2e-7


def test_sine_is_steep_at_the_ends_but_finite():
    cos_B = torch.tensor([ONE_ULP_ABOVE, 1.0, 0.6, 0.0, -1.0, -ONE_ULP_ABOVE], requires_grad=True)
    sin_B = rotate(cos_B, torch.tensor(-math.pi / 2))
    sin_B.sum().backward()
    least = math.sqrt(1e-7)
    expected = [least, least, 0.8, 1.0, least, least]
    assert sin_B.tolist() == pytest.approx(expected, rel=2e-4)
    assert cos_B.grad is not None and cos_B.grad.abs().max() < 4e3
    assert cos_B.grad[2].item() == pytest.approx(-0.6 / 0.8, rel=1e-5)


def test_unit_rows_are_those_of_torch_but_for_rows_without_length():
    x_BD = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unit_rows(x_BD), F.normalize(x_BD))
    assert unit_rows(torch.tensor([[3e-7, 4e-7], [3e-6, 4e-6]])).tolist() == [
        [0, 0],
        pytest.approx([0.6, 0.8], rel=1e-5),
    ]


@pytest.mark.parametrize("margin", [0.1, 0.5, 1.4])
def test_margin_beyond_the_turning_point_keeps_falling(margin):
    theta_B = torch.linspace(0.05, math.pi - 0.005, 500)
    hard_B = add_margin(theta_B.cos(), margin, easy_margin=False)
    near = theta_B < math.pi - margin
    torch.testing.assert_close(hard_B[near], (theta_B[near] + margin).cos(), atol=1e-5, rtol=0)
    straight = theta_B[~near].cos() + math.cos(margin) - 1
    torch.testing.assert_close(hard_B[~near], straight, atol=1e-6, rtol=0)
    assert (hard_B < theta_B.cos()).all()
    assert (hard_B.diff() < 0).all()
    assert hard_B.diff().min() > -0.01  # no jump: the cosine of a step of 6 mrad


def test_easy_margin_leaves_obtuse_angles_alone():
    theta_B = torch.tensor([0.3, 1.5, 1.7, 3.0])
    easy_B = add_margin(theta_B.cos(), 0.5, easy_margin=True)
    expected = [math.cos(0.8), math.cos(2.0), math.cos(1.7), math.cos(3.0)]
    assert easy_B.tolist() == pytest.approx(expected, abs=1e-6)
