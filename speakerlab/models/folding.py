"""Faster inference: BatchNorm folded into the layer before it, and weights kept in 16 bits.

In: a backbone. Out: the same backbone, for inference only, with equal embeddings. In eval mode
BatchNorm is a scale and a shift of each channel, which the weights and bias of a linear layer
before it can absorb.
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from speakerlab.core.full_precision import autocast_off, widened
from speakerlab.models.pooling import Pooling

LINEAR = (nn.Conv1d, nn.Conv2d, nn.Linear)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
PROBE_FRAMES = 20  # beyond the backbone's min_frames


def fold_batchnorm(backbone: nn.Module) -> nn.Module:
    """Fold each BatchNorm, where that is exact, into the layer before it, in place.

    The layer before each BatchNorm is found by running the backbone once. The BatchNorm must be the
    only reader of that layer's output, which the tests check for every registered model.
    """
    backbone.eval()
    for linear_name, norm_name in find_pairs(backbone):
        linear: Any = backbone.get_submodule(linear_name)
        norm: Any = backbone.get_submodule(norm_name)

        # The new weights are computed in float64, so that they are rounded only once.
        dtype = linear.weight.dtype
        linear.double()
        norm.double()
        linear.weight, linear.bias = fuse_conv_bn_weights(
            linear.weight,
            linear.bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
        )
        linear.to(dtype)
        backbone.set_submodule(norm_name, nn.Identity())
    return backbone


def find_pairs(backbone: nn.Module) -> list[tuple[str, str]]:
    """Return names (layer, BatchNorm) where the first's output is the second's only input."""
    calls = _calls(backbone, LINEAR + NORMS)
    num_calls = Counter(call.name for call in calls)

    # The calls hold their tensors, so no two tensors can have the same id.
    linear_by_output: dict[int, _Call] = {}
    for call in calls:
        if isinstance(call.module, LINEAR):
            linear_by_output[id(call.y)] = call

    pairs: list[tuple[str, str]] = []
    for call in calls:
        is_norm = not isinstance(call.module, LINEAR)
        # Without running statistics, a BatchNorm is not the same scale and shift for every input.
        if not is_norm or call.module.running_mean is None:
            continue
        linear = linear_by_output.get(id(call.x))
        if linear is None:
            continue
        # The version of a tensor counts its changes in place, for example by a ReLU in between.
        is_unchanged = linear.y_version == call.x_version
        # A layer with two calls has two outputs, and folding would change both.
        is_called_once = num_calls[linear.name] == num_calls[call.name] == 1
        if is_unchanged and is_called_once:
            pair = (linear.name, call.name)
            pairs.append(pair)
    return pairs


class InFp32(nn.Module):
    """Layer that runs in fp32, outside of autocast."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with autocast_off(x):
            return self.layer(widened(x))


def narrow(backbone: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the weights of a backbone to `dtype`, in place, for inference under autocast.

    In every forward pass, autocast would cast the weights to the same values. Biases stay fp32, in
    which they are added, and so do the layers of `find_wide`. The last layers run in fp32: they
    work on one vector per recording, so that costs nothing, and embeddings keep their digits.
    """
    last_names = find_last(backbone)
    wide_ids = find_wide(backbone, last_names)
    for layer in backbone.modules():
        is_wide = id(layer) in wide_ids
        if isinstance(layer, LINEAR) and not is_wide:
            weight = layer.weight.detach().to(dtype)
            layer.weight = nn.Parameter(weight, requires_grad=False)

    # Under autocast, fp32 weights alone do not keep a layer in fp32.
    for name in last_names:
        layer = backbone.get_submodule(name)
        backbone.set_submodule(name, InFp32(layer))
    return backbone


def find_wide(backbone: nn.Module, last: Iterable[str]) -> set[int]:
    """Return the ids of the modules that stay fp32.

    These are poolings with their layers, the layers in `last`, and the layers that a module names
    in `fp32_layers`.
    """
    wide_modules: list[nn.Module] = []
    for module in backbone.modules():
        if isinstance(module, Pooling):
            wide_modules += module.modules()
        for name in getattr(module, "fp32_layers", ()):
            wide_modules.append(module.get_submodule(name))
    for name in last:
        wide_modules.append(backbone.get_submodule(name))
    return {id(module) for module in wide_modules}


def find_last(backbone: nn.Module) -> list[str]:
    """Return the names of the layers after pooling: they return one value per channel."""
    calls = _calls(backbone, LINEAR)
    names: list[str] = []
    for call in reversed(calls):
        # The probe is one utterance, so a layer before pooling returns many values per channel.
        num_channels = call.y.shape[1]
        if call.y.numel() != num_channels:
            break
        names.append(call.name)
    return names


class _Call(NamedTuple):
    """Call of a layer: y = module(x), and the versions of both when it returned."""

    name: str
    module: Any
    x: Tensor
    x_version: int
    y: Tensor
    y_version: int


@torch.no_grad()
def _calls(
    backbone: nn.Module,
    kinds: tuple[type[nn.Module], ...],
) -> list[_Call]:
    """Run a backbone once; return the calls of layers of these kinds in order."""
    calls: list[_Call] = []

    def record(
        name: str,
        module: nn.Module,
        inputs: tuple[Tensor, ...],
        y: Tensor,
    ) -> None:
        x = inputs[0]
        call = _Call(
            name=name,
            module=module,
            x=x,
            x_version=x._version,
            y=y,
            y_version=y._version,
        )
        calls.append(call)

    # Hooks see each call of a layer, in the order of the computation.
    hooks = []
    for name, module in backbone.named_modules():
        if isinstance(module, kinds):
            hook = module.register_forward_hook(partial(record, name))
            hooks.append(hook)

    # More frames than the minimum, so that layers before pooling return more than one frame.
    model: Any = backbone
    num_frames = model.min_frames + PROBE_FRAMES
    # On the device and in the type of the model.
    parameter = next(backbone.parameters())
    feats_BTF = parameter.new_zeros(1, num_frames, model.feat_dim)
    backbone(feats_BTF)
    # They would otherwise record all later calls too.
    for hook in hooks:
        hook.remove()
    return calls
