"""SphereFace2: both margin types by hand, and where the published form overflows."""

import math

import pytest
import torch
from refusals import refuses

from speakerlab.losses.sphereface2 import SphereFace2


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def g(z: float) -> float:
    return 2 * ((z + 1) / 2) ** 3 - 1


def make_plane(theta: float, **args) -> tuple[SphereFace2, torch.Tensor]:
    """Two classes at right angles, the row at theta from class 0; a bias of 0.5."""
    head = SphereFace2(embed_dim=2, num_classes=2, scale=8.0, **args)
    with torch.no_grad():
        head.weight_CD.copy_(torch.tensor([[3.0, 0.0], [0.0, 0.5]]))
        head.bias.fill_(0.5)
    return head, torch.tensor([[2 * math.cos(theta), 2 * math.sin(theta)]])


@pytest.mark.parametrize(
    ("margin_type", "positive", "negative"),
    [
        ("A", g(math.cos(0.6 + 0.15)), g(math.cos(math.pi / 2 - 0.6 - 0.15))),
        ("C", g(math.cos(0.6)) - 0.15, g(math.sin(0.6)) + 0.15),
    ],
)
def test_two_classes_by_hand(margin_type, positive, negative):
    head, emb_BD = make_plane(0.6, margin_type=margin_type)
    loss, logits_BC = head(emb_BD, torch.tensor([0]), 0.15)
    expected = 0.7 * softplus(-(8 * positive + 0.5)) + 0.3 * softplus(8 * negative + 0.5)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert logits_BC[0].tolist() == pytest.approx([8 * math.cos(0.6), 8 * math.sin(0.6)], rel=1e-6)


@pytest.mark.parametrize("margin_type", ["A", "C"])
def test_exponentials_do_not_overflow(margin_type):
    head = SphereFace2(embed_dim=2, num_classes=2, scale=500.0, margin_type=margin_type)
    with torch.no_grad():
        head.weight_CD.copy_(torch.eye(2))
    emb_BD = torch.tensor([[-1.0, 0.1]], requires_grad=True)  # exp(500) is no number in fp32
    loss, _ = head(emb_BD, torch.tensor([0]), 0.2)
    loss.backward()
    assert 0.7 * 480 < loss.item() < 0.7 * 620
    assert emb_BD.grad is not None and emb_BD.grad.isfinite().all()


def test_the_bias_is_one_for_all_classes():
    head = SphereFace2(embed_dim=4, num_classes=3)
    assert {name: tuple(p.shape) for name, p in head.named_parameters()} == {
        "weight_CD": (3, 4),
        "bias": (),
    }


@pytest.mark.parametrize("args", [{"positive_weight": 1}, {"exponent": 0}])
def test_impossible_values_are_refused(args):
    with refuses("sphereface2", *args, *args.values()):
        SphereFace2(embed_dim=4, num_classes=3, **args)
