"""Narrowed models give the bits of autocast, but for the last layers, which are fp32.

Letters: B batch, T frames, F mel bins, D embedding.
"""

import pytest
import torch
from members import SMALL
from test_folding import build

from speakerlab.models import MODELS
from speakerlab.models.folding import LINEAR, fold_batchnorm
from speakerlab.models.narrowing import InFp32, find_last, narrow

BF16 = torch.bfloat16


def under_autocast(model: torch.nn.Module, feats_BTF: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(), torch.autocast("cpu", dtype=BF16):
        return model(feats_BTF)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_only_the_last_layers_differ_from_autocast(name):
    folded = fold_batchnorm(build(name, SMALL[name]))
    last = find_last(folded)
    feats_BTF = torch.randn(2, 137, folded.feat_dim)
    wanted_BD = under_autocast(folded, feats_BTF)
    narrowed = narrow(fold_batchnorm(build(name, SMALL[name])), BF16)
    found_BD = under_autocast(narrowed, feats_BTF)
    assert last
    assert all(isinstance(narrowed.get_submodule(layer), InFp32) for layer in last)
    assert found_BD.dtype == torch.float32
    # With the last layers as autocast has them, every bit is that of autocast.
    for layer in last:
        parent, _, child = layer.rpartition(".")
        inner = narrowed.get_submodule(layer).layer
        setattr(narrowed.get_submodule(parent), child, inner)
    assert torch.equal(under_autocast(narrowed, feats_BTF), wanted_BD)
    near = torch.nn.functional.cosine_similarity(found_BD, wanted_BD.float())
    assert near.min() > 0.9999


def test_what_is_last_and_what_is_narrow():
    campplus = narrow(fold_batchnorm(build("campplus", SMALL["campplus"])), BF16)
    wide = [
        name
        for name, layer in campplus.named_modules()
        if isinstance(layer, LINEAR) and layer.weight.dtype == torch.float32
    ]
    *masks, last = wide
    assert last == "xvector.dense.linear.layer"
    assert masks and all(".cam_layer.linear" in name and "local" not in name for name in masks)
    assert campplus.head.conv1.weight.dtype == BF16
    assert campplus.head.conv1.bias.dtype == torch.float32
    xvector = fold_batchnorm(build("xvector", SMALL["xvector"]))
    assert len(find_last(xvector)) == 1


def test_a_pooling_keeps_its_weights():
    args = {**SMALL["resnet"], "pooling": "astp"}
    resnet = narrow(fold_batchnorm(build("resnet", args)), BF16)
    assert resnet.pool.linear1.weight.dtype == torch.float32
    assert resnet.conv1.weight.dtype == BF16


@pytest.mark.parametrize("name", sorted(MODELS))
def test_folded_in_16_bits_it_is_the_model_that_was_trained(name):
    """Whatever path 16 bits take through a model, it has to know of what folding left there."""
    model = build(name, SMALL[name])
    feats_BTF = torch.randn(3, 137, model.feat_dim)
    with torch.inference_mode():
        wanted_BD = model(feats_BTF)
    found_BD = under_autocast(narrow(fold_batchnorm(model), BF16), feats_BTF)
    assert torch.nn.functional.cosine_similarity(found_BD, wanted_BD).min() > 0.999
