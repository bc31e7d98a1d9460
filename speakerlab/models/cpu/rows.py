"""Operations on rows of channels on a CPU: normalisation, convolution over time, segments.

In: rows x_CBT, (channels, batch, frames), in any float type. Out: what torch computes, up to
rounding. None of them is recorded by autograd; gradients are functions here.

Letters: B batch, T frames, N = B x T, C and K channels, G channels that come out, J taps of a
kernel, S segments, Q = B x S.
"""

import torch
from torch import Tensor

from speakerlab.core.full_precision import widened

NO_EPS = 1e-12  # keeps the inverse deviation finite where only the moments are wanted


def normalise(
    x_CBT: Tensor, scale_C: Tensor, shift_C: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return batch-normalised rows, their mean and 1 / sqrt(var + eps), at least fp32.

    torch's BatchNorm spends most of its time on the mean and the variance. A GroupNorm with one
    channel per group has the same ones, from a vectorised kernel that cancels no digits.
    """
    channels, num_values = len(x_CBT), x_CBT[0].numel()
    y, mean_1C, inv_std_1C = torch.native_group_norm(
        x_CBT.unsqueeze(0), scale_C, shift_C, 1, channels, num_values, channels, eps
    )
    # They are wide, except where only shapes are computed.
    return y.squeeze(0), widened(mean_1C.squeeze(0)), widened(inv_std_1C.squeeze(0))


def moments(x_CBT: Tensor) -> Tensor:
    """Return the means and variances, (2, C), at least fp32."""
    ones_C = x_CBT.new_ones(len(x_CBT), dtype=torch.promote_types(x_CBT.dtype, torch.float32))
    _, mean_C, inv_std_C = normalise(x_CBT, ones_C, None, NO_EPS)
    return torch.stack([mean_C, variance(inv_std_C, NO_EPS)])


def variance(inv_std_C: Tensor, eps: float) -> Tensor:
    """Return the variance from 1 / sqrt(var + eps)."""
    return (inv_std_C.pow(-2) - eps).clamp_min_(0)


def normalise_relu(
    x_CN: Tensor, scale_C: Tensor, shift_C: Tensor, mean_C: Tensor, var_C: Tensor, eps: float
) -> Tensor:
    """Return rows that are normalised by the given moments and rectified."""
    y_1CN, _, _ = torch.native_batch_norm(
        x_CN.unsqueeze(0), scale_C, shift_C, mean_C, var_C, False, 0.0, eps
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
    d_y_1CN, x_1CN, moments = d_y_CN.unsqueeze(0), x_CN.unsqueeze(0), (mean_C, inv_std_C)
    return torch.ops.aten.native_batch_norm_backward(
        d_y_1CN, x_1CN, scale_C, None, None, *moments, True, 0.0, (of_x, True, True)
    )


def where_positive(d_y: Tensor, y: Tensor) -> Tensor:
    """Put 0 into the gradient of a rectified y where y is 0."""
    return torch.ops.aten.threshold_backward.grad_input(d_y, y, 0, grad_input=d_y)


def convolve(
    x_KBT: Tensor, weight_GKJ: Tensor, *, dilation: int, num_columns: int | None = None
) -> Tensor:
    """Return `conv1d` of the rows with the length of x, (G, B, T), by matrix products.

    num_columns: of the product in 16 bits, at least N.
    """
    growth, channels, num_taps = weight_GKJ.shape
    if x_KBT.dtype.itemsize < 4:  # one product, because 16 bits would round the result of each tap
        used = x_KBT.shape[1:].numel()
        seen_JKN = x_KBT.new_empty(num_taps, channels, num_columns or used)
        seen_JKN[..., used:] = 0
        _delay(x_KBT, dilation, seen_JKN[..., :used].unflatten(2, x_KBT.shape[1:]))
        y_GN = weight_GKJ.transpose(1, 2).flatten(1) @ seen_JKN.flatten(0, 1)
        return y_GN[:, :used].unflatten(1, x_KBT.shape[1:])
    taps_ON = weight_GKJ.permute(2, 0, 1).flatten(0, 1) @ x_KBT.flatten(1)
    taps_JGBT = taps_ON.view(num_taps, growth, *x_KBT.shape[1:])
    frames, y_GBT = x_KBT.shape[-1], taps_JGBT[num_taps // 2].clone()
    for tap, tap_GBT in enumerate(taps_JGBT):
        delay = (num_taps // 2 - tap) * dilation
        if 0 < delay < frames:
            y_GBT[..., delay:] += tap_GBT[..., :-delay]
        elif -frames < delay < 0:
            y_GBT[..., :delay] += tap_GBT[..., -delay:]
    return y_GBT


def convolve_backward(
    d_y_GBT: Tensor, x_KBT: Tensor, weight_GKJ: Tensor, *, dilation: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, (K, B, T), and of the weight, (G, K, J), from that of y."""
    growth, channels, num_taps = weight_GKJ.shape
    behind_JGBT = d_y_GBT.new_empty(num_taps, *d_y_GBT.shape)
    _delay(d_y_GBT, -dilation, behind_JGBT)
    behind_ON = behind_JGBT.view(num_taps * growth, -1)
    d_x_KN = weight_GKJ.permute(1, 2, 0).flatten(1) @ behind_ON
    d_weight_OK = behind_ON @ x_KBT.reshape(channels, -1).T
    d_weight_GKJ = d_weight_OK.view(num_taps, growth, channels).permute(1, 2, 0)
    return d_x_KN.view(channels, *x_KBT.shape[1:]), d_weight_GKJ


def _delay(x_CBT: Tensor, dilation: int, moved_JCBT: Tensor) -> None:
    """Write x as each tap sees it; a negative dilation goes the other way."""
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


class Segments:
    """Stretches of `segment_frames` frames that share a context; the last may be shorter."""

    def __init__(self, frames: int, segment_frames: int, *, like: Tensor) -> None:
        self.frames = frames
        whole, rest = divmod(frames, segment_frames)
        self.lengths = [segment_frames] * whole + [rest] * (rest > 0)
        lengths_S = like.new_tensor(self.lengths)
        self.means_SS = lengths_S.reciprocal().diag() + 1 / frames
        segment_T = torch.arange(frames) // segment_frames
        self.members_ST = (torch.arange(len(lengths_S)).unsqueeze(1) == segment_T).to(like.dtype)

    def sums(self, x_CBT: Tensor) -> Tensor:
        """Return the sum over each segment, (C, Q), at least fp32."""
        pieces = [piece.sum(-1) for piece in x_CBT.split(self.lengths, dim=-1)]
        return widened(torch.stack(pieces, dim=-1)).flatten(1)

    def context(self, x_CBT: Tensor) -> Tensor:
        """Return the mean over all frames plus the mean over each segment, (C, Q)."""
        return self._mix(self.sums(x_CBT), self.means_SS)

    def _mix(self, x_CQ: Tensor, weight_SS: Tensor) -> Tensor:
        return (x_CQ.view(-1, len(self.lengths)) @ weight_SS).view(x_CQ.shape)

    def add_context_backward(self, d_context_CQ: Tensor, d_x_CBT: Tensor) -> None:
        """Add to the gradient of each frame that of its context."""
        d_sums_QS = self._mix(d_context_CQ, self.means_SS.T).view(-1, len(self.lengths))
        d_x_CBT.flatten(0, 1).addmm_(d_sums_QS.to(d_x_CBT.dtype), self.members_ST.to(d_x_CBT.dtype))

    def spread(self, x_CQ: Tensor) -> Tensor:
        """Repeat each value for the frames of its segment, (C, B, T)."""
        x_CBS = x_CQ.unflatten(1, (-1, len(self.lengths)))
        pieces = zip(x_CBS.split(1, dim=-1), self.lengths)
        return torch.cat([x_CB1.expand(-1, -1, length) for x_CB1, length in pieces], dim=-1)
