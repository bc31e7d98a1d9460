"""Faster inference: BatchNorm folded into the layer before it, and weights kept in 16 bits.

In: a backbone. Out: it, for inference only, with the same embeddings. In eval mode BatchNorm
is a scale and a shift of each channel, which the weights and bias of a linear layer before it can
absorb.
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from speakerlab.core.full_precision import fp32_island, widened
from speakerlab.models.pooling import Pooling

LINEAR = (nn.Conv1d, nn.Conv2d, nn.Linear)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
PROBE_FRAMES = 20  # beyond the backbone's min_frames


def fold_batchnorm(backbone: nn.Module) -> nn.Module:
    """Make BatchNorms, where that is exact, part of other layers; changes the backbone in place.

    Which layer comes before a BatchNorm is found by running the backbone once. It must be the only
    reader of that layer's output, which the tests check for every registered model.
    """
    for linear_name, norm_name in find_pairs(backbone.eval()):
        linear: Any = backbone.get_submodule(linear_name)
        norm: Any = backbone.get_submodule(norm_name)
        dtype = linear.weight.dtype
        linear.double()  # the new weights are computed in float64
        norm.double()
        moments = norm.running_mean, norm.running_var, norm.eps
        linear.weight, linear.bias = fuse_conv_bn_weights(
            linear.weight, linear.bias, *moments, norm.weight, norm.bias
        )
        linear.to(dtype)
        backbone.set_submodule(norm_name, nn.Identity())
    return backbone


def find_pairs(backbone: nn.Module) -> list[tuple[str, str]]:
    """Return names (layer, BatchNorm) where the first's output is the second's only input."""
    calls = _calls(backbone, LINEAR + NORMS)
    count = Counter(call.name for call in calls)
    # The calls keep their tensors, so that no id comes twice; the version shows changes in place.
    outputs = {id(call.y): call for call in calls if isinstance(call.module, LINEAR)}
    pairs: list[tuple[str, str]] = []
    for call in calls:
        before = outputs.get(id(call.x))
        if before is None or isinstance(call.module, LINEAR) or call.module.running_mean is None:
            continue
        if before.y_version == call.x_version and count[before.name] == count[call.name] == 1:
            pairs.append((before.name, call.name))
    return pairs


class InFp32(nn.Module):
    """A layer that autocast does not reach."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with fp32_island(x):
            return self.layer(widened(x))


def narrow(backbone: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Keep the weights of a backbone for inference under autocast in `dtype`; changes it in place.

    These are the bits to which autocast would cast the weights in every forward pass. Biases stay
    fp32, in which they are added, and so do the layers of `find_wide`. The last layers run in fp32:
    they work on one vector per recording, so that costs nothing, and embeddings keep their digits.
    """
    last = find_last(backbone)
    wide = find_wide(backbone, last)
    for layer in backbone.modules():
        if isinstance(layer, LINEAR) and id(layer) not in wide:
            layer.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    for name in last:
        backbone.set_submodule(name, InFp32(backbone.get_submodule(name)))
    return backbone


def find_wide(backbone: nn.Module, last: Iterable[str]) -> set[int]:
    """Return the ids of the modules that stay fp32: poolings with their parts, the `last` layers,
    and those that a module names in `fp32_layers`."""
    poolings = [module for module in backbone.modules() if isinstance(module, Pooling)]
    wide = {id(part) for module in poolings for part in module.modules()}
    for module in backbone.modules():
        wide |= {id(getattr(module, name)) for name in getattr(module, "fp32_layers", ())}
    return wide | {id(backbone.get_submodule(name)) for name in last}


def find_last(backbone: nn.Module) -> list[str]:
    """Return the names of the layers after pooling: they give one value per channel."""
    calls = _calls(backbone, LINEAR)
    last = takewhile(lambda call: call.y.numel() == call.y.shape[1], reversed(calls))
    return [call.name for call in last]


class _Call(NamedTuple):
    name: str
    module: Any
    x: Tensor
    x_version: int
    y: Tensor
    y_version: int


@torch.no_grad()
def _calls(backbone: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[_Call]:
    """Run a backbone once; return the calls of layers of these kinds in order."""
    found: list[_Call] = []

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        found.append(_Call(name, module, inputs[0], inputs[0]._version, y, y._version))

    layers = [(name, m) for name, m in backbone.named_modules() if isinstance(m, kinds)]
    hooks = [layer.register_forward_hook(partial(note, name)) for name, layer in layers]
    frames: int = backbone.min_frames + PROBE_FRAMES  # pyright: ignore
    like = next(backbone.parameters())
    backbone(like.new_zeros(1, frames, backbone.feat_dim))  # pyright: ignore
    for hook in hooks:
        hook.remove()
    return found
