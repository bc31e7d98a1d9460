"""Plain softmax, by hand; it refuses a margin."""

import math

import pytest
import torch
from refusals import refuses

from speakerlab.losses.head import Softmax


def test_two_classes_by_hand():
    head = Softmax(embed_dim=2, num_classes=2)
    with torch.no_grad():
        head.weight_CD.copy_(torch.tensor([[1.0, 0.0], [0.5, 2.0]]))
        head.bias_C.copy_(torch.tensor([0.1, -0.3]))
    loss, logits_BC = head(torch.tensor([[2.0, -1.0]]), torch.tensor([0]))
    assert logits_BC[0].tolist() == pytest.approx([2.1, -1.3])
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1.3 - 2.1)), rel=1e-5)


@pytest.mark.parametrize("margin", [0.2, torch.tensor(0.2)])
def test_a_margin_is_refused(margin):
    head = Softmax(embed_dim=4, num_classes=3)
    with refuses("softmax", 0.2):
        head(torch.randn(2, 4), torch.tensor([0, 1]), margin)
