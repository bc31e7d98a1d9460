"""Faster inference: BatchNorm folded into the layer before it, and weights kept in 16 bits.

In: a backbone. Out: another, for inference only, with the same embeddings. In eval mode BatchNorm
is a scale and a shift of each channel. After a linear layer, the layer's own weights and bias can
absorb them: weight' = s weight, bias' = s (bias - mean) + shift, with s = scale / sqrt(var + eps).

Letters: C channels.
"""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from speakerlab.models.pooling import Pooling, fp32_island, widened

LINEAR = (nn.Conv1d, nn.Conv2d, nn.Linear)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
PROBE_FRAMES = 20  # beyond the backbone's min_frames


def fold_batchnorm(backbone: nn.Module, *, in_place: bool = False) -> nn.Module:
    """Return a copy in eval mode whose BatchNorms are, where that is exact, part of other layers.

    Which layer comes before a BatchNorm is found by running the copy once. That nothing else reads
    the layer's output cannot be found; the tests check it for every registered model. in_place:
    change the backbone itself, which saves a copy that may take a third of a second.
    """
    folded = (backbone if in_place else copy.deepcopy(backbone)).eval()
    for linear, norm in find_pairs(folded):
        _fold(folded.get_submodule(linear), folded.get_submodule(norm))
        _replace(folded, norm, nn.Identity())
    return folded


def find_pairs(backbone: nn.Module) -> list[tuple[str, str]]:
    """Return names (layer, BatchNorm) where the first's output is the second's only input."""
    # The tensors are kept so that no id is used twice; the version shows changes in place.
    outputs: dict[int, tuple[str, Tensor, int]] = {}
    calls: dict[str, int] = {}
    pairs: list[tuple[str, str]] = []

    def note_output(name: str, _layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        calls[name] = calls.get(name, 0) + 1
        outputs[id(output)] = name, output, output._version

    def note_input(name: str, norm: nn.Module, inputs: Any) -> None:
        calls[name] = calls.get(name, 0) + 1
        x: Tensor = inputs[0]
        linear, _, version = outputs.get(id(x), ("", x, -1))
        if x._version == version and norm.running_mean is not None:
            pairs.append((linear, name))

    linears, norms = _all(backbone, LINEAR), _all(backbone, NORMS)
    hooks = [layer.register_forward_hook(partial(note_output, name)) for name, layer in linears]
    hooks += [norm.register_forward_pre_hook(partial(note_input, name)) for name, norm in norms]
    _probe(backbone, more_frames=PROBE_FRAMES, hooks=hooks)
    return [(linear, norm) for linear, norm in pairs if calls[linear] == calls[norm] == 1]


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
    for _, layer in _all(backbone, LINEAR):
        if id(layer) not in wide:
            layer.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    for name in last:
        _replace(backbone, name, InFp32(backbone.get_submodule(name)))
    return backbone


def find_wide(backbone: nn.Module, last: Iterable[str]) -> set[int]:
    """Return the ids of modules that stay fp32: poolings with their parts, and the `last` layers.

    So do those that a module names in `fp32_layers`.
    """
    poolings = [module for module in backbone.modules() if isinstance(module, Pooling)]
    wide = {id(part) for module in poolings for part in module.modules()}
    for module in backbone.modules():
        wide |= {id(getattr(module, name)) for name in getattr(module, "fp32_layers", ())}
    return wide | {id(backbone.get_submodule(name)) for name in last}


def find_last(backbone: nn.Module) -> list[str]:
    """Return the names of the layers after pooling: their output does not grow with the input."""
    short, long = (_shapes(backbone, frames) for frames in (PROBE_FRAMES, 3 * PROBE_FRAMES))
    last: list[str] = []
    for (name, shape), (again, other) in zip(reversed(short), reversed(long)):
        if name != again or shape != other:
            break
        last.append(name)
    return last


def _shapes(backbone: nn.Module, frames: int) -> list[tuple[str, torch.Size]]:
    """Return (name, shape of the output) of each call of a layer, in order."""
    found: list[tuple[str, torch.Size]] = []

    def note(name: str, _layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        found.append((name, output.shape))

    hooks = [m.register_forward_hook(partial(note, name)) for name, m in _all(backbone, LINEAR)]
    _probe(backbone, more_frames=frames, hooks=hooks)
    return found


def _all(backbone: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[tuple[str, Any]]:
    return [(name, m) for name, m in backbone.named_modules() if isinstance(m, kinds)]


def _replace(backbone: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(backbone.get_submodule(parent), child, module)


@torch.no_grad()
def _probe(backbone: nn.Module, *, more_frames: int, hooks: Iterable[RemovableHandle]) -> None:
    """Run a backbone once, with `more_frames` beyond its fewest, and remove `hooks`."""
    frames: int = backbone.min_frames + more_frames  # pyright: ignore
    like = next(backbone.parameters())
    backbone(like.new_zeros(1, frames, backbone.feat_dim))  # pyright: ignore
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def _fold(linear: nn.Module, norm: nn.Module) -> None:
    """Compute the new weights in float64; they keep the layer's dtype."""
    assert isinstance(linear, LINEAR) and isinstance(norm, NORMS)
    assert norm.running_mean is not None and norm.running_var is not None
    weight, mean_C = linear.weight.double(), norm.running_mean.double()
    scale_C = (norm.running_var.double() + norm.eps).rsqrt()
    shift_C = torch.zeros_like(mean_C)
    if norm.affine:
        scale_C, shift_C = scale_C * norm.weight.double(), norm.bias.double()
    bias_C = torch.zeros_like(mean_C) if linear.bias is None else linear.bias.double()
    dtype = linear.weight.dtype
    linear.weight = nn.Parameter((weight * scale_C.view(-1, *[1] * (weight.dim() - 1))).to(dtype))
    linear.bias = nn.Parameter((scale_C * (bias_C - mean_C) + shift_C).to(dtype))
