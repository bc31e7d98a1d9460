"""A dense block of CAM++ in training on a CPU, its backward pass written out.

In: the layers of a block and x_BCT. Out: x_BCT with the channels of every layer after it, as the
plain formulation in campplus.py gives it to rounding, with its gradients and running statistics.

What autograd cannot know of these layers, and what is used here:
- All that read a channel normalise it by the same moments. The gradient of BatchNorm is that of a
  factor, less a constant and less a multiple of the channel: these two are summed as numbers, and
  taken off once, when every layer has added its own where it lies (`_Shared`).
- A mask is a few numbers for each utterance: computed in at least fp32, and spread by copies.
- Of rectified values in 16 bits, the bits tell which are positive.

Letters: B batch, T frames, N = B x T, C channels seen so far, K channels of the bottleneck,
G channels that a layer adds, H hidden units of a mask, J taps of a kernel, S segments, Q = B x S.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from speakerlab.models import taps
from speakerlab.models.batchnorm import Moments, group_norm, moments, norm_gradients, track
from speakerlab.models.pooling import fp32_island, widened

if TYPE_CHECKING:
    from speakerlab.models.campplus import DenseLayer


def train_block(layers: Iterable[DenseLayer], x_BCT: Tensor, *, segment_frames: int) -> Tensor:
    """Run layers whose BatchNorms all are usual (batchnorm.py), and train."""
    layers = list(layers)
    weights = [weight for layer in layers for weight in weights_of(layer)]
    return _Block.apply(x_BCT, layers, segment_frames, *weights)


class Weights(NamedTuple):
    """Of a layer, as it holds them."""

    scale_C: Tensor
    shift_C: Tensor
    mix_KC1: Tensor
    scale_K: Tensor
    shift_K: Tensor
    look_GKJ: Tensor
    squeeze_HK1: Tensor
    squeeze_H: Tensor
    excite_GH1: Tensor
    excite_G: Tensor


class _Kept(NamedTuple):
    """What a layer computed, for the backward pass."""

    read_CN: Tensor  # normalised and rectified; empty where it is to be computed again
    mixed_KN: Tensor
    hidden_KBT: Tensor  # normalised and rectified
    mean_K: Tensor
    inv_std_K: Tensor
    local_GBT: Tensor
    context_KQ: Tensor
    squeezed_HQ: Tensor
    mask_GQ: Tensor

    def moments(self, eps: float) -> Moments:
        """Of `mixed`."""
        return Moments(self.mean_K, self.inv_std_K.pow(-2) - eps)


def weights_of(layer: DenseLayer) -> Weights:
    """As the layer holds them now."""
    (norm1, norm2), cam = norms_of(layer), layer.cam_layer
    found: list[Any] = [norm1.weight, norm1.bias, layer.linear1.weight, norm2.weight, norm2.bias]
    found += [cam.linear_local.weight, cam.linear1.weight, cam.linear1.bias]
    return Weights(*found, cam.linear2.weight, cam.linear2.bias)  # pyright: ignore[reportCallIssue]


def norms_of(layer: DenseLayer) -> tuple[Any, Any]:
    """The BatchNorms of what a layer reads, and of its bottleneck."""
    return layer.nonlinear1[0], layer.nonlinear2[0]


class _Block(torch.autograd.Function):
    """All layers at once."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x_BCT, ctx.layers, segment_frames, *weights = args
        batch, channels, frames = x_BCT.shape
        growth = sum(layer.cam_layer.linear_local.out_channels for layer in ctx.layers)
        store_CBT = x_BCT.new_empty(channels + growth, batch, frames)
        store_CBT[:channels] = x_BCT.transpose(0, 1)
        found = moments(store_CBT[:channels].unsqueeze(0))
        ctx.segments = Segments(frames, segment_frames, like=found.mean_C)
        used: list[Any] = []
        kept: list[Tensor] = []
        with fp32_island(x_BCT):
            for layer, own in zip(ctx.layers, _grouped(weights, Weights)):
                norm1, norm2 = norms_of(layer)
                of_layer = _forward(layer, own, store_CBT[:channels], found, ctx.segments)
                used += [(norm1, found), (norm2, of_layer.moments(norm2.eps))]
                new_GBT = store_CBT[channels : channels + len(of_layer.local_GBT)]
                mask_GBT = ctx.segments.spread(of_layer.mask_GQ.to(x_BCT.dtype))
                torch.mul(of_layer.local_GBT, mask_GBT, out=new_GBT)
                channels += len(new_GBT)
                found = Moments(*map(torch.cat, zip(found, moments(new_GBT.unsqueeze(0)))))
                if layer.memory_efficient:
                    of_layer = of_layer._replace(read_CN=x_BCT.new_empty(0))
                kept += of_layer
        track(used, batch * frames)
        ctx.save_for_backward(store_CBT, *found, *weights, *kept)
        return store_CBT.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        store_CBT, mean_C, var_C, *rest = ctx.saved_tensors
        num_weights = len(ctx.layers) * len(Weights._fields)
        weights, kept = rest[:num_weights], rest[num_weights:]
        steps = zip(ctx.layers, _grouped(weights, Weights), _grouped(kept, _Kept))
        shared = _Shared(grads[0].transpose(0, 1), store_CBT, Moments(mean_C, var_C))
        channels = len(store_CBT)
        of_weights: list[Any] = []
        with fp32_island(store_CBT):
            for layer, own, of_layer in reversed(list(steps)):
                end, channels = channels, channels - len(of_layer.local_GBT)
                grad_GBT = shared.settle(channels, end)
                found = _backward(layer, own, of_layer, grad_GBT, shared, ctx.segments)
                of_weights[:0] = found
            grad_CBT = shared.settle(0, channels)
        return grad_CBT.transpose(0, 1), None, None, *of_weights


