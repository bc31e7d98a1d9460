"""The order in memory of maps (B, C, F, T): contiguous, or channels last.

In: maps, in whichever order the layers before gave them. Out: maps whose gradients have the same.
A 2-D convolution gives channels last where its input or its weight has it. On a CPU, and in 16 bits
on a GPU, its kernels are then quicker; layers that meet both orders at once are several times
slower than with either. Letters: B batch, C channels, F mel bins, T frames.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from speakerlab.models.batchnorm import is_traced

_as_channels_last = partial(Tensor.contiguous, memory_format=torch.channels_last)


def hold_layout(x_BCFT: Tensor) -> Tensor:
    """x itself, whose gradient will be in channels last if x is.

    Called where a gradient comes back contiguous whatever x is: from a slice, or from pooling. One
    such map is enough: by sums with it all layers before would get theirs contiguous, too.
    """
    if x_BCFT.requires_grad and not x_BCFT.is_contiguous() and not is_traced():
        x_BCFT.register_hook(_as_channels_last)
    return x_BCFT


def skip_places(x_BCFT: Tensor, *, bins: int, frames: int) -> Tensor:
    """Every `bins`-th bin and `frames`-th frame from the first on; x itself where both are 1."""
    if bins == frames == 1:
        return x_BCFT
    if is_traced() or x_BCFT.is_contiguous():
        return x_BCFT[:, :, ::bins, ::frames]
    return _Skip.apply(x_BCFT, bins, frames)


class _Skip(torch.autograd.Function):
    """A slice in channels last whose gradient is, too."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x_BCFT, ctx.bins, ctx.frames = args
        ctx.shape = x_BCFT.shape
        return _as_channels_last(x_BCFT[:, :, :: ctx.bins, :: ctx.frames])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        batch, channels, bins, frames = ctx.shape
        grad_BCFT = grads[0].new_zeros(batch, bins, frames, channels).permute(0, 3, 1, 2)
        grad_BCFT[:, :, :: ctx.bins, :: ctx.frames] = grads[0]
        return grad_BCFT, None, None
