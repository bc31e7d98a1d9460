"""Losses of distillation equal loops over pairs; two ranks have the gradients of one.

Letters: B crops, D dimensions of the teacher, E of the student.
"""

import math

import numpy as np
import pytest
import torch
from replayed import Replayed
from torch import Tensor

from speakerlab.core.directions import NUM_COMMON
from speakerlab.losses.distillation import (
    DISTILLATION_LOSSES,
    Distillation,
    FrameDistance,
    compares_crops,
)

CROPS = 6
STUDENT_DIM = 5
TEACHER_DIM = 7
TEMPERATURE = 0.2
FRAMES = 4
ALL = {"cosine": 1.0, "relations": 4.0, "contrast": 0.5}


def embeddings(dim: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    emb_BE = torch.randn(CROPS, dim, dtype=torch.float64)
    target_BD = torch.randn(CROPS, TEACHER_DIM, dtype=torch.float64)
    return emb_BE, target_BD


def make(weights, *, embed_dim=TEACHER_DIM, shards=None) -> Distillation:
    torch.manual_seed(0)
    distance = Distillation(
        embed_dim=embed_dim,
        target_dim=TEACHER_DIM,
        weights=weights,
        temperature=TEMPERATURE,
        is_projected=embed_dim != TEACHER_DIM,
        shards=shards,
    )
    return distance.double()


def dot(first, second) -> float:
    """Return the cosine of two vectors, by a loop."""
    product = 0.0
    first_square = 0.0
    second_square = 0.0
    for a, b in zip(first.tolist(), second.tolist(), strict=True):
        product += a * b
        first_square += a * a
        second_square += b * b
    return product / math.sqrt(first_square) / math.sqrt(second_square)


def cosine_by_hand(student, teacher) -> float:
    cosines = [dot(s, t) for s, t in zip(student, teacher)]
    return 1 - sum(cosines) / len(cosines)


def relations_by_hand(student, teacher) -> float:
    total = 0.0
    for i in range(CROPS):
        for j in range(CROPS):
            difference = dot(student[i], student[j]) - dot(teacher[i], teacher[j])
            total += difference**2
    return total / CROPS**2


def contrast_by_hand(student, teacher) -> float:
    total = 0.0
    for i in range(CROPS):
        teacher_exps = [math.exp(dot(teacher[i], t) / TEMPERATURE) for t in teacher]
        student_exps = [math.exp(dot(student[i], t) / TEMPERATURE) for t in teacher]
        for teacher_exp, student_exp in zip(teacher_exps, student_exps):
            teacher_share = teacher_exp / sum(teacher_exps)
            student_share = student_exp / sum(student_exps)
            total -= teacher_share * math.log(student_share)
    return total / CROPS


BY_HAND = {
    "cosine": cosine_by_hand,
    "relations": relations_by_hand,
    "contrast": contrast_by_hand,
}


@pytest.mark.parametrize("name", DISTILLATION_LOSSES)
def test_a_loss_equals_loops_over_pairs(name):
    emb_BE, target_BD = embeddings(TEACHER_DIM)
    loss, _ = make({name: 1.0})(emb_BE, target_BD)
    assert float(loss) == pytest.approx(BY_HAND[name](emb_BE, target_BD), rel=1e-12)


@pytest.mark.parametrize("name", DISTILLATION_LOSSES)
def test_a_loss_is_least_where_student_and_teacher_agree(name):
    emb_BE, target_BD = embeddings(TEACHER_DIM)
    distance = make({name: 1.0})
    other, _ = distance(emb_BE, target_BD)
    # Lengths do not matter.
    leaf = (3 * target_BD).requires_grad_()
    same, accuracy = distance(leaf, target_BD)
    same.backward()
    assert same < other
    assert accuracy == 1
    torch.testing.assert_close(leaf.grad, torch.zeros_like(leaf))


def test_weights_add_up_and_a_weight_of_zero_leaves_out():
    emb_BE, target_BD = embeddings(TEACHER_DIM)
    expected = 0.0
    for name, weight in ALL.items():
        expected += weight * BY_HAND[name](emb_BE, target_BD)
    loss, _ = make(ALL)(emb_BE, target_BD)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    assert list(make({**ALL, "contrast": 0.0}).weights) == ["cosine", "relations"]


def test_a_projection_maps_to_the_teachers_dimensions():
    emb_BE, target_BD = embeddings(STUDENT_DIM)
    distance = make(ALL, embed_dim=STUDENT_DIM)
    projected_BD = (emb_BE @ distance.projection.weight.T).detach()
    loss, _ = distance(emb_BE, target_BD)
    expected, _ = make(ALL)(projected_BD, target_BD)
    torch.testing.assert_close(loss, expected)
    unit_BD = torch.nn.functional.normalize(projected_BD, dim=1)
    np.testing.assert_allclose(distance.project(emb_BE.numpy()), unit_BD)


def test_what_all_embeddings_have_in_common_does_not_matter():
    """Adding some of it to embeddings or targets changes no loss."""
    emb_BD, target_BD = embeddings(TEACHER_DIM)
    generator = torch.Generator().manual_seed(3)
    axes_DK = torch.randn(
        TEACHER_DIM, NUM_COMMON, dtype=torch.float64, generator=generator
    )
    common_KD = torch.linalg.qr(axes_DK).Q.T
    distance = make(ALL)
    distance.common_KD.copy_(common_KD)
    loss, _ = distance(emb_BD, target_BD)

    share_B1 = torch.linspace(-3, 3, len(emb_BD), dtype=torch.float64)[:, None]
    added_D = common_KD.sum(dim=0)
    moved, _ = distance(emb_BD + share_B1 * added_D, target_BD - 2 * added_D)
    torch.testing.assert_close(moved, loss)

    rest_BD = emb_BD - emb_BD @ common_KD.T @ common_KD
    target_rest_BD = target_BD - target_BD @ common_KD.T @ common_KD
    expected, _ = make(ALL)(rest_BD, target_rest_BD)
    torch.testing.assert_close(loss, expected)
    assert (
        np.abs(distance.targets_of(target_BD.numpy()) @ common_KD.T.numpy()).max()
        < 1e-9
    )


def gradients(distance, emb_BE, target_BD):
    leaf = emb_BE.clone().requires_grad_()
    loss, _ = distance(leaf, target_BD)
    loss.backward()
    return loss.detach(), leaf.grad, distance.projection.weight.grad


def test_two_ranks_have_the_gradients_of_one():
    """DDP divides the sum of the ranks' gradients by 2."""
    emb_BE, target_BD = embeddings(STUDENT_DIM)
    alone = make(ALL, embed_dim=STUDENT_DIM)
    loss, emb_grad, weight_grad = gradients(alone, emb_BE, target_BD)
    unit_BD = torch.from_numpy(alone.project(emb_BE.numpy()))
    target_unit_BD = torch.from_numpy(alone.targets_of(target_BD.numpy()))
    whole = [unit_BD[:, None], target_unit_BD[:, None]]

    emb_grads = []
    weight_grads = []
    for rank in (0, 1):
        shards = Replayed(rank, list(whole))
        distance = make(ALL, embed_dim=STUDENT_DIM, shards=shards)
        rank_emb_BE = emb_BE.chunk(2)[rank]
        rank_target_BD = target_BD.chunk(2)[rank]
        rank_loss, rank_emb_grad, rank_weight_grad = gradients(
            distance, rank_emb_BE, rank_target_BD
        )
        torch.testing.assert_close(rank_loss, loss)
        emb_grads.append(rank_emb_grad)
        weight_grads.append(rank_weight_grad)
    torch.testing.assert_close(torch.cat(emb_grads) / 2, emb_grad)
    torch.testing.assert_close(sum(weight_grads) / 2, weight_grad)


def test_only_the_cosine_may_be_accumulated():
    assert not compares_crops({"cosine": 1.0, "relations": 0.0})
    assert compares_crops({"cosine": 1.0, "relations": 1.0})
    assert compares_crops({"contrast": 1.0})


@pytest.mark.parametrize("name", DISTILLATION_LOSSES)
def test_gradients_are_finite_for_zeros(name):
    emb_BE = torch.zeros(CROPS, TEACHER_DIM, dtype=torch.float64, requires_grad=True)
    target_BD = torch.zeros(CROPS, TEACHER_DIM, dtype=torch.float64)
    loss, _ = make({name: 1.0})(emb_BE, target_BD)
    loss.backward()
    assert loss.isfinite()
    assert emb_BE.grad.isfinite().all()


def frames_by_hand(mapped, teacher, mean, deviation) -> float:
    total = 0.0
    for mapped_CT, teacher_CT in zip(mapped, teacher):
        for channel in range(TEACHER_DIM):
            for frame in range(FRAMES):
                target = float(teacher_CT[channel, frame]) - float(mean[channel])
                target /= float(deviation[channel])
                total += (float(mapped_CT[channel, frame]) - target) ** 2
    return total / (CROPS * TEACHER_DIM * FRAMES)


def test_the_distance_of_frames_equals_loops_over_frames():
    torch.manual_seed(2)
    distance = FrameDistance(
        student_channels=STUDENT_DIM, teacher_channels=TEACHER_DIM
    ).double()
    student_BST = torch.randn(CROPS, STUDENT_DIM, FRAMES, dtype=torch.float64)
    teacher_BCT = torch.randn(CROPS, TEACHER_DIM, FRAMES, dtype=torch.float64)
    mean_C = torch.linspace(-1, 1, TEACHER_DIM, dtype=torch.float64)
    deviation_C = torch.linspace(0.5, 2, TEACHER_DIM, dtype=torch.float64)
    distance.mean_C.copy_(mean_C)
    distance.deviation_C.copy_(deviation_C)

    weight_CS = distance.to_teacher.weight.squeeze(2)
    bias_C = distance.to_teacher.bias
    mapped_BCT = torch.einsum("cs,bst->bct", weight_CS, student_BST) + bias_C[:, None]
    mapped_BCT = mapped_BCT.detach()
    expected = frames_by_hand(mapped_BCT, teacher_BCT, mean_C, deviation_C)
    loss = distance(student_BST, teacher_BCT).detach()
    assert float(loss) == pytest.approx(expected)

    # A teacher with twice the frames: each frame of the student has the mean of two.
    twice_BCT = torch.repeat_interleave(teacher_BCT, 2, dim=2)
    again = distance(student_BST, twice_BCT).detach()
    assert float(again) == pytest.approx(expected)


def test_the_layer_of_frames_computes_under_autocast_and_the_difference_in_fp32():
    torch.manual_seed(3)
    distance = FrameDistance(student_channels=STUDENT_DIM, teacher_channels=TEACHER_DIM)
    student_BST = torch.randn(CROPS, STUDENT_DIM, FRAMES)
    teacher_BCT = torch.randn(CROPS, TEACHER_DIM, FRAMES)
    mapped_types = []
    distance.to_teacher.register_forward_hook(
        lambda layer, inputs, mapped_BCT: mapped_types.append(mapped_BCT.dtype)
    )

    in_fp32 = distance(student_BST, teacher_BCT).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_bf16 = distance(student_BST.bfloat16(), teacher_BCT).detach()

    assert mapped_types == [torch.float32, torch.bfloat16]
    assert in_bf16.dtype == torch.float32
    assert float(in_bf16) == pytest.approx(float(in_fp32), rel=1e-2)
    assert float(in_bf16) != float(in_fp32)
