"""The convolution over time of CAM++'s dense layers, and the context beside it, by matrix products.

In: rows x_KBT, one for each channel. Out: what `ContextMask` in campplus.py takes from them, to
rounding. For a CPU that trains in 16 bits: there a convolution takes twice as long as its products,
most of it in the backward pass. A gradient is moved in time once, for both products that need it,
and what comes back through the context is added inside of one of them.

Letters: B batch, T frames, N = B x T, K channels of the bottleneck, G channels that a layer adds,
J taps of a kernel, S segments, Q = B x S.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from speakerlab.models.pooling import segment_context


def convolve_with_context(
    x_KBT: Tensor, weight_GKJ: Tensor, *, dilation: int, members_TS: Tensor
) -> tuple[Tensor, Tensor]:
    """The convolution, which keeps the length, (G, B, T), and the context, (K, B, S)."""
    return _Convolve.apply(x_KBT, weight_GKJ, dilation, members_TS)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        x_KBT, weight_GKJ, ctx.dilation, members_TS = args
        ctx.save_for_backward(x_KBT, weight_GKJ, members_TS)
        growth, rows, num_taps = weight_GKJ.shape
        taps_JKBT = x_KBT.new_empty(num_taps, *x_KBT.shape)
        _delay(x_KBT, ctx.dilation, taps_JKBT)
        y_GN = weight_GKJ.transpose(1, 2).flatten(1) @ taps_JKBT.view(num_taps * rows, -1)
        return y_GN.view(growth, *x_KBT.shape[1:]), segment_context(x_KBT, members_TS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_KBT, weight_GKJ, members_TS = ctx.saved_tensors
        (rows, batch, frames), (growth, _, num_taps) = x_KBT.shape, weight_GKJ.shape
        grad_GBT, grad_KBS = grads
        count_S = members_TS.sum(0).clamp_min(1)
        sums_KBS = grad_KBS / count_S + grad_KBS.sum(-1, keepdim=True) / frames
        into_KO = weight_GKJ.permute(1, 2, 0).flatten(1)
        into_KO = torch.cat([into_KO, sums_KBS.flatten(1).to(x_KBT.dtype)], dim=1)
        num_moved, num_segments = num_taps * growth, members_TS.shape[1]
        behind_OBT = x_KBT.new_zeros(into_KO.shape[1], batch, frames)
        _delay(grad_GBT, -ctx.dilation, behind_OBT[:num_moved].unflatten(0, (num_taps, growth)))
        # Of utterance b, the places of its own segments alone: ones where a frame is in one.
        places_BSBT = behind_OBT[num_moved:].unflatten(0, (batch, num_segments))
        places_BSBT.diagonal(dim1=0, dim2=2).copy_(members_TS.T.unsqueeze(-1))
        behind_ON = behind_OBT.flatten(1)
        grad_OK = behind_ON[:num_moved] @ x_KBT.view(rows, -1).T
        grad_GKJ = grad_OK.view(num_taps, growth, rows).permute(1, 2, 0)
        return (into_KO @ behind_ON).view_as(x_KBT), grad_GKJ, None, None


def _delay(x_CBT: Tensor, dilation: int, moved_JCBT: Tensor) -> None:
    """Write x as each tap sees it; a negative dilation is the way back."""
    num_taps = len(moved_JCBT)
    for tap, moved_CBT in enumerate(moved_JCBT):
        delay = (num_taps // 2 - tap) * dilation
        if delay > 0:
            moved_CBT[..., :delay] = 0
            moved_CBT[..., delay:] = x_CBT[..., :-delay]
        elif delay < 0:
            moved_CBT[..., delay:] = 0
            moved_CBT[..., :delay] = x_CBT[..., -delay:]
        else:
            moved_CBT.copy_(x_CBT)
