"""A dense block of CAM++ in inference on a CPU: as few operations as it takes.

In: the layers of a block and x_BCT, in eval mode and without gradient. Out: x_BCT with the channels
of every layer after it, as the plain formulation in campplus.py gives it to rounding.

One recording at a time, a layer's work is so little that what an operation costs besides is most of
its time, and with several threads they wait for each other there.

Letters: B batch, T frames, N = B x T, C channels seen so far, K channels of the bottleneck,
G channels that a layer adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speakerlab.models import taps
from speakerlab.models.dense_training import Segments, compute_mask, norms_of, weights_of
from speakerlab.models.pooling import fp32_island

if TYPE_CHECKING:
    from speakerlab.models.campplus import DenseLayer

COLUMNS = 64  # of products in 16 bits


def columns_for(num_columns: int, x: Tensor) -> int:
    """Up to a multiple of `COLUMNS`, where that saves time.

    In 16 bits the CPU's library makes a kernel for each shape, which takes as long as using it.
    Recordings, whose lengths differ, share those of the multiples.
    """
    return num_columns + (-num_columns % COLUMNS if x.dtype.itemsize < 4 else 0)


def infer_block(layers: Sequence[DenseLayer], x_BCT: Tensor, *, segment_frames: int) -> Tensor:
    """Run layers whose BatchNorms are torch's own, with running statistics."""
    batch, channels, frames = x_BCT.shape
    used = batch * frames
    growth = sum(layer.cam_layer.linear_local.out_channels for layer in layers)
    store_CN = x_BCT.new_empty(channels + growth, columns_for(used, x_BCT))
    store_CN[:, used:] = 0  # read, and never seen in what comes out
    store_CBT = store_CN[:, :used].unflatten(1, (batch, frames))
    store_CBT[:channels] = x_BCT.transpose(0, 1)
    segments = Segments(frames, segment_frames, like=weights_of(layers[0]).scale_C)
    with fp32_island(x_BCT):
        for layer in layers:
            own, (norm1, norm2) = weights_of(layer), norms_of(layer)
            read_CN = _rectified(norm1, store_CN[:channels])
            mixed_KN = own.mix_KC1.squeeze(2).to(x_BCT.dtype) @ read_CN
            hidden_KN = _rectified(norm2, mixed_KN)
            hidden_KBT = hidden_KN[:, :used].unflatten(1, (batch, frames))
            local_GBT = taps.convolve(
                *(hidden_KBT, own.look_GKJ.to(x_BCT.dtype)),
                dilation=layer.cam_layer.linear_local.dilation[0],
                num_columns=hidden_KN.shape[1],
            )
            mask_GQ = compute_mask(own, segments.context(hidden_KBT))[1]
            mask_GBT = segments.spread(mask_GQ.to(x_BCT.dtype))
            end = channels + len(local_GBT)
            torch.mul(local_GBT, mask_GBT, out=store_CBT[channels:end])
            channels = end
    return store_CBT.transpose(0, 1)


def _rectified(norm: Any, x_CN: Tensor) -> Tensor:
    """Normalised by the running statistics."""
    y_1CN, _, _ = torch.native_batch_norm(
        *(x_CN.unsqueeze(0), norm.weight, norm.bias, norm.running_mean, norm.running_var),
        *(False, 0.0, norm.eps),
    )
    return y_1CN.squeeze(0).relu_()
