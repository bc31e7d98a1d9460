"""Inference without batch normalisation, where a convolution or linear layer can do it instead.

In: a backbone. Out: another, for inference only, with fewer modules and the same embeddings.
In eval mode BatchNorm is a scale and a shift of each channel. Where it follows a layer that is
linear, the layer's own weights and bias take them in: weight' = s weight, bias' = s (bias - mean) +
shift, with s = scale / sqrt(var + eps). A pass over the activations is saved each time.
"""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

LINEAR = (nn.Conv1d, nn.Conv2d, nn.Linear)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
PROBED_FRAMES = 20  # beyond the fewest that the backbone takes


def fold_batchnorm(backbone: nn.Module, *, in_place: bool = False) -> nn.Module:
    """A copy in eval mode whose BatchNorms are, where that is exact, part of the layer before.

    Which layer comes before is seen by running the copy once. That nothing else reads what that
    layer gives cannot be seen: the tests hold it of every registered model. in_place: the backbone
    itself, which saves the third of a second that a copy may take.
    """
    folded = (backbone if in_place else copy.deepcopy(backbone)).eval()
    for linear, norm in find_pairs(folded):
        _fold(folded.get_submodule(linear), folded.get_submodule(norm))
        parent, _, name = norm.rpartition(".")
        setattr(folded.get_submodule(parent), name, nn.Identity())
    return folded


def find_pairs(backbone: nn.Module) -> list[tuple[str, str]]:
    """Names of (layer, BatchNorm) of which the second's only input is the first's output."""
    # The tensors are kept, so that no id comes twice; the version tells of work in place between.
    made: dict[int, tuple[str, Tensor, int]] = {}
    calls: dict[str, int] = {}
    pairs: list[tuple[str, str]] = []

    def note_output(name: str, _layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        calls[name] = calls.get(name, 0) + 1
        made[id(output)] = name, output, output._version

    def note_input(name: str, norm: nn.Module, inputs: Any) -> None:
        calls[name] = calls.get(name, 0) + 1
        x: Tensor = inputs[0]
        linear, _, version = made.get(id(x), ("", x, -1))
        if x._version == version and norm.running_mean is not None:
            pairs.append((linear, name))

    hooks = [
        module.register_forward_hook(partial(note_output, name))
        for name, module in backbone.named_modules()
        if isinstance(module, LINEAR)
    ]
    hooks += [
        module.register_forward_pre_hook(partial(note_input, name))
        for name, module in backbone.named_modules()
        if isinstance(module, NORMS)
    ]
    probe(backbone, more_frames=PROBED_FRAMES, hooks=hooks)
    return [(linear, norm) for linear, norm in pairs if calls[linear] == calls[norm] == 1]


@torch.no_grad()
def probe(backbone: nn.Module, *, more_frames: int, hooks: Iterable[RemovableHandle]) -> None:
    """Run a backbone once, `more_frames` beyond the fewest that it takes, and take `hooks` off."""
    frames: int = backbone.min_frames + more_frames  # pyright: ignore
    like = next(backbone.parameters())
    backbone(like.new_zeros(1, frames, backbone.feat_dim))  # pyright: ignore
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def _fold(linear: nn.Module, norm: nn.Module) -> None:
    """The sums are in float64; what is kept has the layer's dtype."""
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
