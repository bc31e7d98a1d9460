"""Folding keeps the embeddings, and 16-bit weights give the bits of autocast.

Letters: B batch, T frames, F mel bins, D embedding.
"""

import copy

import pytest
import torch
from members import MEMBERS, SMALL
from torch import nn

from speakerlab.models import MODELS
from speakerlab.models.folding import LINEAR, InFp32, find_last, find_pairs, fold_batchnorm, narrow

BF16 = torch.bfloat16


def build(name: str, args: dict[str, object]) -> nn.Module:
    """Return a model whose BatchNorms do not have their initial values."""
    torch.manual_seed(0)
    model = MODELS[name](**args)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    with torch.no_grad():
        model(torch.randn(4, 60, model.feat_dim))
    return model.eval()


def norms(model: nn.Module) -> int:
    return sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


cases = [pytest.param(name, SMALL[name], id=name) for name in sorted(MODELS)] + [
    pytest.param(member.model, member.args, id=f"published {name}", marks=pytest.mark.slow)
    for name, member in MEMBERS.items()
]


@pytest.mark.parametrize(("name", "args"), cases)
def test_the_embeddings_are_the_same(name, args):
    model = build(name, args).double()
    folded = fold_batchnorm(copy.deepcopy(model))
    assert norms(folded) == norms(model) - len(find_pairs(model))
    for frames in (model.min_frames, 137, 298):
        feats_BTF = torch.randn(2, frames, model.feat_dim, dtype=torch.float64)
        with torch.inference_mode():
            wanted_BD, found_BD = model(feats_BTF), folded(feats_BTF)
        assert torch.isfinite(wanted_BD).all()
        assert (found_BD - wanted_BD).abs().max() < 1e-9 * wanted_BD.abs().max()


def test_the_order_of_layers_decides_which_are_folded():
    """Convolution then BatchNorm in ERes2Net and ResNet; in CAM++ the other order stays."""
    assert norms(fold_batchnorm(build("resnet", SMALL["resnet"]))) == 0
    assert norms(fold_batchnorm(build("eres2net", SMALL["eres2net"]))) == 0
    campplus = build("campplus", SMALL["campplus"])
    assert ("head.conv1", "head.bn1") in find_pairs(campplus)
    before = norms(campplus)
    assert 0 < norms(fold_batchnorm(campplus)) < before


def test_a_layer_that_runs_twice_is_left_alone():
    class Twice(nn.Module):
        feat_dim, min_frames = 4, 1

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, feats_BTF):
            first_BF = self.norm(self.linear(feats_BTF.mean(1)))
            return first_BF + self.linear(first_BF)

    model = Twice().eval()
    model.norm.running_mean.fill_(3.0)
    assert find_pairs(model) == []
    feats_BTF = torch.randn(2, 5, 4)
    assert torch.equal(fold_batchnorm(copy.deepcopy(model))(feats_BTF), model(feats_BTF))


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
    with torch.inference_mode():
        trained_BD = build(name, SMALL[name])(feats_BTF)
    assert torch.nn.functional.cosine_similarity(found_BD, trained_BD).min() > 0.999


def test_masks_and_the_last_layer_stay_fp32():
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
