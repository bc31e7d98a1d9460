"""Weights in 16 bits once, not in each forward pass; the layers after the pooling in fp32.

In: a backbone for inference under autocast. Out: the same, changed. What autocast would cast a
weight to is kept instead of the weight, so all but the last layers give the very bits that autocast
gives with fp32 weights. The last layers work on one vector of each recording: fp32 costs nothing
there, and an embedding keeps its digits.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from speakerlab.models.folding import LINEAR, PROBED_FRAMES, probe
from speakerlab.models.pooling import Pooling, fp32_island, widened


class InFp32(nn.Module):
    """A layer that autocast does not reach."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with fp32_island(x):
            return self.layer(widened(x))


def narrow(backbone: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Keep the weights of convolutions and linear layers in `dtype`, but for poolings and the last.

    Biases stay fp32: what is added outside a product is added in fp32.
    """
    last = find_last(backbone)
    wide = find_wide(backbone, last)
    for layer in backbone.modules():
        if isinstance(layer, LINEAR) and id(layer) not in wide:
            layer.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    for name in last:
        parent, _, child = name.rpartition(".")
        setattr(backbone.get_submodule(parent), child, InFp32(backbone.get_submodule(name)))
    return backbone


def find_wide(backbone: nn.Module, last: Iterable[str]) -> set[int]:
    """The id of every module that stays fp32: the poolings, their parts, and the `last` layers.

    So do those that a module names in `wide_layers`.
    """
    poolings = [module for module in backbone.modules() if isinstance(module, Pooling)]
    wide = {id(part) for module in poolings for part in module.modules()}
    for module in backbone.modules():
        wide |= {id(getattr(module, name)) for name in getattr(module, "wide_layers", ())}
    return wide | {id(backbone.get_submodule(name)) for name in last}


def find_last(backbone: nn.Module) -> list[str]:
    """Names of the layers after all that see time: none after them gives more of a longer input."""
    short, long = (_shapes(backbone, frames) for frames in (PROBED_FRAMES, 3 * PROBED_FRAMES))
    last: list[str] = []
    for (name, shape), (again, other) in zip(reversed(short), reversed(long)):
        if name != again or shape != other:
            break
        last.append(name)
    return last


def _shapes(backbone: nn.Module, frames: int) -> list[tuple[str, torch.Size]]:
    """(name, shape of the output) of each call of a layer, in order."""
    found: list[tuple[str, torch.Size]] = []

    def note(name: str, _layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        found.append((name, output.shape))

    hooks = [
        module.register_forward_hook(partial(note, name))
        for name, module in backbone.named_modules()
        if isinstance(module, LINEAR)
    ]
    probe(backbone, more_frames=frames, hooks=hooks)
    return found