def _forward(
    layer: DenseLayer, own: Weights, seen_CBT: Tensor, found: Moments, segments: Segments
) -> _Kept:
    """What a layer computes of the channels seen, whose moments are `found`."""
    read_CN = _read(own, seen_CBT.flatten(1), found, norms_of(layer)[0].eps)
    mixed_KN = own.mix_KC1.squeeze(2).to(read_CN.dtype) @ read_CN
    hidden_1KN, mean_1K, inv_std_1K = group_norm(
        mixed_KN.unsqueeze(0), own.scale_K, own.shift_K, norms_of(layer)[1].eps
    )
    hidden_KBT = hidden_1KN.relu_().view(-1, *seen_CBT.shape[1:])
    look_GKJ, dilation = own.look_GKJ.to(read_CN.dtype), layer.cam_layer.linear_local.dilation[0]
    local_GBT = taps.convolve(hidden_KBT, look_GKJ, dilation=dilation)
    context_KQ = segments.context(hidden_KBT)
    return _Kept(
        *(read_CN, mixed_KN, hidden_KBT, mean_1K.squeeze(0), inv_std_1K.squeeze(0)),
        *(local_GBT, context_KQ, *compute_mask(own, context_KQ)),
    )


def compute_mask(own: Weights, context_KQ: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden units, rectified, (H, Q), and the mask, (G, Q)."""
    squeezed_HQ = torch.addmm(own.squeeze_H.unsqueeze(1), own.squeeze_HK1.squeeze(2), context_KQ)
    squeezed_HQ.relu_()
    excited_GQ = torch.addmm(own.excite_G.unsqueeze(1), own.excite_GH1.squeeze(2), squeezed_HQ)
    return squeezed_HQ, excited_GQ.sigmoid_()


def _backward(
    layer: DenseLayer,
    own: Weights,
    kept: _Kept,
    grad_GBT: Tensor,
    shared: _Shared,
    segments: Segments,
) -> Weights:
    """Gradients of the weights, given that of what the layer adds; to `shared` goes what it read.

    Names are of the values; `d_` before one is the gradient of it.
    """
    d_mask_GQ = segments.sums(grad_GBT * kept.local_GBT).flatten(1)
    d_excited_GQ = d_mask_GQ * kept.mask_GQ * (1 - kept.mask_GQ)
    d_squeezed_HQ = own.excite_GH1.squeeze(2).T @ d_excited_GQ
    d_squeezed_HQ = _where_positive(d_squeezed_HQ, kept.squeezed_HQ)
    d_context_KQ = own.squeeze_HK1.squeeze(2).T @ d_squeezed_HQ

    d_local_GBT = grad_GBT * segments.spread(kept.mask_GQ.to(grad_GBT.dtype))
    look_GKJ, dilation = own.look_GKJ.to(grad_GBT.dtype), layer.cam_layer.linear_local.dilation[0]
    d_hidden_KBT, d_look_GKJ = taps.gradients(
        d_local_GBT, kept.hidden_KBT, look_GKJ, dilation=dilation
    )
    d_hidden_KBT += segments.spread(segments.context_gradient(d_context_KQ).to(grad_GBT.dtype))
    d_hidden_KN = _where_positive(d_hidden_KBT, kept.hidden_KBT).flatten(1)
    d_mixed_1KN, d_scale_K, d_shift_K = norm_gradients(
        *(d_hidden_KN.unsqueeze(0), kept.mixed_KN.unsqueeze(0)),
        *(own.scale_K, kept.mean_K, kept.inv_std_K),
    )
    d_mixed_KN = d_mixed_1KN.squeeze(0)

    channels = own.mix_KC1.shape[1]
    read_CN = kept.read_CN
    if not len(read_CN):
        seen_CN, found = shared.seen(channels)
        read_CN = _read(own, seen_CN, found, norms_of(layer)[0].eps)
    d_mix_KC = d_mixed_KN @ read_CN.T
    mix_CK = d_mixed_KN.new_empty(channels, len(d_mixed_KN)).copy_(own.mix_KC1.squeeze(2).T)
    d_read_CN = _where_positive(mix_CK @ d_mixed_KN, read_CN)
    d_scale_C, d_shift_C = shared.add(d_read_CN, own.scale_C, norms_of(layer)[0].eps)
    wide = own.scale_C.dtype
    return Weights(
        *(d_scale_C, d_shift_C, d_mix_KC.to(wide).unsqueeze(2), d_scale_K, d_shift_K),
        d_look_GKJ.to(wide),
        (d_squeezed_HQ @ kept.context_KQ.T).unsqueeze(2),
        d_squeezed_HQ.sum(1),
        (d_excited_GQ @ kept.squeezed_HQ.T).unsqueeze(2),
        d_excited_GQ.sum(1),
    )


def _read(own: Weights, seen_CN: Tensor, found: Moments, eps: float) -> Tensor:
    """Normalised and rectified."""
    y_1CN, _, _ = torch.native_batch_norm(
        seen_CN.unsqueeze(0), own.scale_C, own.shift_C, *found, False, 0.0, eps
    )
    return y_1CN.squeeze(0).relu_()


def _where_positive(grad: Tensor, y: Tensor) -> Tensor:
    """The gradient where the rectified y is positive, else 0, in its place."""
    if y.dtype.itemsize == 2:
        grad.view(torch.int16).mul_(y.view(torch.int16).clamp(0, 1))
        return grad
    return torch.ops.aten.threshold_backward.grad_input(grad, y, 0, grad_input=grad)


class _Shared:
    """The gradient of the channels that layers share, to which they add from the last to the first.

    A layer that reads channel c as a * (x - mean) / std + ..., with a gradient g of that, adds
    a / std * (g - mean(g) - (x - mean) / std * mean(g * (x - mean) / std)). The first term is added
    at once; the others, a constant and a multiple of x - mean, are summed as two numbers a channel
    until the gradient of the channel is asked for.
    """

    def __init__(self, grad_CBT: Tensor, x_CBT: Tensor, found: Moments) -> None:
        self.x_CBT, self.found = x_CBT, found
        self.grad_CBT = torch.empty_like(x_CBT).copy_(grad_CBT)
        self.constant_C, self.slope_C = torch.zeros_like(found.mean_C).repeat(2, 1)

    def seen(self, channels: int) -> tuple[Tensor, Moments]:
        """The first channels, (C, N), and their moments."""
        return self.x_CBT[:channels].flatten(1), Moments(*(stat[:channels] for stat in self.found))

    def add(self, grad_CN: Tensor, scale_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add what a layer gives for the first channels; gradients of its scale and shift."""
        seen_CN, (mean_C, var_C) = self.seen(len(grad_CN))
        inv_std_C = (var_C + eps).rsqrt()
        _, d_scale_C, d_shift_C = norm_gradients(
            *(grad_CN.unsqueeze(0), seen_CN.unsqueeze(0), scale_C, mean_C, inv_std_C),
            wanted=(False, True, True),
        )
        factor_C = scale_C * inv_std_C
        total_CN, factor_C1 = self.grad_CBT.flatten(1), factor_C.to(grad_CN.dtype).unsqueeze(1)
        total_CN[: len(grad_CN)].addcmul_(grad_CN, factor_C1)
        share_C = factor_C / grad_CN.shape[1]
        self.constant_C[: len(grad_CN)].addcmul_(share_C, d_shift_C)
        self.slope_C[: len(grad_CN)].addcmul_(share_C * inv_std_C, d_scale_C)
        return d_scale_C, d_shift_C

    def settle(self, start: int, end: int) -> Tensor:
        """The whole gradient of channels to which no layer adds any more, (C, B, T)."""
        mean_C, slope_C, constant_C = (
            stat_C[start:end] for stat_C in (self.found.mean_C, self.slope_C, self.constant_C)
        )
        x_1CBT, ones_C = self.x_CBT[start:end].unsqueeze(0), torch.ones_like(mean_C)
        due_1CBT, _, _ = torch.native_batch_norm(  # slope * (x - mean) + constant
            x_1CBT, slope_C, constant_C, mean_C, ones_C, False, 0.0, 0.0
        )
        return self.grad_CBT[start:end] - due_1CBT.squeeze(0)


class Segments:
    """Stretches of frames of one context; the last may be shorter."""

    def __init__(self, frames: int, segment_frames: int, *, like: Tensor) -> None:
        starts = range(0, frames, segment_frames)
        self.frames = frames
        self.lengths = [min(segment_frames, frames - start) for start in starts]
        self.length_S = like.new_tensor(self.lengths)

    def sums(self, x_CBT: Tensor) -> Tensor:
        """Of each segment, (C, B, S), told in at least fp32."""
        pieces = [piece_CBT.sum(-1) for piece_CBT in x_CBT.split(self.lengths, dim=-1)]
        return widened(torch.stack(pieces, dim=-1))

    def context(self, x_CBT: Tensor) -> Tensor:
        """Mean over all frames plus mean over each segment, (C, Q)."""
        sum_CBS = self.sums(x_CBT)
        return (
            (sum_CBS / self.length_S).add_(sum_CBS.sum(-1, keepdim=True) / self.frames).flatten(1)
        )

    def context_gradient(self, grad_CQ: Tensor) -> Tensor:
        """Of the frames of each segment, which have one in common, (C, Q)."""
        grad_CBS = grad_CQ.unflatten(1, (-1, len(self.lengths)))
        shared_CB1 = grad_CBS.sum(-1, keepdim=True) / self.frames
        return (grad_CBS / self.length_S).add_(shared_CB1).flatten(1)

    def spread(self, x_CQ: Tensor) -> Tensor:
        """Each value for the frames of its segment, (C, B, T)."""
        columns = x_CQ.unflatten(1, (-1, len(self.lengths))).split(1, dim=-1)
        pieces = [x_CB1.expand(-1, -1, n) for x_CB1, n in zip(columns, self.lengths)]
        return torch.cat(pieces, dim=-1)


def _grouped(flat: Sequence[Any], kind: Any) -> list[Any]:
    """Tuples of a kind, from their fields in a row."""
    width = len(kind._fields)
    return [kind(*flat[i : i + width]) for i in range(0, len(flat), width)]
