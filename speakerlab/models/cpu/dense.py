"""A dense block of CAM++ on a CPU, in training (the backward pass written by hand) and inference.

In: the layers of a block and x_BCT. Out: x_BCT followed by the channels of every layer, with the
same gradients and running statistics as the plain code in campplus.py, up to rounding.

Why it is faster:
- The channels are rows of one array, to which a layer appends its own; torch.cat copies them all.
- The mean and variance of a channel are the same for every BatchNorm that reads it, and computed
  once. The gradient through a BatchNorm is that of a factor, minus a constant, minus a multiple of
  the channel; the last two are added up as numbers and subtracted once (`_Channels`).
- Over rows a 1x1 convolution is one matrix product; rows.py has the convolution over time.
- In 16 bits the mask, which is a few numbers per utterance, is computed in fp32.

Letters: B batch, T frames, N = B x T, C channels seen so far, K channels of the bottleneck,
G channels that a layer adds, H hidden units of a mask, J taps of a kernel, S segments, Q = B x S.
A gradient has the name of its value after `d_`.
"""

from collections import namedtuple
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speakerlab.core.full_precision import fp32_island
from speakerlab.models import cpu
from speakerlab.models.cpu import rows
from speakerlab.models.cpu.rows import Segments

COLUMN_MULTIPLE = 64  # of matrix products in 16 bits, in inference

lerp_all = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
add_all = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
is_tracing = torch.jit.is_tracing  # pyright: ignore[reportPrivateImportUsage]


def run_block(layers: Sequence[Any], x_BCT: Tensor, *, segment_frames: int) -> Tensor | None:
    """Run a dense block, or return None where the plain code has to.

    That is on any other device, while a graph is traced or compiled, with BatchNorms that are not
    torch's own with affine parameters, running statistics, one momentum and one epsilon, where only
    some of them train, and for gradients in eval mode.
    """
    if not _is_used(x_BCT):
        return None
    wide, kinds = torch.promote_types(x_BCT.dtype, torch.float32), set[Any]()
    for layer in layers:
        for norm in (layer.nonlinear1.batchnorm, layer.nonlinear2.batchnorm):
            if type(norm) is not nn.BatchNorm1d or not norm.affine or norm.running_mean is None:
                return None
            kinds.add((norm.training, norm.momentum, norm.eps, norm.running_mean.dtype))
    training, momentum, _, dtype = next(iter(kinds))
    if len(kinds) > 1 or momentum is None or dtype != wide or x_BCT.numel() == x_BCT.shape[1]:
        return None
    if training:
        weights = [weight for layer in layers for weight in _weights_of(layer)]
        return _TrainedBlock.apply(x_BCT, layers, segment_frames, *weights)
    return None if torch.is_grad_enabled() else _infer(layers, x_BCT, segment_frames)


def is_in_rows(x_BCT: Tensor) -> bool:
    """Return whether the map has the layout of a block's output, the channels as rows."""
    return _is_used(x_BCT) and x_BCT.stride(0) < x_BCT.stride(1)


def whole_rows(x_CBT: Tensor) -> Tensor:
    """Return (C, N), or with the zero columns that `_infer` appends: only for eval mode."""
    channels, columns = x_CBT.shape[0], x_CBT.stride(0)
    if columns == x_CBT.shape[1:].numel():
        return x_CBT.flatten(1)
    return x_CBT.as_strided((channels, columns), (columns, 1))


def _is_used(x_BCT: Tensor) -> bool:
    is_traced = torch.compiler.is_compiling() or is_tracing()
    return cpu.is_enabled and x_BCT.device.type == "cpu" and not is_traced


_Weights = namedtuple(
    "_Weights",
    "scale_C shift_C mix_KC1 scale_K shift_K local_GKJ squeeze_HK1 squeeze_H excite_GH1 excite_G",
)
# What its backward pass needs: `read` and `hidden` are normalised and rectified, mean and inverse
# deviation are those of `mixed`.
_Kept = namedtuple(
    "_Kept",
    "read_CN mixed_KN hidden_KBT mean_K inv_std_K local_GBT context_KQ squeezed_HQ mask_GQ",
)
NUM_WEIGHTS, NUM_KEPT = len(_Weights._fields), len(_Kept._fields)


