"""Self-supervised losses, gradients and projectors equal those of WeSpeaker and 3D-Speaker.

`objective_figures.npz`, in float64, is written and described by make_objective_figures.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from speakerlab.losses.dino import DINO, distill, measure_spread, ramp
from speakerlab.losses.objective import contrast, mlp
from speakerlab.losses.sdpn import SDPN, balance, concentration, koleo

FIGURES_FILE = Path(__file__).with_name("objective_figures.npz")
FIGURES = np.load(FIGURES_FILE)
both_peers = pytest.mark.parametrize("peer", ["3dspeaker", "wespeaker"])


def figure(name, *, leaf=False):
    value = torch.from_numpy(FIGURES[name].copy())
    return value.requires_grad_(leaf)


def check(name, loss, **leaves):
    """Compare a loss and its gradients with the stored ones."""
    close(loss, figure(f"{name}.loss"))
    our_gradients = torch.autograd.grad(
        loss,
        list(leaves.values()),
        retain_graph=True,
    )
    for key, gradient in zip(leaves, our_gradients):
        close(gradient, figure(f"{name}.grad_{key}"))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@both_peers
def test_dino(peer):
    """Both raise the temperature at each of the first four epochs, from 0.04 to 0.07."""
    center_K = figure("dino.center_K")
    teacher_LBK = figure("dino.teacher_LBK")
    for epoch in (0, 3, 9):
        leaf = figure("dino.student_VBK", leaf=True)
        loss = distill(
            leaf,
            teacher_LBK,
            center_K=center_K,
            student_temp=0.1,
            teacher_temp=ramp(epoch, (0.04, 0.07), num_epochs=3),
        )
        check(f"dino.{peer}.{epoch}", loss, student_VBK=leaf)


@both_peers
def test_center_of_dino(peer):
    objective = DINO(
        embed_dim=5,
        hidden_dim=4,
        wide_dim=0,
        bottleneck_dim=3,
        num_outputs=7,
    )
    objective.double()
    center_K = objective.get_buffer("center_K")
    first_center_K = figure("dino.center_K")
    center_K.copy_(first_center_K)
    objective.begin_step(0.0)
    teacher_LBK = figure("dino.teacher_LBK")
    micro_batches = teacher_LBK.chunk(2, dim=1)
    for part_LBK in micro_batches:
        objective.teacher_sums.append(part_LBK.sum((0, 1)))
        objective.num_teacher_rows += part_LBK[..., 0].numel()

    # A bad step changes nothing.
    objective.end_step(torch.tensor(1.0))
    close(objective.get_buffer("center_K"), first_center_K)
    objective.end_step(torch.tensor(0.0))
    close(objective.get_buffer("center_K"), figure(f"dino.{peer}.center_K"))


@pytest.mark.parametrize("rows", ["few", "many"])
def test_regularizers_of_rdino(rows):
    """The teacher's terms, which have no gradient, are in 3D-Speaker's value only."""
    leaf = figure(f"spread.{rows}.student_LBW", leaf=True)
    teacher_LBW = figure(f"spread.{rows}.teacher_LBW")
    std, cov = measure_spread(leaf.mean(0))
    teacher_std, teacher_cov = measure_spread(teacher_LBW.mean(0))
    mean_std = (std + teacher_std) / 2
    check(f"spread.{rows}.std", mean_std, student_LBW=leaf)
    check(f"spread.{rows}.cov", cov + teacher_cov, student_LBW=leaf)


def test_sdpn():
    objective = SDPN(
        embed_dim=5,
        output_dim=5,
        num_prototypes=7,
        hidden_dim=4,
    )
    objective.double()
    objective.prototype_KD.data.copy_(figure("sdpn.prototype_KD"))
    short_VBD = figure("sdpn.short_VBD", leaf=True)
    log_VBK = objective.assign(short_VBD)

    # The targets are sharpened by a temperature of 0.25 and balanced over the prototypes.
    long_log_BK = objective.assign(figure("sdpn.long_BD"))
    sharp_BK = (long_log_BK.detach() / 0.25).softmax(1)
    target_BK = balance(sharp_BK, iterations=3)
    close(target_BK, figure("sdpn.target_BK"))
    ones_B = torch.ones(6, dtype=torch.float64)
    close(target_BK.sum(1), ones_B)

    leaves = {"short_VBD": short_VBD, "prototype_KD": objective.prototype_KD}
    cross_entropy_VB = -(target_BK * log_VBK).sum(2)
    check("sdpn.cross_entropy", cross_entropy_VB.mean(), **leaves)
    mean_K = log_VBK.exp().mean((0, 1))
    check("sdpn.me_max", concentration(mean_K), **leaves)
    check("sdpn.koleo", koleo(short_VBD[0]), short_VBD=short_VBD)


def test_simclr():
    leaf = figure("simclr.out_2BD", leaf=True)
    loss, accuracy = contrast(leaf, temperature=0.07)
    check("simclr", loss, out_2BD=leaf)
    assert 0 <= accuracy < 1
    # Two equal views are always nearest to each other.
    equal_2BD = leaf[:1].repeat(2, 1, 1)
    _, accuracy = contrast(equal_2BD, temperature=0.07)
    assert accuracy == 1


def load(module: nn.Module, name: str, **renamed: str) -> nn.Module:
    """Load the stored weights; in their names, replace each key of `renamed` by its value."""
    prefix = f"projector.{name}.state."
    state = {}
    for key in FIGURES:
        if key.startswith(prefix):
            new_key = key.removeprefix(prefix)
            for old, new in renamed.items():
                new_key = new_key.replace(old, new)
            state[new_key] = figure(key)
    state.pop("weight_g", None)

    module.double().load_state_dict(state, strict=False)
    parameter_names = {key for key, _ in module.named_parameters()}
    assert parameter_names == state.keys()
    return module


def test_projectors():
    x_ND = figure("projector.x_ND")
    objective = DINO(
        embed_dim=5,
        hidden_dim=6,
        wide_dim=8,
        bottleneck_dim=4,
        num_outputs=7,
    )
    renamed = {
        "add_layer": "narrow.0",
        "last_layer.weight_v": "weight_KD",
        "last_layer.": "",
    }
    rdino = load(objective.projector, "rdino", **renamed)
    for index, output in enumerate(rdino(x_ND)):
        close(output, figure(f"projector.rdino.out{index}"))

    projector = mlp([5, 6, 6, 4], batch_norm=True)
    sdpn = load(projector, "sdpn", **{"mlp.": ""})
    output = nn.functional.normalize(sdpn(x_ND))
    close(output, figure("projector.sdpn.out0"))
