"""AAM softmax with sub-centers and inter-top-k penalty: by hand, class by class.

Letters: B batch, C classes, K centers of a class, D embedding.
"""

import math

import pytest
import torch

from speakerlab.losses.subcenter import SubcenterTopkAAMSoftmax


def at_angles(theta_CK: list[list[float]], **args) -> tuple[SubcenterTopkAAMSoftmax, torch.Tensor]:
    """A head in the plane whose centers are at these angles from the one row returned."""
    head = SubcenterTopkAAMSoftmax(
        embed_dim=2, num_classes=len(theta_CK), num_centers=len(theta_CK[0]), scale=10.0, **args
    )
    theta = torch.tensor(theta_CK)
    with torch.no_grad():
        head.weight_CD.copy_(torch.stack([theta.cos(), theta.sin()], dim=-1))
    return head, torch.tensor([[5.0, 0.0]])


def cross_entropy(angles: list[float]) -> float:
    """Of class 0, with logits of 10 cosine."""
    exps = [math.exp(10 * math.cos(angle)) for angle in angles]
    return math.log(sum(exps) / exps[0])


@pytest.mark.parametrize(("margin", "penalty"), [(0.2, 0.06), (0.1, 0.03), (0.0, 0.0)])
def test_the_nearest_centers_and_the_hardest_classes_by_hand(margin, penalty):
    head, emb_BD = at_angles([[0.5, 1.9], [2.0, 0.9], [1.2, 1.4], [2.2, 1.6]], top_k=2)
    loss, logits_BC = head(emb_BD, torch.tensor([0]), margin)
    near = [0.5, 0.9, 1.2, 1.6]  # of these, 0.9 and 1.2 are the two hardest
    expected = [0.5 + margin, 0.9 - penalty, 1.2 - penalty, 1.6]
    assert loss.item() == pytest.approx(cross_entropy(expected), rel=1e-5)
    assert logits_BC[0].tolist() == pytest.approx([10 * math.cos(a) for a in near], abs=1e-5)


def test_target_is_never_among_the_hardest():
    head, emb_BD = at_angles([[2.5], [0.3], [0.8], [1.9]], top_k=1)
    loss, _ = head(emb_BD, torch.tensor([0]), 0.2)
    assert loss.item() == pytest.approx(cross_entropy([2.7, 0.24, 0.8, 1.9]), rel=1e-5)


def test_top_k_beyond_the_other_classes_takes_them_all():
    head, emb_BD = at_angles([[0.5], [0.9], [1.2]], top_k=50)
    loss, _ = head(emb_BD, torch.tensor([0]), 0.2)
    assert loss.item() == pytest.approx(cross_entropy([0.7, 0.84, 1.14]), rel=1e-5)


def test_centers_that_are_not_nearest_get_a_gradient_of_zero():
    head, emb_BD = at_angles([[0.5, 1.9], [2.0, 0.9]])
    head(emb_BD, torch.tensor([0]), 0.2)[0].backward()
    assert head.weight_CD.grad is not None
    assert head.weight_CD.grad.any(dim=2).tolist() == [[True, False], [False, True]]


def test_centers_begin_apart_within_the_bound_of_all_of_them():
    head = SubcenterTopkAAMSoftmax(embed_dim=40, num_classes=50)
    bound = math.sqrt(6 / (50 * 3 + 40))  # Xavier uniform of (C * K, D)
    assert head.weight_CD.shape == (50, 3, 40)
    assert 0.99 * bound < head.weight_CD.abs().max() <= bound
