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
EDGES = [-torch.inf, -1.0, -0.0, 0.0, 1e-30, 19.875, 20.0, 20.125, torch.inf, torch.nan]


def hardtanh(x_BCFT: Tensor) -> Tensor:
    return F.hardtanh(x_BCFT, 0.0, 20.0)


def hardtanh_groups(x_BCFT: Tensor, width: int) -> tuple[Tensor, ...]:
    return hardtanh(x_BCFT).split(width, dim=1)


def join_hardtanh(before: list[Tensor], x_BCFT: Tensor, after: list[Tensor]) -> Tensor:
    return torch.cat([*before, hardtanh(x_BCFT), *after], dim=1)


class Lerp:
    @staticmethod
    def apply(z_BCFT: Tensor, _both: Tensor, x_BCFT: Tensor, y_BCFT: Tensor) -> Tensor:
        return torch.lerp(y_BCFT, x_BCFT, (2 * z_BCFT).sigmoid()) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_at_the_edges(dtype):
    x, other = (torch.tensor([EDGES], dtype=dtype, requires_grad=True) for _ in range(2))
    d_y = torch.arange(1, 11, dtype=dtype).unsqueeze(0)
    y, expected = clipped_relu(x.clone()), F.hardtanh(other, 0.0, 20.0)
    y.backward(d_y)
    expected.backward(d_y)
    torch.testing.assert_close(y, expected, **same_bits)
    torch.testing.assert_close(x.grad, other.grad, **same_bits)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_groups_are_dense_and_their_memory_is_all_that_is_kept(layout):
    x_BCFT = torch.randn(2, 6, 4, 5).to(memory_format=layout).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        groups = clipped_groups(x_BCFT * 10, 2)
    assert len(groups) == 3
    for group in groups:
        assert group.is_contiguous(memory_format=layout)
        assert group.untyped_storage().nbytes() == group.nbytes
    addresses = {group.data_ptr() for group in groups}
    assert addresses == {tensor.data_ptr() for tensor in kept if tensor.numel() > 1}


@pytest.mark.parametrize("name", ["eres2net", "eres2netv2", "res2net"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_has_the_bits_of_torchs_own(name, dtype, monkeypatch):
    def everything() -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        model: Any = MODELS[name](**SMALL[name])
        model.to(memory_format=torch.channels_last)
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            nn.init.normal_(norm.weight, 4.0, 4.0)  # reaches the ceiling
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            emb_BD = model(torch.randn(4, 40, model.feat_dim))
        (emb_BD * torch.randn_like(emb_BD)).sum().backward()
        found = {"": emb_BD, **dict(model.named_buffers())}
        return found | {key: p.grad for key, p in model.named_parameters()}

    ours = everything()
    monkeypatch.setattr(res2net, "clipped_relu", hardtanh)
    monkeypatch.setattr(res2net, "clipped_groups", hardtanh_groups)
    monkeypatch.setattr(res2net, "join_clipped", join_hardtanh)
    monkeypatch.setattr(eres2net, "_Weighted", Lerp)
    for key, expected in everything().items():
        torch.testing.assert_close(ours[key], expected, **same_bits)


def test_fusion_is_the_published_formula():
    torch.manual_seed(0)
    fusion = AttentiveFusion(4).double()
    maps = [torch.randn(3, 4, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    d_BCFT = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    inputs = [*maps, *fusion.parameters()]
    x_BCFT, y_BCFT = maps
    a_BCFT = fusion.local_att(torch.cat(maps, dim=1)).tanh()
    expected = x_BCFT * (1 + a_BCFT) + y_BCFT * (1 - a_BCFT)
    found = fusion(*maps)
    torch.testing.assert_close(found, expected)
    expected_grads = torch.autograd.grad(expected, inputs, d_BCFT)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, d_BCFT), expected_grads)


@pytest.mark.parametrize("trains", [True, False])
def test_compiles_in_one_graph(trains):
    block: Any = MODELS["eres2net"](**SMALL["eres2net"]).get_submodule("layer3.1").train(trains)
    assert block.fuse_models
    x_BCFT = torch.randn(2, block.conv1.in_channels, 4, 5)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    found = []
    with torch.set_grad_enabled(trains):
        for run in (block, compiled):
            y_BCFT = run(x_BCFT)
            if trains:
                y_BCFT.square().sum().backward()
            found.append([y_BCFT, *(p.grad for p in block.parameters())])
            block.zero_grad()
    torch.testing.assert_close(found[1], found[0])
