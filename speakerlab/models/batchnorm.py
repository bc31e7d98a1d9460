"""Batch normalisation whose statistics are quick to compute on a CPU, and may be shared.

In: x of any shape (B, C, ...). Out: what torch's BatchNorm gives, to rounding, with its gradients
and running statistics. Its CPU kernel spends most of its time on the mean and the variance; here
they are vectorised sums in the precision of x (at least fp32), and squares are taken around the
mean, so that no digits cancel.

Ioffe, Szegedy: "Batch Normalization", ICML 2015, arXiv 1502.03167.

Letters: B batch, C channels; what follows them are the places that are averaged over.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speakerlab.models.pooling import widened

lerp_all = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
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
    dims = [d for d in range(x.dim()) if d != 1]
    if x.device.type != "cpu":
        var_C, mean_C = torch.var_mean(widened(x), dim=dims, correction=0)
        return Moments(mean_C, var_C)
    mean_C = x.mean(dims, dtype=torch.promote_types(x.dtype, torch.float32))
    # A sample at a time: the differences stay in the cache.
    squares = [(row.flatten(1) - mean_C.unsqueeze(1)).square_().sum(1) for row in x]
    return Moments(mean_C, torch.stack(squares).sum(0) * (len(mean_C) / x.numel()))


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
        x, weight_C, mean_C, scale_C = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        found = torch.ops.aten.native_batch_norm_backward(
            *(grads[0].contiguous(), x, weight_C, None, None, mean_C, scale_C),
            *(True, ctx.eps, wanted),
        )
        return *(g if want else None for g, want in zip(found, wanted)), None, None, None
