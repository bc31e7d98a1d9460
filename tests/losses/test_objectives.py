"""Objectives: on several ranks as on one, with finite gradients, and collapse costs."""

import copy

import pytest
import torch
from refusals import refuses
from replayed import Replayed
from torch import Tensor

from speakerlab.losses import OBJECTIVES
from speakerlab.losses.dino import DINO, measure_spread, ramp
from speakerlab.losses.objective import mlp
from speakerlab.losses.sdpn import balance, concentration, koleo

DIM = 6
UTTERANCES = 8
VIEWS = 3
LONG = 2
SMALL = {
    "dino": {
        "hidden_dim": 8,
        "wide_dim": 10,
        "bottleneck_dim": 4,
        "num_outputs": 12,
    },
    "sdpn": {"hidden_dim": 8, "output_dim": 5, "num_prototypes": 7},
    "simclr": {"hidden_dim": 5},
}


def make(name, **options):
    torch.manual_seed(0)
    args = {**SMALL[name], **options}
    objective = OBJECTIVES[name](embed_dim=DIM, **args)
    return objective.double()


def views_of(objective) -> tuple[Tensor, Tensor | None]:
    """Return embeddings of the student and the teacher, as many as the objective takes."""
    torch.manual_seed(1)
    num_views = VIEWS if objective.has_teacher else 2
    num_long = LONG if objective.sees_long else 1
    emb_VBD = torch.randn(num_views, UTTERANCES, DIM, dtype=torch.float64)
    emb_LBD = torch.randn(num_long, UTTERANCES, DIM, dtype=torch.float64)
    return emb_VBD, emb_LBD


def run(objective, emb_VBD, emb_LBD, teacher):
    """Return the loss, and the gradients of embeddings and parameters."""
    leaf = emb_VBD.clone().requires_grad_()
    objective.begin_step(20.0)
    loss = objective(leaf, emb_LBD, teacher).loss
    loss.backward()
    gradients = {}
    for name, parameter in objective.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    return loss.detach(), leaf.grad, gradients


def without_batchnorm(module):
    """Replace BatchNorm, whose batches are those of a rank."""
    for name, part in module.named_children():
        if isinstance(part, torch.nn.BatchNorm1d):
            setattr(module, name, torch.nn.Identity())
        without_batchnorm(part)
    return module


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_ranks_have_the_gradients_of_one(name, monkeypatch):
    """Averaged over ranks, as DistributedDataParallel does, they are those of the whole batch."""
    whole = without_batchnorm(make(name))
    teacher = copy.deepcopy(whole.projector).requires_grad_(False)
    emb_VBD, emb_LBD = views_of(whole)
    gathered: list[Tensor] = []

    def record(x_VBD, shards):
        x_BVD = x_VBD.detach().transpose(0, 1)
        gathered.append(x_BVD.contiguous())
        return x_VBD

    with monkeypatch.context() as patch:
        for module in ("objective", "dino", "sdpn"):
            patch.setattr(f"speakerlab.losses.{module}.gather_utterances", record)
        _, expected_grad_VBD, expected = run(whole, emb_VBD, emb_LBD, teacher)

    # Each rank has half of the utterances.
    halves = []
    averages = dict.fromkeys(expected, 0.0)
    for rank in range(2):
        shards = Replayed(rank, list(gathered))
        part = without_batchnorm(make(name, shards=shards))
        start = 4 * rank
        rows = slice(start, start + 4)
        part_VBD = emb_VBD[:, rows]
        part_LBD = emb_LBD[:, rows]
        _, grad_VBD, gradients = run(part, part_VBD, part_LBD, teacher)
        halves.append(grad_VBD / 2)
        for key, gradient in gradients.items():
            averages[key] = averages[key] + gradient / 2
        assert shards.whole == []
    grad_of_both_VBD = torch.cat(halves, dim=1)
    torch.testing.assert_close(grad_of_both_VBD, expected_grad_VBD)
    torch.testing.assert_close(averages, expected)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_finite_for_collapsed_embeddings(name):
    objective = make(name)
    emb_VBD, emb_LBD = views_of(objective)
    teacher = copy.deepcopy(objective.projector)
    for scale in (0.0, 1.0):
        # All embeddings are equal: zero, or one in every dimension.
        student_VBD = torch.full_like(emb_VBD, scale)
        teacher_LBD = torch.full_like(emb_LBD, scale)
        loss, grad, gradients = run(objective, student_VBD, teacher_LBD, teacher)
        assert loss.isfinite()
        assert grad.isfinite().all()
        for gradient in gradients.values():
            assert gradient.isfinite().all()


