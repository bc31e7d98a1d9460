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
from speakerlab.models.res2net import clipped_groups, clipped_relu

same_bits = {"rtol": 0, "atol": 0, "equal_nan": True}
EDGES = [-torch.inf, -1.0, -0.0, 0.0, 1e-30, 19.875, 20.0, 20.125, torch.inf, torch.nan]


def torchs_own(x_BCFT: Tensor, width: int) -> tuple[Tensor, ...]:
    return F.hardtanh(x_BCFT, 0.0, 20.0, inplace=True).split(width, dim=1)


class TorchsOwn:
    @staticmethod
    def apply(sum_BCFT: Tensor, a_BCFT: Tensor, _both: Tensor, x_BCFT: Tensor, y_BCFT: Tensor):
        return torch.addcmul(sum_BCFT, a_BCFT, x_BCFT - y_BCFT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_at_the_edges(dtype):
    x, other = (torch.tensor([EDGES], dtype=dtype, requires_grad=True) for _ in range(2))
    d_y = torch.arange(1, 11, dtype=dtype).unsqueeze(0)
    y, expected = clipped_relu(x), F.hardtanh(other, 0.0, 20.0)
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
    monkeypatch.setattr(res2net, "clipped_groups", torchs_own)
    monkeypatch.setattr(eres2net, "_AddWeighted", TorchsOwn)
    for key, expected in everything().items():
        torch.testing.assert_close(ours[key], expected, **same_bits)


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
