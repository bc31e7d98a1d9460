"""In channels last no layer meets both orders, and nothing but the order changes.

Letters: B batch, T frames, F mel bins, C channels.
"""

from typing import Any

import pytest
import torch
from members import SMALL
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speakerlab.models import MODELS
from speakerlab.models.pooling import subsample

BACKWARDS = ("native_batch_norm_backward", "threshold_backward", "hardtanh_backward")
# Its 2-D stages lie between 1-D ones: what comes back through them is contiguous.
MIXED = {"redimnet", "redimnet2"}
UNMIXED = pytest.mark.parametrize("name", sorted(MODELS.keys() - MIXED))


def order(x: Tensor) -> str:
    """Which axis neighbours in memory are along: "C" or "T"; "" if that is ambiguous."""
    if x.dim() != 4 or x.shape[1] == 1 or 1 in x.shape[2:]:
        return ""
    return "C" if x.stride(1) == 1 else "T"


class Orders(TorchDispatchMode):
    """Notes what kernels of the backward pass are given: (gradient, input)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in BACKWARDS:
            self.seen.append((name, order(args[0]), order(args[1])))
        return func(*args, **(kwargs or {}))


def run(name: str, layout: torch.memory_format) -> tuple[Tensor, dict[str, Tensor], Orders]:
    """(embeddings, gradients, what the backward pass met) of a training step in float64."""
    torch.manual_seed(0)
    model = MODELS[name](**SMALL[name]).double().to(memory_format=layout).train()
    feats_BTF = torch.randn(4, 60, model.feat_dim, dtype=torch.float64)
    emb_BD = model(feats_BTF)
    weight_BD = torch.randn_like(emb_BD)
    with Orders() as orders:
        (emb_BD * weight_BD).sum().backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return emb_BD.detach(), grads, orders


@pytest.mark.parametrize("name", sorted(MODELS))
def test_nothing_but_the_order_changes(name):
    plain, plain_grads, _ = run(name, torch.contiguous_format)
    other, other_grads, _ = run(name, torch.channels_last)
    assert torch.allclose(plain, other, rtol=1e-9, atol=1e-9)
    assert plain_grads.keys() == other_grads.keys()
    for key, grad in plain_grads.items():
        largest = max(float(grad.abs().max()), 1e-3)  # some are zero but for rounding
        assert float((grad - other_grads[key]).abs().max()) < 1e-8 * largest, key


@UNMIXED
def test_no_layer_meets_both_orders(name):
    _, _, orders = run(name, torch.channels_last)
    met = [(kernel, grad, x) for kernel, grad, x in orders.seen if grad and x]
    assert [pair for pair in met if pair[1] != pair[2]] == []


@pytest.mark.parametrize("stride", [1, 2, (2, 3)])
def test_subsampling_is_slicing(stride):
    bins, frames = stride if isinstance(stride, tuple) else (stride, stride)
    x_BCFT = torch.randn(2, 3, 7, 9)
    assert torch.equal(subsample(stride)(x_BCFT), x_BCFT[:, :, ::bins, ::frames])
