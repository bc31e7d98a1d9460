"""SphereFace2: large exponents, the shared bias, and refused arguments."""

import pytest
import torch
from refusals import refuses

from speakerlab.losses.sphereface2 import SphereFace2


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
