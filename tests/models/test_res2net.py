"""The ceiling of Res2Nets: torch's own bits, with less kept for the backward pass.

Letters: B batch, F mel bins, T frames, C channels, W channels of a group.
"""

from typing import Any

import pytest
import torch
from members import SMALL
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.models import MODELS, eres2net, res2net
from speakerlab.models.eres2net import AttentiveFusion
from speakerlab.models.res2net import clipped_groups, clipped_relu

same_bits = {"rtol": 0, "atol": 0, "equal_nan": True}
INF = torch.inf
EDGES = [-INF, -1.0, -0.0, 0.0, 1e-30, 19.875, 20.0, 20.125, INF, torch.nan]
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def hardtanh(x_BCFT: Tensor) -> Tensor:
    return F.hardtanh(x_BCFT, 0.0, 20.0)


def hardtanh_groups(x_BCFT: Tensor, width: int) -> tuple[Tensor, ...]:
    return hardtanh(x_BCFT).split(width, dim=1)


def join_hardtanh(before: list[Tensor], x_BCFT: Tensor, after: list[Tensor]) -> Tensor:
    clipped_BCFT = hardtanh(x_BCFT)
    return torch.cat([*before, clipped_BCFT, *after], dim=1)


class Lerp:
    @staticmethod
    def apply(z_BCFT: Tensor, _both: Tensor, x_BCFT: Tensor, y_BCFT: Tensor) -> Tensor:
        weight_BCFT = (2 * z_BCFT).sigmoid()
        return 2 * torch.lerp(y_BCFT, x_BCFT, weight_BCFT)


@both_dtypes
def test_values_and_gradients_at_the_edges(dtype):
    x = torch.tensor([EDGES], dtype=dtype)
    other = x.clone()
    x.requires_grad_()
    other.requires_grad_()
    y = clipped_relu(x.clone())
    expected = F.hardtanh(other, 0.0, 20.0)
    d_y = torch.arange(1, 11, dtype=dtype)[None]
    y.backward(d_y)
    expected.backward(d_y)
    torch.testing.assert_close(y, expected, **same_bits)
    torch.testing.assert_close(x.grad, other.grad, **same_bits)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_groups_are_dense_and_their_memory_is_all_that_is_kept(layout):
    x_BCFT = torch.randn(2, 6, 4, 5)
    x_BCFT = x_BCFT.to(memory_format=layout).requires_grad_()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        groups = clipped_groups(x_BCFT * 10, 2)
    assert len(groups) == 3
    for group in groups:
        storage = group.untyped_storage()
        assert group.is_contiguous(memory_format=layout)
        assert storage.nbytes() == group.nbytes

    # Saved tensors of one value, as the factor 10 is, do not count.
    group_addresses = {group.data_ptr() for group in groups}
    saved_addresses = {tensor.data_ptr() for tensor in saved if tensor.numel() > 1}
    assert group_addresses == saved_addresses


def train_one_step(name: str, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Embeddings, buffers and gradients of a training step, by name."""
    torch.manual_seed(0)
    model: Any = MODELS[name](**SMALL[name])
    model.to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            # Reaches the ceiling.
            nn.init.normal_(module.weight, mean=4.0, std=4.0)

    feats_BTF = torch.randn(4, 40, model.feat_dim)
    is_narrow = dtype == torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=is_narrow):
        emb_BD = model(feats_BTF)
    weight_BD = torch.randn_like(emb_BD)
    (emb_BD * weight_BD).sum().backward()

    values = dict(model.named_buffers())
    values["embedding"] = emb_BD
    for key, parameter in model.named_parameters():
        values[key] = parameter.grad
    return values


@pytest.mark.parametrize("name", ["eres2net", "eres2netv2", "res2net"])
@both_dtypes
def test_a_training_step_has_the_bits_of_torchs_own(name, dtype, monkeypatch):
    ours = train_one_step(name, dtype)
    monkeypatch.setattr(res2net, "clipped_relu", hardtanh)
    monkeypatch.setattr(res2net, "clipped_groups", hardtanh_groups)
    monkeypatch.setattr(res2net, "join_clipped", join_hardtanh)
    monkeypatch.setattr(eres2net, "_Weighted", Lerp)
    theirs = train_one_step(name, dtype)
    for key, expected in theirs.items():
        torch.testing.assert_close(ours[key], expected, **same_bits)


def test_fusion_is_the_published_formula():
    torch.manual_seed(0)
    fusion = AttentiveFusion(4).double()
    shape = (3, 4, 5, 6)
    x_BCFT = torch.randn(shape, dtype=torch.float64)
    y_BCFT = torch.randn(shape, dtype=torch.float64)
    d_BCFT = torch.randn(shape, dtype=torch.float64)
    x_BCFT.requires_grad_()
    y_BCFT.requires_grad_()

    # x * (1 + a) + y * (1 - a) with the attention a of both.
    both_BCFT = torch.cat([x_BCFT, y_BCFT], dim=1)
    a_BCFT = fusion.local_att(both_BCFT).tanh()
    expected = x_BCFT * (1 + a_BCFT) + y_BCFT * (1 - a_BCFT)
    fused = fusion(x_BCFT, y_BCFT)
    torch.testing.assert_close(fused, expected)

    inputs = [x_BCFT, y_BCFT, *fusion.parameters()]
    expected_grads = torch.autograd.grad(expected, inputs, d_BCFT)
    grads = torch.autograd.grad(fused, inputs, d_BCFT)
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize("trains", [True, False])
def test_compiles_in_one_graph(trains):
    model = MODELS["eres2net"](**SMALL["eres2net"])
    block: Any = model.get_submodule("layer3.1")
    block.train(trains)
    assert block.fuse_models
    in_channels = block.conv1.in_channels
    x_BCFT = torch.randn(2, in_channels, 4, 5)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    outputs = []
    with torch.set_grad_enabled(trains):
        for run in (block, compiled):
            y_BCFT = run(x_BCFT)
            if trains:
                y_BCFT.square().sum().backward()
            gradients = [parameter.grad for parameter in block.parameters()]
            outputs.append([y_BCFT, *gradients])
            block.zero_grad()
    plain_values, compiled_values = outputs
    torch.testing.assert_close(compiled_values, plain_values)
