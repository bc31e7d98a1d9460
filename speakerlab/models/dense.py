"""A dense block of CAM++ computed by rows of channels, none of which is copied or measured twice.

In: the layers of a block and x_BCT. Out: x_BCT with the channels of every layer after it, as the
plain formulation in campplus.py gives it to rounding, with its gradients and running statistics.

What is saved, in time and in memory:
- The channels that the layers share are the rows of one store. A layer writes its own below those
  that are there, where concatenation would copy all of them for every layer.
- The mean and variance of a channel are the same for every BatchNorm that reads it. They are
  computed once, when the channel is made.
- Over rows, a 1x1 convolution is one matrix product.
- What follows a block stays in rows where that pays: its transit, and the last BatchNorm.
Training and inference on a CPU, most of what there is, have modules of their own, dense_training.py
and dense_inference.py; what is left to this one is a GPU, and BatchNorms that partly train.

Letters: B batch, T frames, N = B x T, C channels seen so far, K channels of the bottleneck,
G channels that a layer adds, J taps of a kernel, I in and O out channels, S segments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from speakerlab.models.batchnorm import (
    Moments,
    is_traced,
    is_usual,
    moments,
    normalise,
    rectify_rows,
    track,
)
from speakerlab.models.dense_inference import columns_for, infer_block
from speakerlab.models.dense_training import norms_of, train_block
from speakerlab.models.pooling import segment_context, segment_members, spread_segments

if TYPE_CHECKING:
    from speakerlab.models.campplus import ContextMask, DenseLayer


def can_append(layers: Iterable[DenseLayer], x_BCT: Tensor) -> bool:
    """Whether the layers are as this module takes them to be; else the plain formulation is due.

    It is where the graph is traced, as for ONNX, and where a BatchNorm is anything but torch's own
    with affine parameters, running statistics and one momentum (a SyncBatchNorm, for example).
    """
    norms = [norm for layer in layers for norm in norms_of(layer)]
    usual = all(_can_normalise(norm, x_BCT) for norm in norms)
    return usual and len({norm.momentum for norm in norms}) == 1


def _can_normalise(norm: Any, x_BCT: Tensor) -> bool:
    return type(norm) is nn.BatchNorm1d and is_usual(norm, x_BCT) and not is_traced()


def append_rows(layers: Iterable[DenseLayer], x_BCT: Tensor, *, segment_frames: int) -> Tensor:
    """Run the layers, each on the input and the outputs of all layers before it."""
    layers = list(layers)
    norms = [norm for layer in layers for norm in norms_of(layer)]
    trains = any(norm.training for norm in norms)
    if x_BCT.device.type == "cpu":
        if all(norm.training for norm in norms):
            return train_block(layers, x_BCT, segment_frames=segment_frames)
        if not trains and not torch.is_grad_enabled():
            return infer_block(layers, x_BCT, segment_frames=segment_frames)
    batch, channels, frames = x_BCT.shape
    members_TS = segment_members(frames, segment_frames, like=x_BCT)
    growth = sum(layer.cam_layer.linear_local.out_channels for layer in layers)
    store_CN = x_BCT.new_empty(channels + growth, batch * frames)
    new_CN = x_BCT.transpose(0, 1).reshape(channels, -1)
    seen_CN = _Append.apply(store_CN[:0], new_CN, store_CN)
    found = _measure(new_CN, trains)
    used: list[tuple[nn.BatchNorm1d, Moments]] = []
    for layer in layers:
        norm1, norm2 = norms_of(layer)
        hidden_KN = _bottleneck(layer, seen_CN, found)
        hidden_KN, hidden_found = rectify_rows(norm2, hidden_KN)
        used += [(norm1, found), (norm2, hidden_found)]
        new_GN = _masked(layer.cam_layer, hidden_KN.unflatten(1, (batch, frames)), members_TS)
        found = Moments(*map(torch.cat, zip(found, _measure(new_GN, trains))))
        seen_CN = _Append.apply(seen_CN, new_GN, store_CN)
    track(used, batch * frames)
    return seen_CN.unflatten(1, (batch, frames)).transpose(0, 1)


def is_rows(norm: Any, x_BCT: Tensor) -> bool:
    """Whether x lies as a dense block leaves it, the BatchNorm after it is usual, and it pays.

    In fp32 what BatchNorm gains is lost again by the products.
    """
    rows = x_BCT.dtype.itemsize < 4 and x_BCT.transpose(0, 1).is_contiguous()
    return rows and _can_normalise(norm, x_BCT)


def norm_relu(norm: nn.BatchNorm1d, x_BCT: Tensor) -> Tensor:
    """Normalise and rectify rows, which stay rows."""
    x_CN = x_BCT.transpose(0, 1).flatten(1)
    y_CN, found = rectify_rows(norm, x_CN)
    track([(norm, found)], x_CN.shape[1])
    return y_CN.unflatten(1, (len(x_BCT), -1)).transpose(0, 1)


def mix_rows(linear: nn.Conv1d, x_BIT: Tensor) -> Tensor:
    """A 1x1 convolution of rows, to rows, (B, O, T)."""
    y_ON = _mix(linear.weight.squeeze(2), linear.bias, x_BIT.transpose(0, 1).flatten(1))
    return y_ON.unflatten(1, (len(x_BIT), -1)).transpose(0, 1)


def _bottleneck(layer: DenseLayer, seen_CN: Tensor, found: Moments) -> Tensor:
    """Normalise, rectify and mix all channels seen; repeated in the backward pass if so asked."""

    def run(seen_CN: Tensor) -> Tensor:
        y_1CN = F.relu(normalise(norms_of(layer)[0], seen_CN.unsqueeze(0), found), inplace=True)
        return _mix(layer.linear1.weight.squeeze(2), None, y_1CN.squeeze(0))

    if not (layer.memory_efficient and layer.training):
        return run(seen_CN)
    hidden_KN: Any = checkpoint(run, seen_CN, use_reentrant=False)
    return hidden_KN


def _masked(cam: ContextMask, x_KBT: Tensor, members_TS: Tensor) -> Tensor:
    """The convolution over time, scaled by the mask of its context, (G, N)."""
    local_GBT = cam.linear_local(x_KBT.transpose(0, 1)).transpose(0, 1)
    context_KBS = segment_context(x_KBT, members_TS)
    hidden_KN = _mix(cam.linear1.weight.squeeze(2), cam.linear1.bias, context_KBS.flatten(1))
    mask_GN = _mix(cam.linear2.weight.squeeze(2), cam.linear2.bias, F.relu(hidden_KN)).sigmoid()
    mask_GBT = spread_segments(mask_GN.unflatten(1, context_KBS.shape[1:]), members_TS)
    return (local_GBT * mask_GBT).flatten(1)


def _mix(weight_OI: Tensor, bias_O: Tensor | None, x_IN: Tensor) -> Tensor:
    """A 1x1 convolution of rows, (O, N).

    A matrix product on a CPU, where it is a fifth faster; elsewhere the convolution, which alone
    may use TF32.
    """
    if x_IN.device.type != "cpu":
        return F.conv1d(x_IN.unsqueeze(0), weight_OI.unsqueeze(2), bias_O).squeeze(0)
    padding = 0 if torch.is_grad_enabled() else columns_for(x_IN.shape[1], x_IN) - x_IN.shape[1]
    padded_IN = F.pad(x_IN, (0, padding)) if padding else x_IN
    y_ON = (weight_OI @ padded_IN)[:, : x_IN.shape[1]]
    return y_ON if bias_O is None else y_ON + bias_O.unsqueeze(1)


def _measure(x_CN: Tensor, used: bool) -> Moments:
    """The moments of rows, or none where no BatchNorm trains."""
    return moments(x_CN.unsqueeze(0)) if used else Moments(*x_CN.new_empty(2, 0))


class _Append(torch.autograd.Function):
    """`torch.cat([seen, new])` that leaves `seen`, the first rows of `store`, where it is.

    Autograd is not told of the write (`.data`): it is to rows that nothing has read or saved yet.
    """

    @staticmethod
    def forward(ctx: Any, seen_CN: Tensor, new_GN: Tensor, store_CN: Tensor) -> Tensor:
        ctx.num_seen, total = len(seen_CN), len(seen_CN) + len(new_GN)
        store_CN.data[ctx.num_seen : total] = new_GN
        return store_CN.data[:total]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][: ctx.num_seen], grads[0][ctx.num_seen :], None
