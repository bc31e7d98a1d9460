"""A dense block of CAM++ on a CPU, in training (the backward pass written by hand) and inference.

In: the layers of a block and x_BCT. Out: x_BCT followed by the channels of every layer, with the
same gradients and running statistics as the plain code in campplus.py, up to rounding.

Why it is faster:
- The channels are rows of one array, to which a layer appends its own; torch.cat copies them all.
- The mean and variance of a channel are the same for every BatchNorm that reads it, so they are
  computed once.
- Each BatchNorm adds three terms to the gradient of a channel. Two of them are a constant and a
  multiple of the channel: they are summed as numbers, and subtracted once (`_Channels`).
- With the channels as rows, a 1x1 convolution is one matrix product, and the convolution over time
  (`convolve`) consists of a few.
- In 16 bits the mask, which is a few numbers per utterance, is computed in fp32.

Letters: B batch, T frames, N = B x T, C channels seen so far, K channels of the bottleneck,
G channels that a layer adds, H hidden units of a mask, J taps of a kernel, O = J x G, I = J x K,
S segments, Q = B x S, R = C x B.
A gradient has the name of its value after `d_`.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speakerlab.core.full_precision import autocast_off, widened
from speakerlab.models import cpu

NO_EPS = 1e-12  # keeps the inverse deviation finite where only the moments are needed
# In 16-bit inference, the number of columns is rounded up to a multiple of this; see `_infer`.
COLUMN_MULTIPLE = 64

# Each works on a list of tensors in one call; torch has no public names for them.
lerp_all = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
add_all = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
is_tracing = torch.jit.is_tracing  # pyright: ignore[reportPrivateImportUsage]

# Operations on rows of channels, x_CBT, in any float type: the results of torch, up to rounding.
# Autograd records none of them; there are functions for their gradients.


def normalise(
    x_CBT: Tensor,
    scale_C: Tensor,
    shift_C: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return batch-normalised rows, their mean and 1 / sqrt(var + eps), at least fp32.

    torch's BatchNorm spends most of its time on the mean and the variance. A GroupNorm with one
    channel per group computes the same values in a vectorised kernel that cancels no digits.
    """
    # As one utterance of N frames, so that the moments are those of the whole batch.
    channels = len(x_CBT)
    y_1CBT, mean_1C, inv_std_1C = torch.native_group_norm(
        x_CBT.unsqueeze(0),
        scale_C,
        shift_C,
        N=1,
        C=channels,
        HxW=x_CBT[0].numel(),
        group=channels,
        eps=eps,
    )
    # The moments are in at least fp32, except where only shapes are computed.
    mean_C = widened(mean_1C.squeeze(0))
    inv_std_C = widened(inv_std_1C.squeeze(0))
    return y_1CBT.squeeze(0), mean_C, inv_std_C


def moments_of(x_CBT: Tensor) -> Tensor:
    """Return the means and variances, (2, C), at least fp32."""
    wide = torch.promote_types(x_CBT.dtype, torch.float32)
    scale_C = x_CBT.new_ones(len(x_CBT), dtype=wide)
    # Only the moments are needed, so the scale and the shift do not matter.
    _, mean_C, inv_std_C = normalise(
        x_CBT,
        scale_C,
        shift_C=None,
        eps=NO_EPS,
    )
    var_C = variance(inv_std_C, NO_EPS)
    return torch.stack([mean_C, var_C])


def variance(inv_std_C: Tensor, eps: float) -> Tensor:
    """Return the variance from 1 / sqrt(var + eps)."""
    # Rounding may leave a small negative number where the variance is 0.
    var_C = inv_std_C.pow(-2) - eps
    return var_C.clamp_min_(0)


def normalise_relu(
    x_CN: Tensor,
    scale_C: Tensor,
    shift_C: Tensor,
    *,
    mean_C: Tensor,
    var_C: Tensor,
    eps: float,
) -> Tensor:
    """Return rows that are normalised by the given moments and rectified."""
    y_1CN, _, _ = torch.native_batch_norm(
        x_CN.unsqueeze(0),
        scale_C,
        shift_C,
        running_mean=mean_C,
        running_var=var_C,
        training=False,  # use the given moments, do not compute new ones
        momentum=0.0,
        eps=eps,
    )
    return y_1CN.squeeze(0).relu_()


