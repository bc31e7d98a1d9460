"""Operations on rows of channels on a CPU: normalisation, convolution over time, segments.

In: rows x_CBT, (channels, batch, frames), in any float type. Out: the results of torch, up to
rounding. Autograd records none of them; this file has functions for their gradients.

Letters: B batch, T frames, N = B x T, C and K channels, G channels that come out, J taps of a
kernel, O = J x G, I = J x K, S segments, Q = B x S, R = C x B.
"""

import torch
from torch import Tensor

from speakerlab.core.full_precision import widened

NO_EPS = 1e-12  # keeps the inverse deviation finite where only the moments are needed


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


def moments(x_CBT: Tensor) -> Tensor:
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