def test_losses_against_collapse_are_least_where_all_is_spread():
    torch.manual_seed(2)
    spread_ND = torch.randn(64, 4, dtype=torch.float64)
    collapsed_ND = spread_ND[:1] + 0.01 * spread_ND
    assert koleo(spread_ND) < koleo(collapsed_ND)
    even = torch.full((4,), 0.25)
    uneven = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert concentration(even).abs() < 1e-6
    assert concentration(uneven) > 1

    std_loss, covariance = measure_spread(spread_ND)
    collapsed_std_loss, _ = measure_spread(collapsed_ND)
    assert collapsed_std_loss > std_loss
    # Columns that are copies of one another are correlated.
    copied_columns_ND = spread_ND[:, [0, 0, 1, 1]]
    _, copied_covariance = measure_spread(copied_columns_ND)
    assert copied_covariance > covariance


def test_sinkhorn_balances_prototypes():
    torch.manual_seed(3)
    # Most rows prefer the first of five prototypes.
    first_preferred_K = torch.tensor([6.0, 0.0, 0.0, 0.0, 0.0])
    logits_GK = 4 * torch.randn(40, 5) + first_preferred_K
    target_GK = logits_GK.softmax(1)
    before_K = target_GK.sum(0)
    assert before_K[0] > 20
    after_K = balance(target_GK, iterations=50).sum(0)
    equal_K = torch.full((5,), 8.0)
    torch.testing.assert_close(after_K, equal_K)


def test_schedules_of_dino_are_functions_of_the_epoch():
    expected = {0: 1.0, 1: 1.5, 4: 3.0, 9: 3.0}
    for epoch, value in expected.items():
        assert ramp(epoch, (1.0, 3.0), num_epochs=4.0) == value

    # The last layer of the projector is frozen at first.
    objective = make("dino", freeze_epochs=2.0)
    emb_VBD, emb_LBD = views_of(objective)
    teacher = copy.deepcopy(objective.projector)
    for epoch, learns in ((1.9, False), (2.0, True)):
        objective.begin_step(epoch)
        loss = objective(emb_VBD, emb_LBD, teacher).loss
        loss.backward()
        objective.drop_gradients()
        projector = objective.projector
        assert (projector.weight_KD.grad is not None) is learns
        assert projector.mlp[0].weight.grad is not None
        objective.zero_grad()


def test_no_initial_weight_is_an_outlier():
    """`trunc_normal_` of torch 2.11 makes two of these weights 2.0, a hundred deviations."""
    torch.manual_seed(1)
    projector = mlp([4096, 4096], batch_norm=False)
    weight = projector[0].weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.001)
    # Of 17 million normal values, the largest is at about 5.4 deviations.
    assert weight.abs().max() < 0.13


@pytest.mark.parametrize(
    ("name", "views", "value"),
    [
        ("dino", (1, 0), 1),
        ("sdpn", (2, 4), 2),
        ("simclr", (2, 4), 4),
    ],
)
def test_other_numbers_of_views_are_refused(name, views, value):
    with refuses("views", name, value):
        OBJECTIVES[name].check_views(*views)


def test_only_dino_without_regularizers_accumulates():
    plain = make("dino", std_weight=0.0, cov_weight=0.0)
    assert isinstance(plain, DINO)
    assert not plain.needs_whole_batch
    for name in OBJECTIVES:
        assert make(name).needs_whole_batch