def normalise_backward(
    d_y_CN: Tensor,
    x_CN: Tensor,
    scale_C: Tensor,
    mean_C: Tensor,
    inv_std_C: Tensor,
    *,
    of_x: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (1, C, N), if `of_x`, of the scale and of the shift."""
    return torch.ops.aten.native_batch_norm_backward(
        grad_out=d_y_CN.unsqueeze(0),
        input=x_CN.unsqueeze(0),
        weight=scale_C,
        running_mean=None,
        running_var=None,
        save_mean=mean_C,
        save_invstd=inv_std_C,
        train=True,
        eps=0.0,  # already part of inv_std_C
        output_mask=(of_x, True, True),
    )


def where_positive(d_y: Tensor, y: Tensor) -> Tensor:
    """Put 0 into the gradient of a rectified y where y is 0."""
    # Written over the gradient of y, which is not needed any more.
    return torch.ops.aten.threshold_backward.grad_input(
        d_y,
        y,
        threshold=0,
        grad_input=d_y,
    )


def convolve(
    x_KBT: Tensor,
    weight_GKJ: Tensor,
    *,
    dilation: int,
    num_columns: int | None = None,
) -> Tensor:
    """Return `conv1d` of the rows with the length of x, (G, B, T), by matrix products.

    num_columns: of the product in 16 bits, at least N.
    """
    growth, channels, num_taps = weight_GKJ.shape
    batch_and_frames = x_KBT.shape[1:]
    middle_tap = num_taps // 2

    # In 16 bits one product sums over all taps, because each product rounds its result.
    if x_KBT.dtype.itemsize < 4:
        num_values = batch_and_frames.numel()
        if not num_columns:
            num_columns = num_values
        seen_JKN = x_KBT.new_empty(num_taps, channels, num_columns)
        # The columns beyond N are read, but they are not part of the result.
        seen_JKN[..., num_values:] = 0
        values_JKN = seen_JKN[..., :num_values]
        seen_JKBT = values_JKN.unflatten(2, batch_and_frames)
        _delay(x_KBT, dilation, seen_JKBT)

        weight_GI = weight_GKJ.transpose(1, 2).flatten(1)
        seen_IN = seen_JKN.flatten(0, 1)
        y_GN = weight_GI @ seen_IN
        y_GN = y_GN[:, :num_values]
        return y_GN.unflatten(1, batch_and_frames)

    # Otherwise compute the products of all taps, O rows, and add them with their delays: this needs
    # no copy of the input for each tap.
    weight_JGK = weight_GKJ.permute(2, 0, 1)
    weight_OK = weight_JGK.flatten(0, 1)
    taps_ON = weight_OK @ x_KBT.flatten(1)
    taps_JGBT = taps_ON.view(num_taps, growth, *batch_and_frames)
    frames = x_KBT.shape[-1]

    # The middle tap has no delay. A tap whose delay is longer than x adds nothing.
    y_GBT = taps_JGBT[middle_tap].clone()
    for tap, tap_GBT in enumerate(taps_JGBT):
        delay = (middle_tap - tap) * dilation
        if 0 < delay < frames:
            later_GBT = y_GBT[..., delay:]
            later_GBT += tap_GBT[..., :-delay]
        elif -frames < delay < 0:
            earlier_GBT = y_GBT[..., :delay]
            earlier_GBT += tap_GBT[..., -delay:]
    return y_GBT


def convolve_backward(
    d_y_GBT: Tensor,
    x_KBT: Tensor,
    weight_GKJ: Tensor,
    *,
    dilation: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, (K, B, T), and the weight, (G, K, J), from the gradient of y."""
    growth, channels, num_taps = weight_GKJ.shape

    # The gradient of the output for each tap, shifted the other way.
    d_y_JGBT = d_y_GBT.new_empty(num_taps, *d_y_GBT.shape)
    _delay(d_y_GBT, -dilation, d_y_JGBT)
    d_y_ON = d_y_JGBT.view(num_taps * growth, -1)

    weight_KJG = weight_GKJ.permute(1, 2, 0)
    weight_KO = weight_KJG.flatten(1)
    d_x_KN = weight_KO @ d_y_ON
    d_x_KBT = d_x_KN.view(x_KBT.shape)

    x_KN = x_KBT.reshape(channels, -1)
    d_weight_OK = d_y_ON @ x_KN.T
    d_weight_JGK = d_weight_OK.view(num_taps, growth, channels)
    return d_x_KBT, d_weight_JGK.permute(1, 2, 0)


def _delay(x_CBT: Tensor, dilation: int, moved_JCBT: Tensor) -> None:
    """Write x shifted for each tap; a negative dilation shifts the other way."""
    middle_tap = len(moved_JCBT) // 2
    for tap, moved_CBT in enumerate(moved_JCBT):
        delay = (middle_tap - tap) * dilation
        # Frames beyond the ends of x are 0, as the padding of a convolution is.
        if delay > 0:
            moved_CBT[..., :delay] = 0
            moved_CBT[..., delay:] = x_CBT[..., :-delay]
        elif delay < 0:
            moved_CBT[..., delay:] = 0
            moved_CBT[..., :delay] = x_CBT[..., -delay:]
        else:
            moved_CBT.copy_(x_CBT)


class Segments:
    """Stretches of `segment_frames` frames that share a context; the last may be shorter."""

    def __init__(self, frames: int, segment_frames: int, *, like: Tensor) -> None:
        """Prepare the segments of `frames` frames; matrices have the type of `like`."""
        self.frames = frames
        num_whole, last_frames = divmod(frames, segment_frames)
        self.lengths = [segment_frames] * num_whole
        if last_frames > 0:
            self.lengths.append(last_frames)

        # From the sums of segments: the mean of a segment plus the mean of the utterance.
        lengths_S = like.new_tensor(self.lengths)
        segment_mean_SS = lengths_S.reciprocal().diag()
        self.means_SS = segment_mean_SS + 1 / frames

        # 1 where a frame belongs to a segment, else 0.
        segment_T = torch.arange(frames) // segment_frames
        segment_S = torch.arange(len(lengths_S))
        is_member_ST = segment_S.unsqueeze(1) == segment_T
        self.members_ST = is_member_ST.to(like.dtype)

    def sums(self, x_CBT: Tensor) -> Tensor:
        """Return the sum over each segment, (C, Q), at least fp32."""
        # The last segment may be shorter, so the frames cannot be reshaped into segments.
        segments = x_CBT.split(self.lengths, dim=-1)
        sums = [segment.sum(-1) for segment in segments]
        sums_CBS = torch.stack(sums, dim=-1)
        return widened(sums_CBS).flatten(1)

    def context(self, x_CBT: Tensor) -> Tensor:
        """Return the mean over all frames plus the mean over each segment, (C, Q)."""
        sums_CQ = self.sums(x_CBT)
        return self._mix(sums_CQ, self.means_SS)

    def _mix(self, x_CQ: Tensor, weight_SS: Tensor) -> Tensor:
        """Multiply the segments of each utterance and channel by a matrix."""
        num_segments = len(self.lengths)
        x_RS = x_CQ.view(-1, num_segments)
        y_RS = x_RS @ weight_SS
        return y_RS.view(x_CQ.shape)

    def add_context_backward(self, d_context_CQ: Tensor, d_x_CBT: Tensor) -> None:
        """Add the gradient that comes through its context to the gradient of each frame."""
        num_segments = len(self.lengths)
        d_sums_CQ = self._mix(d_context_CQ, self.means_SS.T)
        d_sums_RS = d_sums_CQ.view(-1, num_segments)

        # Each frame is part of one sum, and gets its gradient.
        dtype = d_x_CBT.dtype
        d_x_RT = d_x_CBT.flatten(0, 1)
        members_ST = self.members_ST.to(dtype)
        d_x_RT.addmm_(d_sums_RS.to(dtype), members_ST)

    def spread(self, x_CQ: Tensor) -> Tensor:
        """Repeat each value for the frames of its segment, (C, B, T)."""
        num_segments = len(self.lengths)
        x_CBS = x_CQ.unflatten(1, (-1, num_segments))
        columns = x_CBS.split(1, dim=-1)
        # Expanding copies nothing: only the joined result is written.
        repeated: list[Tensor] = []
        for x_CB1, length in zip(columns, self.lengths):
            repeated.append(x_CB1.expand(-1, -1, length))
        return torch.cat(repeated, dim=-1)


# The dense block, made of these operations.


def run_block(
    layers: Sequence[Any], x_BCT: Tensor, *, segment_frames: int
) -> Tensor | None:
    """Run a dense block, or return None if the plain code must run it.

    The plain code runs on any other device, while a graph is traced or compiled, and for gradients
    in eval mode. It also runs unless all BatchNorms are torch's own, have affine parameters and
    running statistics, and share one momentum, one epsilon and one mode.
    """
    if not _is_used(x_BCT):
        return None

    settings = _common_settings(layers)
    if settings is None:
        return None
    wide = torch.promote_types(x_BCT.dtype, torch.float32)
    num_channels = x_BCT.shape[1]
    has_one_value = x_BCT.numel() == num_channels  # of each channel: no variance
    if settings.momentum is None or settings.dtype != wide or has_one_value:
        return None

    if settings.training:
        weights: list[Tensor] = []
        for layer in layers:
            weights += _weights_of(layer)
        return _TrainedBlock.apply(x_BCT, layers, segment_frames, *weights)
    # In eval mode there is no backward pass written by hand.
    if torch.is_grad_enabled():
        return None
    return _infer(layers, x_BCT, segment_frames)


class _Settings(NamedTuple):
    """Settings of a BatchNorm."""

    training: bool
    momentum: float | None
    eps: float
    dtype: torch.dtype  # of the running statistics


def _common_settings(layers: Sequence[Any]) -> _Settings | None:
    """Return the settings of all BatchNorms of a block; None if they differ, or are not torch's."""
    norms: list[Any] = []
    for layer in layers:
        norms.append(layer.nonlinear1.batchnorm)
        norms.append(layer.nonlinear2.batchnorm)
    distinct = set[_Settings]()
    for norm in norms:
        is_plain = type(norm) is nn.BatchNorm1d and norm.affine
        if not is_plain or norm.running_mean is None:
            return None
        settings = _Settings(
            training=norm.training,
            momentum=norm.momentum,
            eps=norm.eps,
            dtype=norm.running_mean.dtype,
        )
        distinct.add(settings)
    if len(distinct) > 1:
        return None
    return distinct.pop()


def is_in_rows(x_BCT: Tensor) -> bool:
    """Return whether the map has the layout of a block's output, the channels as rows."""
    return _is_used(x_BCT) and x_BCT.stride(0) < x_BCT.stride(1)


def whole_rows(x_CBT: Tensor) -> Tensor:
    """Return (C, N), or with the zero columns that `_infer` appends: only for eval mode."""
    channels = len(x_CBT)
    columns = x_CBT.stride(0)
    num_values = x_CBT.shape[1:].numel()
    if columns == num_values:
        return x_CBT.flatten(1)
    # The map is a view of a wider store; reach beyond it, to the ends of the store's rows.
    return x_CBT.as_strided(size=(channels, columns), stride=(columns, 1))


def _is_used(x_BCT: Tensor) -> bool:
    is_traced = torch.compiler.is_compiling() or is_tracing()
    on_cpu = x_BCT.device.type == "cpu"
    return cpu.is_enabled and on_cpu and not is_traced


class _Weights(NamedTuple):
    """The weights of a `DenseLayer`, or their gradients, in the order of the computation."""

    # First BatchNorm, then the 1x1 convolution to the bottleneck.
    scale_C: Tensor
    shift_C: Tensor
    mix_KC1: Tensor

    # Second BatchNorm, then the convolution over time.
    scale_K: Tensor
    shift_K: Tensor
    local_GKJ: Tensor

    # The two layers that compute the mask, weight and bias each.
    squeeze_HK1: Tensor
    squeeze_H: Tensor
    excite_GH1: Tensor
    excite_G: Tensor


class _Activations(NamedTuple):
    """Values of a layer's forward pass that its backward pass needs."""

    read_CN: Tensor  # the layer's input, normalised and rectified
    mixed_KN: Tensor  # after the 1x1 convolution
    hidden_KBT: Tensor  # `mixed`, normalised and rectified
    mean_K: Tensor  # of `mixed`
    inv_std_K: Tensor  # of `mixed`
    local_GBT: Tensor  # after the convolution over time, before the mask
    context_KQ: Tensor
    squeezed_HQ: Tensor
    mask_GQ: Tensor


NUM_WEIGHTS = len(_Weights._fields)
NUM_ACTIVATIONS = len(_Activations._fields)


def _weights_of(layer: Any) -> _Weights:
    norm1 = layer.nonlinear1.batchnorm
    norm2 = layer.nonlinear2.batchnorm
    cam = layer.cam_layer
    return _Weights(
        scale_C=norm1.weight,
        shift_C=norm1.bias,
        mix_KC1=layer.linear1.weight,
        scale_K=norm2.weight,
        shift_K=norm2.bias,
        local_GKJ=cam.linear_local.weight,
        squeeze_HK1=cam.linear1.weight,
        squeeze_H=cam.linear1.bias,
        excite_GH1=cam.linear2.weight,
        excite_G=cam.linear2.bias,
    )


def _infer(
    layers: Sequence[Any],
    x_BCT: Tensor,
    segment_frames: int,
) -> Tensor:
    """Run layers in eval mode without gradients.

    In 16 bits the CPU's library compiles a kernel for each shape, which takes as long as using it;
    rounding up the columns lets recordings of different lengths share kernels.
    """
    batch, channels, frames = x_BCT.shape
    num_values = batch * frames
    columns = num_values
    if x_BCT.dtype.itemsize < 4:
        columns += -num_values % COLUMN_MULTIPLE

    # One array for the input and for the channels of all layers, so that nothing is joined.
    num_new = _count_new_channels(layers)
    store_CN = x_BCT.new_empty(channels + num_new, columns)
    store_CN[:, num_values:] = 0  # read, but not part of the output
    values_CN = store_CN[:, :num_values]
    store_CBT = values_CN.unflatten(1, (batch, frames))
    store_CBT[:channels] = x_BCT.transpose(0, 1)

    first_norm = layers[0].nonlinear1.batchnorm
    segments = Segments(frames, segment_frames, like=first_norm.weight)
    with autocast_off(x_BCT):
        for layer in layers:
            norm = layer.nonlinear1.batchnorm
            activations = _forward(
                layer,
                _weights_of(layer),
                seen_CN=store_CN[:channels],
                moments=(norm.running_mean, norm.running_var),
                segments=segments,
                batch=batch,
            )
            new_GBT = _append(store_CBT, channels, activations, segments)
            channels += len(new_GBT)
    return store_CBT.transpose(0, 1)


def _count_new_channels(layers: Sequence[Any]) -> int:
    """Return the number of channels that the layers of a block append in all."""
    conv = layers[0].cam_layer.linear_local
    return len(layers) * conv.out_channels


class _TrainedBlock(torch.autograd.Function):
    """A dense block in train mode, with all its gradients.

    The arguments after the first three are the weights of all layers in a row, because autograd
    computes gradients only for tensors among the arguments.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BCT: Tensor,
        layers: Sequence[Any],
        segment_frames: int,
        *weights: Tensor,
    ) -> Tensor:
        batch, channels, frames = x_BCT.shape
        num_channels = channels + _count_new_channels(layers)
        store_CBT = x_BCT.new_empty(num_channels, batch, frames)
        store_CBT[:channels] = x_BCT.transpose(0, 1)

        wide = torch.promote_types(x_BCT.dtype, torch.float32)
        moments_2C = x_BCT.new_ones(2, num_channels, dtype=wide)
        segments = Segments(frames, segment_frames, like=moments_2C)

        start = 0  # of the channels whose moments are not computed yet
        num_seen: list[int] = []
        activations: list[_Activations] = []
        with autocast_off(x_BCT):
            for index, layer in enumerate(layers):
                new = slice(start, channels)
                moments_2C[:, new] = moments_of(store_CBT[new])
                # A layer reads all channels so far, whose moments are known by now.
                mean_C, var_C = moments_2C[:, :channels]
                computed = _forward(
                    layer,
                    _weights_at(index, weights),
                    seen_CN=store_CBT[:channels].flatten(1),
                    moments=(mean_C, var_C),
                    segments=segments,
                    batch=batch,
                )
                activations.append(computed)
                num_seen.append(channels)
                new_GBT = _append(store_CBT, channels, computed, segments)
                start = channels
                channels += len(new_GBT)
        _update_statistics(
            layers,
            num_seen,
            moments_2C,
            activations,
            count=batch * frames,
        )

        ctx.layers = layers
        ctx.segments = segments
        ctx.save_for_backward(
            store_CBT,
            moments_2C,
            *weights,
            *chain.from_iterable(activations),
        )
        return store_CBT.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        store_CBT, moments_2C, *tensors = ctx.saved_tensors
        mean_C, var_C = moments_2C
        num_weights = len(ctx.layers) * NUM_WEIGHTS
        weights = tensors[:num_weights]
        activations = tensors[num_weights:]

        (d_y_BCT,) = grads
        d_store_CBT = torch.empty_like(store_CBT)
        d_store_CBT.copy_(d_y_BCT.transpose(0, 1))
        first_norm = ctx.layers[0].nonlinear1.batchnorm
        inv_std_C = (var_C + first_norm.eps).rsqrt()
        shared = _Channels(
            x_CBT=store_CBT,
            d_x_CBT=d_store_CBT,
            mean_C=mean_C,
            inv_std_C=inv_std_C,
            slope_C=torch.zeros_like(mean_C),
            constant_C=torch.zeros_like(mean_C),
        )

        # From the last layer to the first: a layer's channels have their whole gradient when all
        # layers after it, which read them, are done.
        channels = len(store_CBT)
        d_weights: list[Any] = []
        with autocast_off(store_CBT):
            for index in reversed(range(len(ctx.layers))):
                layer = ctx.layers[index]
                computed = _activations_at(index, activations)
                end = channels
                channels -= len(computed.local_GBT)
                d_new_GBT = shared.finish_gradient(channels, end)
                d_weights_of_layer = _backward(
                    layer,
                    _weights_at(index, weights),
                    computed,
                    d_new_GBT=d_new_GBT,
                    shared=shared,
                    segments=ctx.segments,
                )
                # The layers run backwards, but autograd expects the order of the arguments.
                d_weights = [*d_weights_of_layer, *d_weights]
            d_x_CBT = shared.finish_gradient(0, channels)
        return d_x_CBT.transpose(0, 1), None, None, *d_weights


def _weights_at(index: int, weights: Sequence[Tensor]) -> _Weights:
    """Return the weights of one layer from the weights of all layers in a row."""
    start = index * NUM_WEIGHTS
    return _Weights(*weights[start : start + NUM_WEIGHTS])


def _activations_at(index: int, activations: Sequence[Tensor]) -> _Activations:
    """Return the activations of one layer from the activations of all layers in a row."""
    start = index * NUM_ACTIVATIONS
    return _Activations(*activations[start : start + NUM_ACTIVATIONS])


def _update_statistics(
    layers: Sequence[Any],
    num_seen: Sequence[int],
    moments: Tensor,
    activations: Sequence[_Activations],
    count: int,
) -> None:
    """Update all running statistics from `count` values.

    num_seen: the number of channels that each layer reads.
    """
    first_norms = [layer.nonlinear1.batchnorm for layer in layers]
    second_norms = [layer.nonlinear2.batchnorm for layer in layers]
    norms = first_norms + second_norms
    norm = norms[0]  # all have one epsilon and one momentum

    # Running variances are unbiased, the variances of a batch are not.
    mean_C, var_C = moments
    inv_stds = [computed.inv_std_K for computed in activations]
    inv_std_LK = torch.stack(inv_stds)
    var_LK = variance(inv_std_LK, norm.eps)
    correction = count / (count - 1)
    unbiased_C = var_C * correction
    unbiased_LK = var_LK * correction

    new_means = [mean_C[:channels] for channels in num_seen]
    new_means += [computed.mean_K for computed in activations]
    new_vars = [unbiased_C[:channels] for channels in num_seen]
    new_vars += unbiased_LK.unbind()

    # All at once: one call for each of the small vectors would take longer than the sums.
    buffers = [norm.running_mean for norm in norms]
    buffers += [norm.running_var for norm in norms]
    counters = [norm.num_batches_tracked for norm in norms]
    with torch.no_grad():
        lerp_all(buffers, new_means + new_vars, norm.momentum)
        add_all(counters, 1)


def _append(
    store_CBT: Tensor,
    channels: int,
    activations: _Activations,
    segments: Segments,
) -> Tensor:
    """Write a layer's masked output into the store after `channels`; return it, (G, B, T)."""
    local_GBT = activations.local_GBT
    end = channels + len(local_GBT)
    new_GBT = store_CBT[channels:end]
    mask_GQ = activations.mask_GQ.to(store_CBT.dtype)
    mask_GBT = segments.spread(mask_GQ)
    # `out` writes the product into the store without a copy.
    return torch.mul(local_GBT, mask_GBT, out=new_GBT)


def _forward(
    layer: Any,
    weights: _Weights,
    *,
    seen_CN: Tensor,
    moments: tuple[Tensor, Tensor],
    segments: Segments,
    batch: int,
) -> _Activations:
    """Compute a layer from the channels seen; `moments` are their means and variances."""
    norm1 = layer.nonlinear1.batchnorm
    norm2 = layer.nonlinear2.batchnorm
    conv = layer.cam_layer.linear_local

    # BatchNorm, ReLU and the 1x1 convolution to the bottleneck, in the type that BatchNorm returns:
    # autocast is off here, so the weights are cast by hand.
    mean_C, var_C = moments
    read_CN = normalise_relu(
        seen_CN,
        weights.scale_C,
        weights.shift_C,
        mean_C=mean_C,
        var_C=var_C,
        eps=norm1.eps,
    )
    dtype = read_CN.dtype
    mix_KC = weights.mix_KC1.squeeze(2)
    mix_KC = mix_KC.to(dtype)
    mixed_KN = mix_KC @ read_CN

    # The second BatchNorm and ReLU.
    if norm2.training:
        hidden_KN, mean_K, inv_std_K = normalise(
            mixed_KN,
            weights.scale_K,
            weights.shift_K,
            norm2.eps,
        )
        hidden_KN.relu_()
    else:
        # The moments are only for the backward pass, which does not follow: any tensor will do.
        mean_K = inv_std_K = weights.shift_K
        hidden_KN = normalise_relu(
            mixed_KN,
            weights.scale_K,
            weights.shift_K,
            mean_C=norm2.running_mean,
            var_C=norm2.running_var,
            eps=norm2.eps,
        )

    # The convolution over time, without the columns that `_infer` appends.
    frames = segments.frames
    values_KN = hidden_KN[:, : batch * frames]
    hidden_KBT = values_KN.unflatten(1, (batch, frames))
    local_GBT = convolve(
        hidden_KBT,
        weights.local_GKJ.to(dtype),
        dilation=conv.dilation[0],
        num_columns=hidden_KN.shape[1],
    )

    # The mask, from the context of each segment.
    context_KQ = segments.context(hidden_KBT)
    squeezed_HQ = torch.addmm(
        weights.squeeze_H.unsqueeze(1),
        weights.squeeze_HK1.squeeze(2),
        context_KQ,
    )
    squeezed_HQ.relu_()
    mask_GQ = torch.addmm(
        weights.excite_G.unsqueeze(1),
        weights.excite_GH1.squeeze(2),
        squeezed_HQ,
    )
    return _Activations(
        read_CN=read_CN,
        mixed_KN=mixed_KN,
        hidden_KBT=hidden_KBT,
        mean_K=mean_K,
        inv_std_K=inv_std_K,
        local_GBT=local_GBT,
        context_KQ=context_KQ,
        squeezed_HQ=squeezed_HQ,
        mask_GQ=mask_GQ.sigmoid_(),
    )


def _backward(
    layer: Any,
    weights: _Weights,
    activations: _Activations,
    *,
    d_new_GBT: Tensor,
    shared: "_Channels",
    segments: Segments,
) -> _Weights:
    """Return the gradients of the weights; add the gradient of the channels read to `shared`."""
    read_CN = activations.read_CN
    hidden_KBT = activations.hidden_KBT
    squeezed_HQ = activations.squeezed_HQ
    mask_GQ = activations.mask_GQ

    # Back through the mask to the context: `new` is `local` times the mask.
    excite_GH = weights.excite_GH1.squeeze(2)
    squeeze_HK = weights.squeeze_HK1.squeeze(2)
    d_mask_GQ = segments.sums(d_new_GBT * activations.local_GBT)
    d_excited_GQ = torch.ops.aten.sigmoid_backward(d_mask_GQ, mask_GQ)
    d_squeezed_HQ = excite_GH.T @ d_excited_GQ
    d_squeezed_HQ = where_positive(d_squeezed_HQ, squeezed_HQ)
    d_context_KQ = squeeze_HK.T @ d_squeezed_HQ

    # Back through the convolution over time; `hidden` is read by it and by the context.
    dtype = d_new_GBT.dtype
    mask_GBT = segments.spread(mask_GQ.to(dtype))
    d_local_GBT = d_new_GBT * mask_GBT
    d_hidden_KBT, d_local_GKJ = convolve_backward(
        d_local_GBT,
        hidden_KBT,
        weights.local_GKJ.to(dtype),
        dilation=layer.cam_layer.linear_local.dilation[0],
    )
    segments.add_context_backward(d_context_KQ, d_hidden_KBT)

    # Back through the second ReLU and BatchNorm.
    d_hidden_KBT = where_positive(d_hidden_KBT, hidden_KBT)
    d_mixed_1KN, d_scale_K, d_shift_K = normalise_backward(
        d_hidden_KBT.flatten(1),
        activations.mixed_KN,
        weights.scale_K,
        activations.mean_K,
        activations.inv_std_K,
    )
    d_mixed_KN = d_mixed_1KN.squeeze(0)

    # Back through the 1x1 convolution, the first ReLU and the first BatchNorm.
    d_mix_KC = (read_CN @ d_mixed_KN.T).T  # faster than d_mixed_KN @ read_CN.T
    mix_KC = weights.mix_KC1.squeeze(2)
    mix_KC = mix_KC.to(d_mixed_KN.dtype)
    d_read_CN = mix_KC.T @ d_mixed_KN
    d_read_CN = where_positive(d_read_CN, read_CN)
    d_scale_C, d_shift_C = shared.add_gradient(d_read_CN, weights.scale_C)

    # Gradients have the type and the shape of the weights.
    wide = weights.scale_C.dtype
    d_mix_KC = d_mix_KC.to(wide)
    d_squeeze_HK = d_squeezed_HQ @ activations.context_KQ.T
    d_excite_GH = d_excited_GQ @ squeezed_HQ.T
    return _Weights(
        scale_C=d_scale_C,
        shift_C=d_shift_C,
        mix_KC1=d_mix_KC.unsqueeze(2),
        scale_K=d_scale_K,
        shift_K=d_shift_K,
        local_GKJ=d_local_GKJ.to(wide),
        squeeze_HK1=d_squeeze_HK.unsqueeze(2),
        squeeze_H=d_squeezed_HQ.sum(1),
        excite_GH1=d_excite_GH.unsqueeze(2),
        excite_G=d_excited_GQ.sum(1),
    )


class _Channels(NamedTuple):
    """Channels that layers share, and their gradient, summed from the last layer to the first.

    A layer reads channel x as y = a * (x - mean) / std + b. With g, the gradient of y, it adds
    a / std * (g - mean(g) - (x - mean) / std * mean(g * (x - mean) / std)). The first term is added
    at once. The others, a constant and a multiple of x - mean, are summed as two numbers per
    channel until the gradient of the channel is finished.
    """

    x_CBT: Tensor
    d_x_CBT: Tensor
    mean_C: Tensor
    inv_std_C: Tensor
    slope_C: Tensor
    constant_C: Tensor

    def add_gradient(self, d_CN: Tensor, scale_C: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's gradient of the first channels; return d_scale and d_shift."""
        channels = len(d_CN)
        inv_std_C = self.inv_std_C[:channels]
        _, d_scale_C, d_shift_C = normalise_backward(
            d_CN,
            self.x_CBT[:channels].flatten(1),
            scale_C,
            self.mean_C[:channels],
            inv_std_C,
            of_x=False,
        )

        # The first term of the class's formula, a / std * g, at once.
        factor_C = scale_C * inv_std_C
        factor_C1 = factor_C.unsqueeze(1)
        factor_C1 = factor_C1.to(d_CN.dtype)
        d_x_CN = self.d_x_CBT.flatten(1)
        d_x_CN[:channels].addcmul_(d_CN, factor_C1)

        # The others as two numbers per channel; the sums over g are the gradients just computed.
        num_values = d_CN.shape[1]
        share_C = factor_C / num_values
        constant_C = self.constant_C[:channels]
        constant_C.addcmul_(share_C, d_shift_C)
        slope_C = self.slope_C[:channels]
        slope_C.addcmul_(share_C * inv_std_C, d_scale_C)
        return d_scale_C, d_shift_C

    def finish_gradient(self, start: int, end: int) -> Tensor:
        """Return the whole gradient of channels to which no layer adds any more, (C, B, T)."""
        finished = slice(start, end)
        mean_C = self.mean_C[finished]
        # A BatchNorm with a deviation of 1 computes slope * (x - mean) + constant in one pass.
        due_1CBT, _, _ = torch.native_batch_norm(
            self.x_CBT[finished].unsqueeze(0),
            weight=self.slope_C[finished],
            bias=self.constant_C[finished],
            running_mean=mean_C,
            running_var=torch.ones_like(mean_C),
            training=False,
            momentum=0.0,
            eps=0.0,
        )
        due_CBT = due_1CBT.squeeze(0)
        return self.d_x_CBT[finished] - due_CBT
