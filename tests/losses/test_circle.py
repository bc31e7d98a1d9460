"""Circle loss: by hand, its boundary, and the gradient that the paper derives.

Letters: B batch, C classes, D embedding.
"""

import math

import pytest
import torch

from speakerlab.losses.circle import CircleLoss

SCALE = 8.0
MARGIN = 0.25
LABEL_B = torch.tensor([0])


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def make_plane(theta: float) -> tuple[CircleLoss, torch.Tensor]:
    """Two classes at right angles, the row at theta from class 0."""
    head = CircleLoss(embed_dim=2, num_classes=2, scale=SCALE)
    first_D = [3.0, 0.0]
    second_D = [0.0, 0.5]
    with torch.no_grad():
        head.weight_CD.copy_(torch.tensor([first_D, second_D]))
    x, y = math.cos(theta), math.sin(theta)
    emb_BD = 2 * torch.tensor([[x, y]])
    return head, emb_BD


@pytest.mark.parametrize("theta", [0.1, 0.6, 1.3])
def test_two_classes_are_a_circle_by_hand(theta):
    head, emb_BD = make_plane(theta)
    loss, logits_BC = head(emb_BD, LABEL_B, MARGIN)
    s_p = math.cos(theta)
    s_n = math.sin(theta)
    logit_p, logit_n = logits_BC[0].tolist()
    assert logit_p == pytest.approx(SCALE * s_p, rel=1e-6)
    assert logit_n == pytest.approx(SCALE * s_n, rel=1e-6)

    # From the circle, which is the boundary.
    square_radius = 2 * MARGIN**2
    distance = s_n**2 + (1 - s_p) ** 2 - square_radius
    expected = softplus(SCALE * distance)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_a_class_beyond_its_optimum_counts_nothing():
    # s_n = -0.78, below -margin: weight 0, logit 0.
    head, emb_BD = make_plane(-0.9)
    loss, _ = head(emb_BD, LABEL_B, MARGIN)
    s_p = math.cos(0.9)
    weight = 1 + MARGIN - s_p
    distance = s_p - (1 - MARGIN)
    expected = softplus(-SCALE * weight * distance)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_weights_are_constant_in_the_gradient():
    torch.manual_seed(0)
    head = CircleLoss(embed_dim=6, num_classes=4, scale=SCALE)
    emb_BD = torch.randn(1, 6, requires_grad=True)
    label_B = torch.tensor([2])
    loss, logits_BC = head(emb_BD, label_B, MARGIN)
    cos_C = (logits_BC / SCALE)[0]
    (actual,) = torch.autograd.grad(loss, emb_BD, retain_graph=True)

    # The gradient of the loss by each cosine, with the weights as constants; z is Z of equation 10.
    s_C = cos_C.detach().double()
    s_p = s_C[2]
    others = torch.tensor([0, 1, 3])
    s_n = s_C[others]
    weight_p = 1 + MARGIN - s_p
    weight_n = (s_n + MARGIN).relu()
    logit_n = SCALE * weight_n * (s_n - MARGIN)
    term = logit_n.exp()
    exact_loss = loss.detach().double()
    z = 1 - torch.exp(-exact_loss)
    by_cosine = torch.zeros_like(s_C)
    by_cosine[others] = z * term / term.sum() * SCALE * weight_n
    by_cosine[2] = -z * SCALE * weight_p
    gradient_C = by_cosine.float()
    (expected,) = torch.autograd.grad(cos_C, emb_BD, gradient_C)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
