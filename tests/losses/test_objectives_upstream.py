"""Self-supervised losses, gradients and projectors equal those of WeSpeaker and 3D-Speaker.

`objective_figures.npz`, in float64, is written and described by make_objective_figures.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from speakerlab.losses.dino import DINO, distill, ramp, spread
from speakerlab.losses.objective import contrast, mlp
from speakerlab.losses.sdpn import SDPN, balance, concentration, koleo

FIGURES = np.load(Path(__file__).with_name("objective_figures.npz"))


def figure(name, *, leaf=False):
    return torch.from_numpy(FIGURES[name].copy()).requires_grad_(leaf)


def check(name, loss, **leaves):
    """Compare a loss and its gradients with the stored ones."""
    close(loss, figure(f"{name}.loss"))
    found = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    for key, gradient in zip(leaves, found):
        close(gradient, figure(f"{name}.grad_{key}"))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("peer", ["3dspeaker", "wespeaker"])
def test_dino(peer):
    """Both raise the temperature at each of the first four epochs, from 0.04 to 0.07."""
    center_K, teacher_LBK = figure("dino.center_K"), figure("dino.teacher_LBK")
    for epoch in (0, 3, 9):
        temps = {"student_temp": 0.1, "teacher_temp": ramp(epoch, 0.04, 0.07, 3)}
        leaf = figure("dino.student_VBK", leaf=True)
        loss = distill(leaf, teacher_LBK, center_K=center_K, **temps)
        check(f"dino.{peer}.{epoch}", loss, student_VBK=leaf)


@pytest.mark.parametrize("peer", ["3dspeaker", "wespeaker"])
def test_center_of_dino(peer):
    small = {"hidden_dim": 4, "wide_dim": 0, "bottleneck_dim": 3, "num_outputs": 7}
    objective, teacher_LBK = DINO(embed_dim=5, **small).double(), figure("dino.teacher_LBK")
    objective.get_buffer("center_K").copy_(figure("dino.center_K"))
    objective.begin_step(0.0)
    for part_LBK in teacher_LBK.chunk(2, dim=1):  # two micro-batches
        objective.totals.append(part_LBK.sum((0, 1)))
        objective.num_rows += part_LBK[..., 0].numel()
    objective.end_step(torch.tensor(1.0))  # a bad step changes nothing
    close(objective.get_buffer("center_K"), figure("dino.center_K"))
    objective.end_step(torch.tensor(0.0))
    close(objective.get_buffer("center_K"), figure(f"dino.{peer}.center_K"))


@pytest.mark.parametrize("rows", ["few", "many"])
def test_regularizers_of_rdino(rows):
    """The teacher's terms, which have no gradient, are in 3D-Speaker's value only."""
    leaf, teacher_GW = (figure(f"spread.{rows}.{who}_LBW") for who in ("student", "teacher"))
    std, cov = spread(leaf.requires_grad_().mean(0))
    teacher_std, teacher_cov = spread(teacher_GW.mean(0))
    check(f"spread.{rows}.std", (std + teacher_std) / 2, student_LBW=leaf)
    check(f"spread.{rows}.cov", cov + teacher_cov, student_LBW=leaf)


def test_sdpn():
    objective = SDPN(embed_dim=5, output_dim=5, num_prototypes=7, hidden_dim=4).double()
    objective.prototype_KD.data.copy_(figure("sdpn.prototype_KD"))
    short_VBD = figure("sdpn.short_VBD", leaf=True)
    log_VBK = objective.assign(short_VBD)
    sharp_BK = (objective.assign(figure("sdpn.long_BD")).detach() / 0.25).softmax(1)
    target_BK = balance(sharp_BK, iterations=3)
    close(target_BK, figure("sdpn.target_BK"))
    close(target_BK.sum(1), torch.ones(6, dtype=torch.float64))
    leaves = {"short_VBD": short_VBD, "prototype_KD": objective.prototype_KD}
    check("sdpn.cross_entropy", -(target_BK * log_VBK).sum(2).mean(), **leaves)
    check("sdpn.me_max", concentration(log_VBK.exp().mean((0, 1))), **leaves)
    check("sdpn.koleo", koleo(short_VBD[0]), short_VBD=short_VBD)


def test_simclr():
    leaf = figure("simclr.out_2BD", leaf=True)
    loss, accuracy = contrast(leaf, temperature=0.07)
    check("simclr", loss, out_2BD=leaf)
    assert 0 <= accuracy < 1 and contrast(leaf[:1].repeat(2, 1, 1), temperature=0.07)[1] == 1


def load(module: nn.Module, name, **renamed):
    """Load the stored weights; what is before a colon is replaced in their names."""
    prefix = f"projector.{name}.state."
    state = {key.removeprefix(prefix): figure(key) for key in FIGURES if key.startswith(prefix)}
    for old, new in renamed.items():
        state = {key.replace(old, new): value for key, value in state.items()}
    state.pop("weight_g", None)
    module.double().load_state_dict(state, strict=False)
    assert {key for key, _ in module.named_parameters()} == state.keys()
    return module


def test_projectors():
    sizes = {"hidden_dim": 6, "wide_dim": 8, "bottleneck_dim": 4, "num_outputs": 7}
    rdino = load(
        DINO(embed_dim=5, **sizes).projector,
        "rdino",
        **{"add_layer": "narrow.0", "last_layer.weight_v": "weight_KD", "last_layer.": ""},
    )
    for index, output in enumerate(rdino(figure("projector.x_ND"))):
        close(output, figure(f"projector.rdino.out{index}"))
    sdpn = load(mlp([5, 6, 6, 4], batch_norm=True), "sdpn", **{"mlp.": ""})
    close(nn.functional.normalize(sdpn(figure("projector.x_ND"))), figure("projector.sdpn.out0"))