def _weights_of(layer: Any) -> _Weights:
    norm1, norm2, cam = layer.nonlinear1.batchnorm, layer.nonlinear2.batchnorm, layer.cam_layer
    found = (norm1.weight, norm1.bias, layer.linear1.weight, norm2.weight, norm2.bias)
    found += (cam.linear_local.weight, cam.linear1.weight, cam.linear1.bias)
    return _Weights(*found, cam.linear2.weight, cam.linear2.bias)


def _infer(layers: Sequence[Any], x_BCT: Tensor, segment_frames: int) -> Tensor:
    """Run layers in eval mode without gradients.

    In 16 bits the CPU's library compiles a kernel for each shape, which takes as long as using it;
    rounding up the columns lets recordings of different lengths share kernels.
    """
    batch, channels, frames = x_BCT.shape
    used = batch * frames
    columns = used + (-used % COLUMN_MULTIPLE if x_BCT.dtype.itemsize < 4 else 0)
    growth = len(layers) * layers[0].cam_layer.linear_local.out_channels
    store_CN = x_BCT.new_empty(channels + growth, columns)
    store_CN[:, used:] = 0  # read, but not part of the output
    store_CBT = store_CN[:, :used].unflatten(1, (batch, frames))
    store_CBT[:channels] = x_BCT.transpose(0, 1)
    segments = Segments(frames, segment_frames, like=layers[0].nonlinear1.batchnorm.weight)
    with fp32_island(x_BCT):
        for layer in layers:
            norm = layer.nonlinear1.batchnorm
            moments = norm.running_mean, norm.running_var
            own = _weights_of(layer)
            kept = _forward(layer, own, store_CN[:channels], moments, segments, batch)
            channels += len(_append(store_CBT, channels, kept, segments))
    return store_CBT.transpose(0, 1)


class _TrainedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x_BCT, ctx.layers, segment_frames, *weights = args
        batch, channels, frames = x_BCT.shape
        growth = len(ctx.layers) * ctx.layers[0].cam_layer.linear_local.out_channels
        store_CBT = x_BCT.new_empty(channels + growth, batch, frames)
        store_CBT[:channels] = x_BCT.transpose(0, 1)
        wide = torch.promote_types(x_BCT.dtype, torch.float32)
        moments_2C = x_BCT.new_ones(2, len(store_CBT), dtype=wide)
        ctx.segments = Segments(frames, segment_frames, like=moments_2C)
        start, seen, kept = 0, [], []
        with fp32_island(x_BCT):
            for i, layer in enumerate(ctx.layers):
                own = _Weights(*weights[i * NUM_WEIGHTS : (i + 1) * NUM_WEIGHTS])
                moments_2C[:, start:channels] = rows.moments(store_CBT[start:channels])
                seen_CN, mean_C, var_C = store_CBT[:channels].flatten(1), *moments_2C[:, :channels]
                kept.append(_forward(layer, own, seen_CN, (mean_C, var_C), ctx.segments, batch))
                seen.append(channels)
                start, channels = channels, channels + len(kept[-1].local_GBT)
                _append(store_CBT, start, kept[-1], ctx.segments)
        _update_statistics(ctx.layers, seen, moments_2C, kept, batch * frames)
        ctx.save_for_backward(store_CBT, moments_2C, *weights, *chain.from_iterable(kept))
        return store_CBT.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        store_CBT, (mean_C, var_C), *rest = ctx.saved_tensors
        weights, kept = rest[: len(ctx.layers) * NUM_WEIGHTS], rest[len(ctx.layers) * NUM_WEIGHTS :]
        d_store_CBT = torch.empty_like(store_CBT).copy_(grads[0].transpose(0, 1))
        inv_std_C = (var_C + ctx.layers[0].nonlinear1.batchnorm.eps).rsqrt()
        slope_C, constant_C = torch.zeros_like(mean_C).repeat(2, 1)
        shared = _Channels(store_CBT, d_store_CBT, mean_C, inv_std_C, slope_C, constant_C)
        channels = len(store_CBT)
        d_weights: list[Any] = []
        with fp32_island(store_CBT):
            for i, layer in reversed([*enumerate(ctx.layers)]):
                own = _Weights(*weights[i * NUM_WEIGHTS : (i + 1) * NUM_WEIGHTS])
                found = _Kept(*kept[i * NUM_KEPT : (i + 1) * NUM_KEPT])
                end, channels = channels, channels - len(found.local_GBT)
                d_new_GBT = shared.finish_gradient(channels, end)
                d_weights[:0] = _backward(layer, own, found, d_new_GBT, shared, ctx.segments)
            d_x_CBT = shared.finish_gradient(0, channels)
        return d_x_CBT.transpose(0, 1), None, None, *d_weights


