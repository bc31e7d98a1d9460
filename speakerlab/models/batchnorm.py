"""Batch normalisation whose statistics are quick to compute on a CPU, and may be shared.

In: x of any shape (B, C, ...). Out: what torch's BatchNorm gives, to rounding, with its gradients
and running statistics. Its CPU kernel spends most of its time on the mean and the variance; here
they are those of a GroupNorm of one channel a group, whose kernel is vectorised, in at least fp32
and without cancelling digits.

Ioffe, Szegedy: "Batch Normalization", ICML 2015, arXiv 1502.03167.

Letters: B batch, C channels; what follows them are the places that are averaged over.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import relu

from speakerlab.models.pooling import widened

lerp_all = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
SMALL = 1e-12  # added to a variance that is told as 1 / sqrt(variance), and taken off again

add_all = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
is_tracing = torch.jit.is_tracing  # pyright: ignore[reportPrivateImportUsage]


class Moments(NamedTuple):
    """Of each channel over batch and places: mean and biased variance, without gradient."""

    mean_C: Tensor
    var_C: Tensor


def is_traced() -> bool:
    """Whether the operations are recorded or compiled: then torch's own formulations are due."""
    return torch.compiler.is_compiling() or is_tracing()


def is_usual(norm: nn.modules.batchnorm._BatchNorm, x: Tensor) -> bool:
    """Whether there is all that this module reads, as it is unless asked otherwise."""
    running = norm.running_mean
    if running is None or norm.momentum is None or not norm.affine:
        return False
    wide = torch.promote_types(x.dtype, torch.float32)
    return running.dtype == wide and x.dim() > 2 and x.numel() > x.shape[1]


@torch.no_grad()
def moments(x: Tensor) -> Moments:
    """Mean and variance of each channel, in at least fp32."""
    if x.device.type != "cpu":
        dims = [d for d in range(x.dim()) if d != 1]
        var_C, mean_C = torch.var_mean(widened(x), dim=dims, correction=0)
        return Moments(mean_C, var_C)
    ones_C = x.new_ones(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    _, mean_BC, scale_BC = group_norm(x, ones_C, None, SMALL)
    if len(x) == 1:
        return Moments(mean_BC[0], (scale_BC[0].pow(-2) - SMALL).clamp_min_(0))
    mean_C = mean_BC.mean(0)
    var_BC = scale_BC.pow(-2) - SMALL + (mean_BC - mean_C).square()
    return Moments(mean_C, var_BC.mean(0).clamp_min_(0))


@torch.no_grad()
def track(used: Sequence[tuple[Any, Moments]], num_values: int) -> None:
    """Move the running statistics of BatchNorms of one momentum, all at once, as torch does.

    num_values: how many numbers of a channel each of the moments is of.
    """
    used = [(norm, found) for norm, found in used if norm.training]
    if not used:
        return
    unbiased = num_values / max(num_values - 1, 1)
    buffers = [buffer for norm, _ in used for buffer in (norm.running_mean, norm.running_var)]
    targets = [stat for _, (mean, var) in used for stat in (mean, var * unbiased)]
    lerp_all(buffers, targets, used[0][0].momentum)
    add_all([norm.num_batches_tracked for norm, _ in used], 1)


def normalise(norm: nn.modules.batchnorm._BatchNorm, x: Tensor, found: Moments) -> Tensor:
    """The BatchNorm of x, whose moments these are; where it does not train, by its own."""
    if not norm.training:
        return norm(x)
    return _Normalise.apply(x, norm.weight, norm.bias, *found, norm.eps)


def rectify_rows(norm: nn.modules.batchnorm._BatchNorm, x_CN: Tensor) -> tuple[Tensor, Moments]:
    """BatchNorm and ReLU of rows that nothing else reads, and their moments, in few passes."""
    x_1CN = x_CN.unsqueeze(0)
    if not norm.training:
        y_1CN, found = norm(x_1CN), Moments(*x_CN.new_empty(2, 0))
    elif x_CN.device.type != "cpu":
        found = moments(x_1CN)
        y_1CN = normalise(norm, x_1CN, found)
    else:
        y_1CN, mean_C, scale_C = _NormaliseRows.apply(x_1CN, norm.weight, norm.bias, norm.eps)
        found = Moments(mean_C, scale_C.pow(-2) - norm.eps)
    return relu(y_1CN, inplace=True).squeeze(0), found


class BatchNorm2d(nn.BatchNorm2d):
    """torch's, quicker on a CPU in training of contiguous maps, and itself everywhere else."""

    def forward(self, input: Tensor) -> Tensor:
        plain = not self.training or input.device.type != "cpu" or is_traced()
        if plain or not is_usual(self, input) or not input.is_contiguous():
            return super().forward(input)
        found = moments(input)
        track([(self, found)], input.numel() // len(found.mean_C))
        return normalise(self, input, found)


class _Normalise(torch.autograd.Function):
    """weight * (x - mean) / sqrt(var + eps) + bias, where mean and var are functions of x."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, weight_C, bias_C, mean_C, var_C, ctx.eps = args
        ctx.save_for_backward(x, weight_C, mean_C, (var_C + ctx.eps).rsqrt())
        return torch.native_batch_norm(x, weight_C, bias_C, mean_C, var_C, False, 0.0, ctx.eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = norm_gradients(grads[0], *ctx.saved_tensors, wanted=ctx.needs_input_grad[:3])
        return *found, None, None, None


class _NormaliseRows(torch.autograd.Function):
    """As `_Normalise`, and mean and 1 / sqrt(var + eps), of x_1CN."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x_1CN, weight_C, bias_C, ctx.eps = args
        y_1CN, mean_1C, scale_1C = group_norm(x_1CN, weight_C, bias_C, ctx.eps)
        mean_C, scale_C = mean_1C.squeeze(0), scale_1C.squeeze(0)
        ctx.save_for_backward(x_1CN, weight_C, mean_C, scale_C)
        ctx.mark_non_differentiable(mean_C, scale_C)
        return y_1CN, mean_C, scale_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = norm_gradients(grads[0], *ctx.saved_tensors, wanted=ctx.needs_input_grad[:3])
        return *found, None


def group_norm(
    x: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x normalised with one channel a group, mean and 1 / sqrt(var + eps) of each, (B, C)."""
    batch, channels = x.shape[:2]
    y, mean_BC, scale_BC = torch.native_group_norm(
        x, weight_C, bias_C, batch, channels, x[0, 0].numel(), channels, eps
    )
    return y, widened(mean_BC), widened(scale_BC)  # they are, but where shapes alone are computed


def norm_gradients(
    grad: Tensor,
    x: Tensor,
    weight_C: Tensor,
    mean_C: Tensor,
    scale_C: Tensor,
    wanted: Sequence[bool] = (True, True, True),
) -> Any:
    """Gradients of x, weight and bias, where wanted; scale: 1 / sqrt(var + eps) of x."""
    found = torch.ops.aten.native_batch_norm_backward(
        *(grad.contiguous(), x, weight_C, None, None, mean_C, scale_C, True, 0.0, wanted)
    )
    return [g if want else None for g, want in zip(found, wanted)]
