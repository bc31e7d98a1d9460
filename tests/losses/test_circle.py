"""Circle loss: by hand, its boundary, and the gradient that the paper derives.

Letters: B batch, C classes, D embedding.
"""

import math

import pytest
import torch

from speakerlab.losses.circle import CircleLoss

SCALE, MARGIN = 8.0, 0.25


def make_plane(theta: float) -> tuple[CircleLoss, torch.Tensor]:
    """Two classes at right angles, the row at theta from class 0."""
    head = CircleLoss(embed_dim=2, num_classes=2, scale=SCALE)
    with torch.no_grad():
        head.weight_CD.copy_(torch.tensor([[3.0, 0.0], [0.0, 0.5]]))
    return head, torch.tensor([[2 * math.cos(theta), 2 * math.sin(theta)]])


@pytest.mark.parametrize("theta", [0.1, 0.6, 1.3])
def test_two_classes_are_a_circle_by_hand(theta):
    head, emb_BD = make_plane(theta)
    loss, logits_BC = head(emb_BD, torch.tensor([0]), MARGIN)
    s_p, s_n = math.cos(theta), math.sin(theta)
    distance = s_n**2 + (1 - s_p) ** 2 - 2 * MARGIN**2  # from the circle, which is the boundary
    assert loss.item() == pytest.approx(math.log1p(math.exp(SCALE * distance)), rel=1e-5)
    assert logits_BC[0].tolist() == pytest.approx([SCALE * s_p, SCALE * s_n], rel=1e-6)


def test_a_class_beyond_its_optimum_counts_nothing():
    head, emb_BD = make_plane(-0.9)  # s_n = -0.78, below -margin: weight 0, logit 0
    loss, _ = head(emb_BD, torch.tensor([0]), MARGIN)
    s_p = math.cos(0.9)
    logit = SCALE * (1 + MARGIN - s_p) * (s_p - (1 - MARGIN))
    assert loss.item() == pytest.approx(math.log1p(math.exp(-logit)), rel=1e-5)


def test_weights_are_constant_in_the_gradient():
    torch.manual_seed(0)
    head = CircleLoss(embed_dim=6, num_classes=4, scale=SCALE)
    emb_BD, label_B = torch.randn(1, 6, requires_grad=True), torch.tensor([2])
    loss, logits_BC = head(emb_BD, label_B, MARGIN)
    cos_C = (logits_BC / SCALE)[0]
    actual = torch.autograd.grad(loss, emb_BD, retain_graph=True)[0]

    s_C = cos_C.detach().double()
    others = torch.tensor([0, 1, 3])
    term = (SCALE * (s_C[others] + MARGIN).relu() * (s_C[others] - MARGIN)).exp()
    z = 1 - torch.exp(-loss.detach().double())  # Z of equation 10
    by_cosine = torch.zeros(4, dtype=torch.float64)
    by_cosine[others] = z * term / term.sum() * SCALE * (s_C[others] + MARGIN).relu()
    by_cosine[2] = -z * SCALE * (1 + MARGIN - s_C[2])
    expected = torch.autograd.grad(cos_C, emb_BD, by_cosine.float())[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
