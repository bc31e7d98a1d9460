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
    if x.dim() != 4:
        return ""
    _, channels, *plane = x.shape
    if channels == 1 or 1 in plane:
        return ""
    return "C" if x.stride(1) == 1 else "T"


class Orders(TorchDispatchMode):
    """Notes what kernels of the backward pass are given: (gradient, input)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, str]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in BACKWARDS:
            gradient, x = args[:2]
            self.seen.append((name, order(gradient), order(x)))
        return func(*args, **(kwargs or {}))


def run(
    name: str, layout: torch.memory_format
) -> tuple[Tensor, dict[str, Tensor], Orders]:
    """(embeddings, gradients, what the backward pass met) of a training step in float64."""
    torch.manual_seed(0)
    model = MODELS[name](**SMALL[name])
    model.double().to(memory_format=layout).train()
    feats_BTF = torch.randn(
        4,
        60,
        model.feat_dim,
        dtype=torch.float64,
    )
    emb_BD = model(feats_BTF)
    weight_BD = torch.randn_like(emb_BD)
    with Orders() as orders:
        (emb_BD * weight_BD).sum().backward()

    grads = {}
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            grads[key] = parameter.grad
    return emb_BD.detach(), grads, orders


# redimnet2 has the blocks of redimnet.
SLOW = pytest.param("redimnet", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [*sorted(MODELS.keys() - {"redimnet"}), SLOW])
def test_nothing_but_the_order_changes(name):
    plain, plain_grads, _ = run(name, torch.contiguous_format)
    other, other_grads, _ = run(name, torch.channels_last)
    assert torch.allclose(plain, other, rtol=1e-9, atol=1e-9)
    assert plain_grads.keys() == other_grads.keys()
    for key, grad in plain_grads.items():
        error = (grad - other_grads[key]).abs().max()
        # Some gradients are zero but for rounding.
        largest = grad.abs().max().clamp_min(1e-3)
        assert error < 1e-8 * largest, key


@UNMIXED
def test_no_layer_meets_both_orders(name):
    _, _, orders = run(name, torch.channels_last)
    mixed = []
    for kernel, grad_order, input_order in orders.seen:
        is_ambiguous = not grad_order or not input_order
        if not is_ambiguous and grad_order != input_order:
            mixed.append((kernel, grad_order, input_order))
    assert mixed == []


@pytest.mark.parametrize("stride", [1, 2, (2, 3)])
def test_subsampling_is_slicing(stride):
    bins = frames = stride
    if isinstance(stride, tuple):
        bins, frames = stride
    x_BCFT = torch.randn(2, 3, 7, 9)
    expected_BCFT = x_BCFT[:, :, ::bins, ::frames]
    assert torch.equal(subsample(stride)(x_BCFT), expected_BCFT)