def _update_statistics(
    layers: Sequence[Any], seen: Sequence[int], moments: Tensor, kept: Sequence[_Kept], count: int
) -> None:
    """Update all running statistics from `count` values; `seen`: channels that each layer reads."""
    first = [layer.nonlinear1.batchnorm for layer in layers]
    norms = first + [layer.nonlinear2.batchnorm for layer in layers]
    var_LK = rows.variance(torch.stack([found.inv_std_K for found in kept]), first[0].eps)
    mean_C, var_C = moments
    unbiased_C, unbiased_LK = (var * (count / (count - 1)) for var in (var_C, var_LK))
    targets = [mean_C[:channels] for channels in seen] + [found.mean_K for found in kept]
    targets += [unbiased_C[:channels] for channels in seen] + [*unbiased_LK]
    buffers = [norm.running_mean for norm in norms] + [norm.running_var for norm in norms]
    with torch.no_grad():
        lerp_all(buffers, targets, first[0].momentum)
        add_all([norm.num_batches_tracked for norm in norms], 1)


def _append(store_CBT: Tensor, channels: int, kept: _Kept, segments: Segments) -> Tensor:
    """Write a layer's masked output into the store after `channels`; return it, (G, B, T)."""
    new_GBT = store_CBT[channels : channels + len(kept.local_GBT)]
    mask_GBT = segments.spread(kept.mask_GQ.to(store_CBT.dtype))
    return torch.mul(kept.local_GBT, mask_GBT, out=new_GBT)


def _forward(
    layer: Any,
    own: _Weights,
    seen_CN: Tensor,
    moments: tuple[Tensor, Tensor],
    segments: Segments,
    batch: int,
) -> _Kept:
    """Compute a layer from the channels seen; `moments` are their means and variances."""
    norm1, norm2, conv = (
        layer.nonlinear1.batchnorm,
        layer.nonlinear2.batchnorm,
        layer.cam_layer.linear_local,
    )
    read_CN = rows.normalise_relu(seen_CN, own.scale_C, own.shift_C, *moments, norm1.eps)
    mixed_KN = own.mix_KC1.squeeze(2).to(read_CN.dtype) @ read_CN
    if norm2.training:
        hidden_KN, mean_K, inv_std_K = rows.normalise(mixed_KN, own.scale_K, own.shift_K, norm2.eps)
        hidden_KN.relu_()
    else:
        mean_K = inv_std_K = own.shift_K  # not needed without a backward pass
        moments = norm2.running_mean, norm2.running_var
        hidden_KN = rows.normalise_relu(mixed_KN, own.scale_K, own.shift_K, *moments, norm2.eps)
    used = batch * segments.frames
    hidden_KBT = hidden_KN[:, :used].unflatten(1, (batch, segments.frames))
    local_GKJ, columns = own.local_GKJ.to(read_CN.dtype), hidden_KN.shape[1]
    local_GBT = rows.convolve(hidden_KBT, local_GKJ, dilation=conv.dilation[0], num_columns=columns)
    context_KQ = segments.context(hidden_KBT)
    squeezed_HQ = torch.addmm(own.squeeze_H.unsqueeze(1), own.squeeze_HK1.squeeze(2), context_KQ)
    squeezed_HQ.relu_()
    mask_GQ = torch.addmm(own.excite_G.unsqueeze(1), own.excite_GH1.squeeze(2), squeezed_HQ)
    inner = read_CN, mixed_KN, hidden_KBT, mean_K, inv_std_K
    return _Kept(*inner, local_GBT, context_KQ, squeezed_HQ, mask_GQ.sigmoid_())


