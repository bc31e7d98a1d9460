"""AAM softmax with sub-centers and inter-top-k penalty: by hand, class by class.

Letters: B batch, C classes, K centers of a class, D embedding.
"""

import math

import pytest
import torch

from speakerlab.losses.subcenter import SubcenterTopkAAMSoftmax

LABEL_B = torch.tensor([0])


def at_angles(
    theta_CK: list[list[float]],
    **args,
) -> tuple[SubcenterTopkAAMSoftmax, torch.Tensor]:
    """A head in the plane whose centers are at these angles from the one row returned."""
    head = SubcenterTopkAAMSoftmax(
        embed_dim=2,
        num_classes=len(theta_CK),
        num_centers=len(theta_CK[0]),
        scale=10.0,
        **args,
    )
    theta = torch.tensor(theta_CK)
    x_CK, y_CK = theta.cos(), theta.sin()
    with torch.no_grad():
        head.weight_CD.copy_(torch.stack([x_CK, y_CK], dim=-1))
    emb_BD = torch.tensor([[5.0, 0.0]])
    return head, emb_BD


def cross_entropy(angles: list[float]) -> float:
    """Of class 0, with logits of 10 cosine."""
    logits = [10 * math.cos(angle) for angle in angles]
    exps = [math.exp(logit) for logit in logits]
    share_of_target = exps[0] / sum(exps)
    return -math.log(share_of_target)


@pytest.mark.parametrize(("margin", "penalty"), [(0.2, 0.06), (0.1, 0.03), (0.0, 0.0)])
def test_the_nearest_centers_and_the_hardest_classes_by_hand(margin, penalty):
    head, emb_BD = at_angles(
        [
            [0.5, 1.9],
            [2.0, 0.9],
            [1.2, 1.4],
            [2.2, 1.6],
        ],
        top_k=2,
    )
    loss, logits_BC = head(emb_BD, LABEL_B, margin)
    nearest = [0.5, 0.9, 1.2, 1.6]
    logits = [10 * math.cos(angle) for angle in nearest]
    assert logits_BC[0].tolist() == pytest.approx(logits, abs=1e-5)

    # Of the other classes, 0.9 and 1.2 are the two hardest.
    angles = [0.5 + margin, 0.9 - penalty, 1.2 - penalty, 1.6]
    expected = cross_entropy(angles)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_target_is_never_among_the_hardest():
    head, emb_BD = at_angles([[2.5], [0.3], [0.8], [1.9]], top_k=1)
    loss, _ = head(emb_BD, LABEL_B, 0.2)
    expected = cross_entropy([2.7, 0.24, 0.8, 1.9])
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_top_k_beyond_the_other_classes_takes_them_all():
    head, emb_BD = at_angles([[0.5], [0.9], [1.2]], top_k=50)
    loss, _ = head(emb_BD, LABEL_B, 0.2)
    expected = cross_entropy([0.7, 0.84, 1.14])
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_centers_that_are_not_nearest_get_a_gradient_of_zero():
    head, emb_BD = at_angles([[0.5, 1.9], [2.0, 0.9]])
    loss, _ = head(emb_BD, LABEL_B, 0.2)
    loss.backward()
    grad_CKD = head.weight_CD.grad
    assert grad_CKD is not None
    has_gradient_CK = grad_CKD.any(dim=2)
    assert has_gradient_CK.tolist() == [[True, False], [False, True]]


def test_centers_begin_apart_within_the_bound_of_all_of_them():
    head = SubcenterTopkAAMSoftmax(embed_dim=40, num_classes=50)
    # Xavier uniform of (C * K, D).
    fans = 50 * 3 + 40
    bound = math.sqrt(6 / fans)
    assert head.weight_CD.shape == (50, 3, 40)
    largest = head.weight_CD.abs().max()
    assert 0.99 * bound < largest <= bound
