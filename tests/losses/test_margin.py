"""The margin head: hand-computed cases, and finite gradients where a plain formula has none.

Letters: B batch, C classes, D embedding.
"""

import math

import pytest
import torch
from torch.nn import functional as F

from speakerlab.losses import HEADS
from speakerlab.losses.margin import AAMSoftmax, add_margin, margin_loss

ONE_ULP_ABOVE = 1 + 1.2e-7
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("margin", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("place", [0, 1], ids=["target", "non-target"])
@pytest.mark.parametrize("easy_margin", [False, True])
@pytest.mark.parametrize("cosine", [1.0, -1.0, ONE_ULP_ABOVE, -ONE_ULP_ABOVE, 0.0])
def test_gradient_is_finite_at_every_cosine(cosine, easy_margin, place, margin):
    cos_BC = torch.tensor([[0.3, 0.1, -0.2]])
    cos_BC[0, place] = cosine
    cos_BC.requires_grad_()
    loss, logits_BC = margin_loss(
        cos_BC, torch.tensor([0]), margin, scale=32.0, easy_margin=easy_margin
    )
    loss.backward()
    assert loss.isfinite() and logits_BC.isfinite().all()
    assert cos_BC.grad is not None and cos_BC.grad.isfinite().all()


@pytest.mark.parametrize("margin", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_is_finite_for_embeddings_on_a_weight(dtype, margin):
    torch.manual_seed(0)
    head = AAMSoftmax(embed_dim=24, num_classes=200)
    weight_CD = head.weight_CD.detach()
    along = weight_CD[:100] * 7.3  # cosine 1 to a rounding, with the target ...
    against = -weight_CD[:100]  # ... and -1
    across = weight_CD[100:]  # cosine 1 with a class that is not the target
    emb_BD = torch.cat([along, against, across]).to(dtype).requires_grad_()
    loss, logits_BC = head(emb_BD, torch.arange(100).repeat(3), margin)
    loss.backward()
    assert loss.dtype == logits_BC.dtype == torch.float32
    assert emb_BD.grad is not None and emb_BD.grad.isfinite().all()
    assert head.weight_CD.grad is not None and head.weight_CD.grad.isfinite().all()


def test_two_classes_by_hand():
    head = AAMSoftmax(embed_dim=2, num_classes=2, scale=10.0)
    with torch.no_grad():
        head.weight_CD.copy_(torch.tensor([[3.0, 0.0], [0.0, 0.5]]))
    theta = 0.6  # radians between the embedding and class 0; pi / 2 - 0.6 to class 1
    emb_BD = torch.tensor([[2 * math.cos(theta), 2 * math.sin(theta)]])
    loss, logits_BC = head(emb_BD, torch.tensor([0]), 0.2)

    target, other = 10 * math.cos(theta + 0.2), 10 * math.sin(theta)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(other - target)), rel=1e-5)
    assert logits_BC[0].tolist() == pytest.approx([10 * math.cos(theta), other], rel=1e-6)


def test_margin_zero_is_cross_entropy_of_the_scaled_cosines():
    torch.manual_seed(1)
    head = AAMSoftmax(embed_dim=16, num_classes=9, scale=30.0)
    emb_BD, label_B = torch.randn(12, 16), torch.randint(9, (12,))
    loss, logits_BC = head(emb_BD, label_B)
    cosine_BC = F.cosine_similarity(emb_BD.unsqueeze(1), head.weight_CD.unsqueeze(0), dim=2)
    torch.testing.assert_close(logits_BC, 30 * cosine_BC)
    assert loss.item() == F.cross_entropy(logits_BC, label_B).item()


def test_logits_carry_no_margin_and_loss_grows_with_it():
    torch.manual_seed(2)
    head = AAMSoftmax(embed_dim=16, num_classes=9)
    emb_BD, label_B = torch.randn(12, 16), torch.randint(9, (12,))
    results = [head(emb_BD, label_B, margin) for margin in (0.0, 0.2, 0.5)]
    losses = [loss.item() for loss, _ in results]
    assert losses[0] < losses[1] < losses[2]
    assert torch.equal(results[0][1], results[2][1])


def test_margin_may_be_a_tensor():
    torch.manual_seed(3)
    head = AAMSoftmax(embed_dim=16, num_classes=9)
    emb_BD, label_B = torch.randn(12, 16), torch.randint(9, (12,))
    assert head(emb_BD, label_B, torch.tensor(0.3))[0] == head(emb_BD, label_B, 0.3)[0]


def test_margin_beyond_the_turning_point_keeps_falling():
    theta_B = torch.linspace(0.05, math.pi - 0.05, 200)
    hard_B = add_margin(theta_B.cos(), 0.5, easy_margin=False)
    assert (hard_B < theta_B.cos()).all()
    near = theta_B < math.pi - 0.5
    torch.testing.assert_close(hard_B[near], (theta_B[near] + 0.5).cos(), atol=1e-5, rtol=0)
    straight = theta_B[~near].cos() - 0.5 * math.sin(0.5)
    torch.testing.assert_close(hard_B[~near], straight, atol=1e-6, rtol=0)
    assert (hard_B[~near].diff() < 0).all()


def test_easy_margin_leaves_obtuse_angles_alone():
    theta_B = torch.tensor([0.3, 1.5, 1.7, 3.0])
    easy_B = add_margin(theta_B.cos(), 0.5, easy_margin=True)
    expected = [math.cos(0.8), math.cos(2.0), math.cos(1.7), math.cos(3.0)]
    assert easy_B.tolist() == pytest.approx(expected, abs=1e-6)


def test_head_is_fp32_under_autocast():
    torch.manual_seed(4)
    head = AAMSoftmax(embed_dim=16, num_classes=9)
    emb_BD, label_B = torch.randn(12, 16), torch.randint(9, (12,))
    expected_loss, expected_BC = head(emb_BD, label_B, 0.2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, logits_BC = head(emb_BD, label_B, 0.2)
    assert logits_BC.dtype == torch.float32
    assert torch.equal(logits_BC, expected_BC) and torch.equal(loss, expected_loss)


def test_margin_is_no_state():
    head = AAMSoftmax(embed_dim=4, num_classes=3)
    assert list(head.state_dict()) == ["weight_CD"]
    assert head.weight_CD.shape == (3, 4)
    assert head.weight_CD.abs().max() <= math.sqrt(6 / (3 + 4))  # Xavier uniform


@pytest.mark.parametrize("name", sorted(HEADS))
def test_every_head_keeps_the_contract(name):
    torch.manual_seed(5)
    head = HEADS[name](embed_dim=8, num_classes=5)
    emb_BD = torch.randn(4, 8, requires_grad=True)
    loss, logits_BC = head(emb_BD, torch.tensor([0, 1, 2, 4]), 0.2)
    loss.backward()
    assert loss.shape == () and logits_BC.shape == (4, 5)
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())
    assert emb_BD.grad is not None and emb_BD.grad.any()
