"""Plain softmax refuses a margin."""

import pytest
import torch
from refusals import refuses

from speakerlab.losses.head import Softmax


@pytest.mark.parametrize("margin", [0.2, torch.tensor(0.2)])
def test_a_margin_is_refused(margin):
    head = Softmax(embed_dim=4, num_classes=3)
    with refuses("softmax", 0.2):
        head(torch.randn(2, 4), torch.tensor([0, 1]), margin)
