"""Folding keeps the embeddings, and 16-bit weights give the bits of autocast.

Letters: B batch, T frames, F mel bins, D embedding.
"""

import copy

import pytest
import torch
from members import MEMBERS, SMALL
from torch import nn
from torch.nn import functional as F

from speakerlab.models import MODELS
from speakerlab.models.folding import (
    LINEAR,
    InFp32,
    find_last,
    find_pairs,
    fold_batchnorm,
    narrow,
)

BF16 = torch.bfloat16
BATCHNORM = nn.modules.batchnorm._BatchNorm


def build(name: str, args: dict[str, object]) -> nn.Module:
    """Return a model whose BatchNorms do not have their initial values."""
    torch.manual_seed(0)
    model = MODELS[name](**args)
    for module in model.modules():
        is_norm = isinstance(module, BATCHNORM)
        if is_norm and module.affine:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    # Sets the running statistics.
    feats_BTF = torch.randn(4, 60, model.feat_dim)
    with torch.no_grad():
        model(feats_BTF)
    return model.eval()


def build_small(name: str, **options: object) -> nn.Module:
    args = {**SMALL[name], **options}
    return build(name, args)


def norms(model: nn.Module) -> int:
    """Number of BatchNorms."""
    return sum(isinstance(module, BATCHNORM) for module in model.modules())


cases = []
for small_name in sorted(MODELS):
    # redimnet2 has the blocks of redimnet.
    marks = [pytest.mark.slow] if small_name == "redimnet" else []
    small_case = pytest.param(small_name, SMALL[small_name], id=small_name, marks=marks)
    cases.append(small_case)
for published_name, member in MEMBERS.items():
    case = pytest.param(
        member.model,
        member.args,
        id=f"published {published_name}",
        marks=pytest.mark.slow,
    )
    cases.append(case)


@pytest.mark.parametrize(("name", "args"), cases)
def test_the_embeddings_are_the_same(name, args):
    model = build(name, args).double()
    folded = fold_batchnorm(copy.deepcopy(model))
    num_folded = len(find_pairs(model))
    assert norms(folded) == norms(model) - num_folded
    for frames in (model.min_frames, 137, 298):
        feats_BTF = torch.randn(
            2,
            frames,
            model.feat_dim,
            dtype=torch.float64,
        )
        with torch.inference_mode():
            expected_BD = model(feats_BTF)
            folded_BD = folded(feats_BTF)
        assert torch.isfinite(expected_BD).all()
        error = (folded_BD - expected_BD).abs()
        largest = expected_BD.abs().max()
        assert error.max() < 1e-9 * largest


def test_the_order_of_layers_decides_which_are_folded():
    """Convolution then BatchNorm in ERes2Net and ResNet; in CAM++ the other order stays."""
    resnet = fold_batchnorm(build_small("resnet"))
    eres2net = fold_batchnorm(build_small("eres2net"))
    assert norms(resnet) == 0
    assert norms(eres2net) == 0

    campplus = build_small("campplus")
    assert ("head.conv1", "head.bn1") in find_pairs(campplus)
    before = norms(campplus)
    after = norms(fold_batchnorm(campplus))
    assert 0 < after < before


def test_a_layer_that_runs_twice_is_left_alone():
    class Twice(nn.Module):
        feat_dim = 4
        min_frames = 1

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, feats_BTF):
            mean_BF = feats_BTF.mean(1)
            first_BF = self.norm(self.linear(mean_BF))
            return first_BF + self.linear(first_BF)

    # Folding would also change the second run, which no BatchNorm follows.
    model = Twice().eval()
    model.norm.running_mean.fill_(3.0)
    assert find_pairs(model) == []
    feats_BTF = torch.randn(2, 5, 4)
    folded = fold_batchnorm(copy.deepcopy(model))
    assert torch.equal(folded(feats_BTF), model(feats_BTF))


def under_autocast(model: torch.nn.Module, feats_BTF: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(), torch.autocast("cpu", BF16):
        return model(feats_BTF)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_only_the_last_layers_differ_from_autocast(name):
    folded = fold_batchnorm(build_small(name))
    last = find_last(folded)
    assert last
    feats_BTF = torch.randn(2, 137, folded.feat_dim)
    expected_BD = under_autocast(folded, feats_BTF)
    narrowed = narrow(fold_batchnorm(build_small(name)), BF16)
    folded_BD = under_autocast(narrowed, feats_BTF)
    assert folded_BD.dtype == torch.float32

    # With the last layers as autocast has them, every bit is that of autocast.
    for layer_name in last:
        parent_name, _, child = layer_name.rpartition(".")
        parent = narrowed.get_submodule(parent_name)
        in_fp32 = narrowed.get_submodule(layer_name)
        assert isinstance(in_fp32, InFp32)
        setattr(parent, child, in_fp32.layer)
    all_in_16_bits_BD = under_autocast(narrowed, feats_BTF)
    assert torch.equal(all_in_16_bits_BD, expected_BD)

    near_autocast_B = F.cosine_similarity(folded_BD, expected_BD.float())
    assert near_autocast_B.min() > 0.9999
    # Near the model as it was trained, in fp32.
    trained = build_small(name)
    with torch.inference_mode():
        trained_BD = trained(feats_BTF)
    near_trained_B = F.cosine_similarity(folded_BD, trained_BD)
    assert near_trained_B.min() > 0.999


def test_masks_and_the_last_layer_stay_fp32():
    campplus = narrow(fold_batchnorm(build_small("campplus")), BF16)
    wide = []
    for name, layer in campplus.named_modules():
        if isinstance(layer, LINEAR) and layer.weight.dtype == torch.float32:
            wide.append(name)
    # The layers whose weights stay fp32.
    *masks, last = wide
    assert last == "xvector.dense.linear.layer"
    assert masks
    for name in masks:
        assert ".cam_layer.linear" in name
        assert "local" not in name
    first_conv = campplus.head.conv1
    assert first_conv.weight.dtype == BF16
    assert first_conv.bias.dtype == torch.float32

    xvector = fold_batchnorm(build_small("xvector"))
    assert len(find_last(xvector)) == 1


def test_a_pooling_keeps_its_weights():
    model = fold_batchnorm(build_small("resnet", pooling="astp"))
    resnet = narrow(model, BF16)
    attention = resnet.pool.linear1
    assert attention.weight.dtype == torch.float32
    assert resnet.conv1.weight.dtype == BF16
