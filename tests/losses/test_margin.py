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
    ends = [ONE_ULP_ABOVE, 1.0, 0.6, 0.0, -1.0, -ONE_ULP_ABOVE]
    cos_B = torch.tensor(ends, requires_grad=True)
    quarter_turn = torch.tensor(-math.pi / 2)
    sin_B = rotate(cos_B, quarter_turn)
    sin_B.sum().backward()
    least = math.sqrt(1e-7)
    expected = [least, least, 0.8, 1.0, least, least]
    assert sin_B.tolist() == pytest.approx(expected, rel=2e-4)

    slope_B = cos_B.grad
    assert slope_B is not None
    assert slope_B.abs().max() < 4e3
    # The slope of the sine by the cosine is -cos / sin.
    slope = slope_B[2].item()
    assert slope == pytest.approx(-0.6 / 0.8, rel=1e-5)


def test_unit_rows_are_those_of_torch_but_for_rows_without_length():
    generator = torch.Generator().manual_seed(0)
    x_BD = torch.randn(5, 7, generator=generator)
    assert torch.equal(unit_rows(x_BD), F.normalize(x_BD))

    too_short_D = [3e-7, 4e-7]
    short_D = [3e-6, 4e-6]
    tiny_BD = torch.tensor([too_short_D, short_D])
    zeros, direction = unit_rows(tiny_BD).tolist()
    assert zeros == [0, 0]
    assert direction == pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.parametrize("margin", [0.1, 0.5, 1.4])
def test_margin_beyond_the_turning_point_keeps_falling(margin):
    theta_B = torch.linspace(0.05, math.pi - 0.005, 500)
    cos_B = theta_B.cos()
    hard_B = add_margin(cos_B, margin, easy_margin=False)

    # Up to pi - margin, the cosine of the angle plus the margin.
    is_near = theta_B < math.pi - margin
    rotated = (theta_B[is_near] + margin).cos()
    torch.testing.assert_close(hard_B[is_near], rotated, atol=1e-5, rtol=0)

    # Beyond it, the cosine minus a constant.
    is_far = ~is_near
    straight = cos_B[is_far] + math.cos(margin) - 1
    torch.testing.assert_close(hard_B[is_far], straight, atol=1e-6, rtol=0)

    assert (hard_B < cos_B).all()
    steps_B = hard_B.diff()
    assert (steps_B < 0).all()
    assert steps_B.min() > -0.01  # no jump: the cosine of a step of 6 mrad


def test_easy_margin_leaves_obtuse_angles_alone():
    angles = [0.3, 1.5, 1.7, 3.0]
    cos_B = torch.tensor(angles).cos()
    easy_B = add_margin(cos_B, 0.5, easy_margin=True)
    expected_angles = [0.8, 2.0, 1.7, 3.0]
    expected = [math.cos(angle) for angle in expected_angles]
    assert easy_B.tolist() == pytest.approx(expected, abs=1e-6)
