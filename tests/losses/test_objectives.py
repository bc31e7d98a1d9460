"""Objectives: on several ranks as on one, with finite gradients, and collapse costs."""

import copy
from dataclasses import dataclass

import pytest
import torch
from refusals import refuses
from torch import Tensor

from speakerlab.losses import OBJECTIVES
from speakerlab.losses.dino import DINO, ramp, spread
from speakerlab.losses.sdpn import balance, concentration, koleo

DIM, UTTERANCES, VIEWS, LONG = 6, 8, 3, 2
SMALL = {
    "dino": {"hidden_dim": 8, "wide_dim": 10, "bottleneck_dim": 4, "num_outputs": 12},
    "sdpn": {"hidden_dim": 8, "output_dim": 5, "num_prototypes": 7},
    "simclr": {"hidden_dim": 5},
}


@dataclass
class Replayed:
    """One of two ranks; what it gathers was recorded from a single rank, call by call."""

    rank: int
    whole: list[Tensor]
    world_size: int = 2

    def gather(self, values: Tensor) -> Tensor:
        whole = self.whole.pop(0)
        torch.testing.assert_close(whole.chunk(2)[self.rank], values)
        return whole


def make(name, **more):
    torch.manual_seed(0)
    return OBJECTIVES[name](embed_dim=DIM, **{**SMALL[name], **more}).double()


def views_of(objective) -> tuple[Tensor, Tensor | None]:
    """Return embeddings of the student and the teacher, as many as the objective takes."""
    torch.manual_seed(1)
    views = 2 if not objective.has_teacher else VIEWS
    emb_VBD = torch.randn(views, UTTERANCES, DIM, dtype=torch.float64)
    long = LONG if objective.sees_long else 1
    return emb_VBD, torch.randn(long, UTTERANCES, DIM, dtype=torch.float64)


def run(objective, emb_VBD, emb_LBD, teacher):
    """Return the loss, and the gradients of embeddings and parameters."""
    leaf = emb_VBD.clone().requires_grad_()
    objective.begin_step(20.0)
    loss = objective(leaf, emb_LBD, teacher).loss
    loss.backward()
    parameters = {k: p.grad for k, p in objective.named_parameters() if p.grad is not None}
    return loss.detach(), leaf.grad, parameters


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
        gathered.append(x_VBD.detach().transpose(0, 1).contiguous())
        return x_VBD

    with monkeypatch.context() as patch:
        for module in ("objective", "dino", "sdpn"):
            patch.setattr(f"speakerlab.losses.{module}.gather_utterances", record)
        _, grad_VBD, parameters = run(whole, emb_VBD, emb_LBD, teacher)
    halves, sums = [], dict.fromkeys(parameters, 0.0)
    for rank in range(2):
        part = without_batchnorm(make(name, shards=Replayed(rank, list(gathered))))
        own = slice(4 * rank, 4 * rank + 4)
        _, grad, found = run(part, emb_VBD[:, own], emb_LBD[:, own], teacher)
        halves.append(grad / 2)
        sums = {key: sums[key] + found[key] / 2 for key in sums}
        assert part.shards.whole == []
    torch.testing.assert_close(torch.cat(halves, 1), grad_VBD)
    torch.testing.assert_close(sums, parameters)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_finite_for_collapsed_embeddings(name):
    objective = make(name)
    emb_VBD, emb_LBD = views_of(objective)
    teacher = copy.deepcopy(objective.projector)
    for scale in (0.0, 1.0):
        loss, grad, found = run(objective, scale + 0 * emb_VBD, scale + 0 * emb_LBD, teacher)
        assert loss.isfinite() and grad.isfinite().all()
        assert all(one.isfinite().all() for one in found.values())


def test_losses_against_collapse_are_least_where_all_is_spread():
    torch.manual_seed(2)
    spread_ND = torch.randn(64, 4, dtype=torch.float64)
    collapsed_ND = spread_ND[:1] + 0.01 * spread_ND
    assert koleo(spread_ND) < koleo(collapsed_ND)
    even, uneven = torch.full((4,), 0.25), torch.tensor([1.0, 0, 0, 0])
    assert concentration(even).abs() < 1e-6 and concentration(uneven) > 1
    short, covariance = spread(spread_ND)
    assert spread(collapsed_ND)[0] > short
    assert spread(spread_ND[:, [0, 0, 1, 1]])[1] > covariance


def test_sinkhorn_balances_prototypes():
    torch.manual_seed(3)
    target_GK = (4 * torch.randn(40, 5) + torch.tensor([6.0, 0, 0, 0, 0])).softmax(1)
    assert target_GK.sum(0)[0] > 20
    torch.testing.assert_close(balance(target_GK, iterations=50).sum(0), torch.full((5,), 8.0))


def test_schedules_of_dino_are_functions_of_the_epoch():
    assert [ramp(epoch, 1.0, 3.0, 4.0) for epoch in (0, 1, 4, 9)] == [1.0, 1.5, 3.0, 3.0]
    objective, (emb_VBD, emb_LBD) = make("dino", freeze_epochs=2.0), views_of(make("dino"))
    teacher = copy.deepcopy(objective.projector)
    for epoch, learns in ((1.9, False), (2.0, True)):
        objective.begin_step(epoch)
        objective(emb_VBD, emb_LBD, teacher).loss.backward()
        objective.drop_gradients()
        assert (objective.projector.weight_KD.grad is not None) is learns
        assert objective.projector.mlp[0].weight.grad is not None
        objective.zero_grad()


@pytest.mark.parametrize(
    ("name", "views", "value"), [("dino", (1, 0), 1), ("sdpn", (2, 4), 2), ("simclr", (2, 4), 4)]
)
def test_other_numbers_of_views_are_refused(name, views, value):
    with refuses("views", name, value):
        OBJECTIVES[name].check_views(*views)


def test_only_dino_without_regularizers_accumulates():
    plain = make("dino", std_weight=0.0, cov_weight=0.0)
    assert isinstance(plain, DINO) and not plain.needs_whole_batch
    assert all(make(name).needs_whole_batch for name in OBJECTIVES)