def _backward(
    layer: Any,
    own: _Weights,
    kept: _Kept,
    d_new_GBT: Tensor,
    shared: "_Channels",
    segments: Segments,
) -> _Weights:
    """Return the gradients of the weights; add that of the channels read to `shared`."""
    d_mask_GQ = segments.sums(d_new_GBT * kept.local_GBT)
    d_excited_GQ = torch.ops.aten.sigmoid_backward(d_mask_GQ, kept.mask_GQ)
    d_squeezed_HQ = own.excite_GH1.squeeze(2).T @ d_excited_GQ
    d_squeezed_HQ = rows.where_positive(d_squeezed_HQ, kept.squeezed_HQ)
    d_context_KQ = own.squeeze_HK1.squeeze(2).T @ d_squeezed_HQ

    d_local_GBT = d_new_GBT * segments.spread(kept.mask_GQ.to(d_new_GBT.dtype))
    local_GKJ = own.local_GKJ.to(d_new_GBT.dtype)
    dilation = layer.cam_layer.linear_local.dilation[0]
    d_hidden_KBT, d_local_GKJ = rows.convolve_backward(
        d_local_GBT, kept.hidden_KBT, local_GKJ, dilation=dilation
    )
    segments.add_context_backward(d_context_KQ, d_hidden_KBT)
    d_hidden_KN = rows.where_positive(d_hidden_KBT, kept.hidden_KBT).flatten(1)
    d_mixed_1KN, d_scale_K, d_shift_K = rows.normalise_backward(
        d_hidden_KN, kept.mixed_KN, own.scale_K, kept.mean_K, kept.inv_std_K
    )
    d_mixed_KN = d_mixed_1KN.squeeze(0)

    d_mix_KC = (kept.read_CN @ d_mixed_KN.T).T  # faster than d_mixed_KN @ read_CN.T
    mix_CK = own.mix_KC1.squeeze(2).to(d_mixed_KN.dtype).T
    d_read_CN = rows.where_positive(mix_CK @ d_mixed_KN, kept.read_CN)
    d_scale_C, d_shift_C = shared.add_gradient(d_read_CN, own.scale_C)
    wide = own.scale_C.dtype
    return _Weights(
        *(d_scale_C, d_shift_C, d_mix_KC.to(wide).unsqueeze(2), d_scale_K, d_shift_K),
        d_local_GKJ.to(wide),
        (d_squeezed_HQ @ kept.context_KQ.T).unsqueeze(2),
        d_squeezed_HQ.sum(1),
        (d_excited_GQ @ kept.squeezed_HQ.T).unsqueeze(2),
        d_excited_GQ.sum(1),
    )


class _Channels(NamedTuple):
    """The channels that layers share and their gradient, added up from the last layer to the first.

    A layer that reads channel x as a * (x - mean) / std + b, with a gradient g of that, adds
    a / std * (g - mean(g) - (x - mean) / std * mean(g * (x - mean) / std)). The first term is added
    at once. The others, a constant and a multiple of x - mean, are added up as two numbers per
    channel until the gradient of the channel is finished.
    """

    x_CBT: Tensor
    d_x_CBT: Tensor
    mean_C: Tensor
    inv_std_C: Tensor
    slope_C: Tensor
    constant_C: Tensor

    def add_gradient(self, d_CN: Tensor, scale_C: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's gradient of the first channels; return those of its scale and shift."""
        channels = len(d_CN)
        mean_C, inv_std_C = self.mean_C[:channels], self.inv_std_C[:channels]
        x_CN = self.x_CBT[:channels].flatten(1)
        _, d_scale_C, d_shift_C = rows.normalise_backward(
            d_CN, x_CN, scale_C, mean_C, inv_std_C, of_x=False
        )
        factor_C = scale_C * inv_std_C
        factor_C1 = factor_C.to(d_CN.dtype).unsqueeze(1)
        self.d_x_CBT.flatten(1)[:channels].addcmul_(d_CN, factor_C1)
        share_C = factor_C / d_CN.shape[1]
        self.constant_C[:channels].addcmul_(share_C, d_shift_C)
        self.slope_C[:channels].addcmul_(share_C * inv_std_C, d_scale_C)
        return d_scale_C, d_shift_C

    def finish_gradient(self, start: int, end: int) -> Tensor:
        """Return the whole gradient of channels to which no layer adds any more, (C, B, T)."""
        part = slice(start, end)
        due_1CBT, _, _ = torch.native_batch_norm(  # slope * (x - mean) + constant
            *(self.x_CBT[part].unsqueeze(0), self.slope_C[part], self.constant_C[part]),
            *(self.mean_C[part], torch.ones_like(self.mean_C[part]), False, 0.0, 0.0),
        )
        return self.d_x_CBT[part] - due_1CBT.squeeze(0)
