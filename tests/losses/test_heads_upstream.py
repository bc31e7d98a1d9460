"""Losses and gradients equal those of WeSpeaker and 3D-Speaker.

`figures.npz` is written and described by make_figures.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from speakerlab.losses import HEADS

FIGURES = np.load(Path(__file__).with_name("figures.npz"))

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


def make_head(name, args):
    weight_CKD = torch.from_numpy(FIGURES["weight_CKD"])
    classes, _, dim = weight_CKD.shape
    head = HEADS[name](embed_dim=dim, num_classes=classes, **args)
    state = {"bias_C": torch.from_numpy(FIGURES["bias_C"]), "bias": torch.tensor(SPHEREFACE2_BIAS)}
    with torch.no_grad():
        for key, parameter in head.named_parameters():
            weight = weight_CKD if parameter.dim() == 3 else weight_CKD[:, 0]
            parameter.copy_(weight if key == "weight_CD" else state[key])
    return head


def test_every_figure_is_compared():
    assert {key.removesuffix(".loss_MB") for key in FIGURES if "loss" in key} == set(COMPARED)


@pytest.mark.parametrize("figures", COMPARED)
def test_loss_and_gradient_are_those_of_upstream(figures):
    name, args = COMPARED[figures]
    head = make_head(name, args)
    label_B = torch.from_numpy(FIGURES["label_B"])
    margins = FIGURES["margin_M"].tolist()
    assert margins == [0.0, 0.1, 0.2, 0.5]
    for m, margin in enumerate(margins if name != "softmax" else [0.0]):
        emb_BD = torch.from_numpy(FIGURES["emb_BD"]).requires_grad_()
        rows = [head(emb_BD[i : i + 1], label_B[i : i + 1], margin)[0] for i in range(len(label_B))]
        head(emb_BD, label_B, margin)[0].backward()
        assert emb_BD.grad is not None
        wanted_B = torch.from_numpy(FIGURES[f"{figures}.loss_MB"][m])
        wanted_BD = torch.from_numpy(FIGURES[f"{figures}.grad_MBD"][m])
        torch.testing.assert_close(torch.stack(rows).detach(), wanted_B, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(emb_BD.grad, wanted_BD, rtol=1e-4, atol=1e-5)
