"""A convolution over time by matrix products of rows, without autograd: its value, its gradients.

In: rows x_KBT, one for each channel. Out: what `conv1d` gives of them, to rounding, and with the
length of x. For training on a CPU: there the convolution takes up to twice as long, most of it in
the backward pass.

Letters: B batch, T frames, N = B x T, K channels, G channels that come out, J taps of a kernel.
"""

from torch import Tensor


def convolve(
    x_KBT: Tensor, weight_GKJ: Tensor, *, dilation: int, num_columns: int | None = None
) -> Tensor:
    """The convolution, (G, B, T). num_columns: of the product in 16 bits, at least N."""
    growth, rows, num_taps = weight_GKJ.shape
    if x_KBT.dtype.itemsize < 4:  # 16 bits would round what each tap gives before they are summed
        used = x_KBT.shape[1:].numel()
        seen_JKN = x_KBT.new_empty(num_taps, rows, num_columns or used)
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


def gradients(
    grad_GBT: Tensor, x_KBT: Tensor, weight_GKJ: Tensor, *, dilation: int
) -> tuple[Tensor, Tensor]:
    """Of x, (K, B, T), and of the weight, (G, K, J); `grad` is moved in time once for both."""
    growth, rows, num_taps = weight_GKJ.shape
    behind_JGBT = grad_GBT.new_empty(num_taps, *grad_GBT.shape)
    _delay(grad_GBT, -dilation, behind_JGBT)
    behind_ON = behind_JGBT.view(num_taps * growth, -1)
    grad_KN = weight_GKJ.permute(1, 2, 0).flatten(1) @ behind_ON
    grad_OK = behind_ON @ x_KBT.reshape(rows, -1).T
    grad_GKJ = grad_OK.view(num_taps, growth, rows).permute(1, 2, 0)
    return grad_KN.view(rows, *x_KBT.shape[1:]), grad_GKJ


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
