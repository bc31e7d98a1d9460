"""BatchNorm over the rows of several ranks.

n ranks with B rows each give the outputs, gradients and running statistics of one batch of n x B
rows, up to rounding. The gradients of scale and shift cover a rank's own rows; DDP adds them up.
torch's SyncBatchNorm needs a GPU, and has the host wait for it in every layer.

Ioffe, Szegedy: "Batch Normalization", ICML 2015, arXiv 1502.03167. Moments of parts are merged as
in Chan, Golub, LeVeque: "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979.

Letters: B rows, C channels, R ranks of the group; what follows B and C is averaged over.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from speakerlab.core.full_precision import widened
from speakerlab.training.distributed import Ranks


def join_batchnorms(module: nn.Module, group: Ranks) -> None:
    """Turn every BatchNorm in `module` into one that sees the rows of the whole group.

    Parameters, buffers and their names stay, for checkpoints and optimizers. Every rank of the
    group must then run each training pass.
    """
    norms: list[Any] = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    for norm in norms:  # the state is the same, only the class differs
        norm.__class__, norm.group = JoinedBatchNorm, group


class JoinedBatchNorm(_BatchNorm):
    """BatchNorm of the rows of a group; no `SyncBatchNorm`, because DDP rejects that on a CPU."""

    group: Ranks

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any shape (B, C, ...)."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        y, mean_C, var_C, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, self.group
        )
        self._track(mean_C, var_C, count)
        return y

    @torch.no_grad()
    def _track(self, mean_C: Tensor, var_C: Tensor, count: Tensor) -> None:
        """Update the running statistics as torch does, with the unbiased variance."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # a plain mean over all batches
            momentum = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()
        unbiased_C = var_C * (count / (count - 1).clamp_min(1))
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    """weight * (x - mean) / sqrt(var + eps) + bias with the group's mean and variance."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        x, weight_C, bias_C, eps, ctx.group = args
        mean_C, var_C, ctx.count = _group_moments(x, ctx.group)
        y = F.batch_norm(x, mean_C, var_C, weight_C, bias_C, eps=eps)  # with given moments
        ctx.save_for_backward(x, weight_C, mean_C, (var_C + eps).rsqrt())
        ctx.mark_non_differentiable(mean_C, var_C, ctx.count)
        return y, mean_C, var_C, ctx.count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_C, mean_C, scale_C = ctx.saved_tensors
        grad, dims = grads[0].to(mean_C.dtype), [0, *range(2, x.dim())]
        unit = (x.to(mean_C.dtype) - _spread(mean_C, x)) * _spread(scale_C, x)
        own_2C = torch.stack([grad.sum(dims), (grad * unit).sum(dims)])
        shift_C, slope_C = ctx.group.sum(own_2C) / ctx.count
        factor_C = scale_C if weight_C is None else scale_C * weight_C
        grad_x = (grad - _spread(shift_C, x) - unit * _spread(slope_C, x)) * _spread(factor_C, x)
        if weight_C is None:
            return grad_x.to(x.dtype), None, None, None, None
        grad_bias_C, grad_weight_C = own_2C.to(weight_C.dtype)
        return grad_x.to(x.dtype), grad_weight_C, grad_bias_C, None, None


def _group_moments(x: Tensor, group: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance of each channel over the group, and their sample count.

    Both are in at least fp32.
    """
    wide = widened(x)
    var_C, mean_C = torch.var_mean(wide, dim=[0, *range(2, x.dim())], correction=0)
    count = mean_C.new_full((1,), x.numel() // x.shape[1])
    every_RK = group.gather(torch.cat([mean_C, var_C, count]).unsqueeze(0))
    mean_RC, var_RC = every_RK[:, :-1].chunk(2, dim=1)
    share_R1 = every_RK[:, -1:] / every_RK[:, -1:].sum()
    mean_C = (share_R1 * mean_RC).sum(0)
    var_C = (share_R1 * (var_RC + (mean_RC - mean_C).square())).sum(0)
    return mean_C, var_C, every_RK[:, -1].sum()


def _spread(values_C: Tensor, x: Tensor) -> Tensor:
    """Return one value per channel in the axes of x."""
    return values_C.view(-1, *[1] * (x.dim() - 2))
