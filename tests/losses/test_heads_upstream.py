"""Losses and gradients equal those of WeSpeaker and 3D-Speaker.

`figures.npz` is written and described by make_figures.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from speakerlab.losses import HEADS

FIGURES_FILE = Path(__file__).with_name("figures.npz")
FIGURES = np.load(FIGURES_FILE)

# figures -> (head, arguments)
COMPARED = {
    "wespeaker.am": ("am_softmax", {}),
    "wespeaker.aam": ("aam_softmax", {}),
    "wespeaker.subcenter": ("aam_softmax_subcenter_topk", {}),
    "wespeaker.subcenter_lm": ("aam_softmax_subcenter_topk", {"top_k": 0}),
    "wespeaker.sphereface2_a": ("sphereface2", {"margin_type": "A"}),
    "wespeaker.sphereface2_c": ("sphereface2", {"margin_type": "C"}),
    "3dspeaker.am": ("am_softmax", {}),
    "3dspeaker.aam": ("aam_softmax", {}),
    "3dspeaker.aam_easy": ("aam_softmax", {"easy_margin": True}),
    "3dspeaker.softmax": ("softmax", {}),
}
SPHEREFACE2_BIAS = 0.4


def figure(name: str) -> torch.Tensor:
    return torch.from_numpy(FIGURES[name])


def make_head(name, args):
    weight_CKD = figure("weight_CKD")
    classes, _, dim = weight_CKD.shape
    head = HEADS[name](embed_dim=dim, num_classes=classes, **args)
    state = {
        "bias_C": figure("bias_C"),
        "bias": torch.tensor(SPHEREFACE2_BIAS),
    }
    has_centers = head.get_parameter("weight_CD").dim() == 3
    state["weight_CD"] = weight_CKD if has_centers else weight_CKD[:, 0]
    with torch.no_grad():
        for key, parameter in head.named_parameters():
            parameter.copy_(state[key])
    return head


def test_every_figure_is_compared():
    stored = set()
    for key in FIGURES:
        if key.endswith(".loss_MB"):
            stored.add(key.removesuffix(".loss_MB"))
    assert stored == set(COMPARED)


@pytest.mark.parametrize("figures", COMPARED)
def test_loss_and_gradient_are_those_of_upstream(figures):
    name, args = COMPARED[figures]
    head = make_head(name, args)
    label_B = figure("label_B")
    loss_MB = figure(f"{figures}.loss_MB")
    grad_MBD = figure(f"{figures}.grad_MBD")
    margins = FIGURES["margin_M"].tolist()
    assert margins == [0.0, 0.1, 0.2, 0.5]
    if name == "softmax":
        margins = [0.0]
    for margin, expected_B, expected_BD in zip(margins, loss_MB, grad_MBD):
        emb_BD = figure("emb_BD").requires_grad_()
        losses = []
        for row in range(len(label_B)):
            row_BD = emb_BD[row : row + 1]
            loss, _ = head(row_BD, label_B[row : row + 1], margin)
            losses.append(loss.detach())
        mean_loss, _ = head(emb_BD, label_B, margin)
        mean_loss.backward()
        loss_B = torch.stack(losses)
        assert emb_BD.grad is not None
        torch.testing.assert_close(loss_B, expected_B, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(emb_BD.grad, expected_BD, rtol=1e-4, atol=1e-5)
