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
        weight_C, bias_C = self.weight, self.bias
        if weight_C is None or bias_C is None:
            dtype = torch.promote_types(input.dtype, torch.float32)
            weight_C = torch.ones(self.num_features, dtype=dtype, device=input.device)
            bias_C = torch.zeros_like(weight_C)
        y, mean_C, var_C, count = _Normalise.apply(input, weight_C, bias_C, self.eps, self.group)
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
    """weight * (x - mean) / sqrt(var + eps) + bias with the group's mean and variance.

    torch's kernels of BatchNorm read x in its own dtype; their sums are in at least fp32.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        x, weight_C, bias_C, ctx.eps, ctx.group = args
        moments = _group_moments(x, weight_C, ctx.eps, ctx.group)
        mean_C, var_C, count = moments
        ctx.save_for_backward(x, weight_C, *moments)
        ctx.mark_non_differentiable(*moments)
        y = F.batch_norm(x, mean_C, var_C, weight_C, bias_C, eps=ctx.eps)  # with given moments
        return y, *moments

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_C, mean_C, var_C, count = ctx.saved_tensors
        scale_C = (var_C + ctx.eps).rsqrt()
        # Here, the gradients' means are those of the rank's own rows; below, of the group's.
        grad_x, slope_C, shift_C = torch.ops.aten.native_batch_norm_backward(
            grads[0], x, weight_C, None, None, mean_C, scale_C, True, ctx.eps, [True, True, True]
        )
        own_2C = torch.stack([slope_C, shift_C])
        excess_2C = own_2C / (x.numel() / x.shape[1]) - ctx.group.sum(own_2C) / count
        more_2C = excess_2C * scale_C * weight_C
        grad_x += F.batch_norm(x, mean_C, var_C, more_2C[0], more_2C[1], eps=ctx.eps)
        return grad_x, slope_C, shift_C, None, None


def _group_moments(
    x: Tensor, weight_C: Tensor, eps: float, group: Ranks
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance of each channel over the group, and their sample count.

    Both are in at least fp32, as `weight_C`, whose values do not matter.
    """
    _, mean_C, scale_C = torch.native_batch_norm(x, weight_C, None, None, None, True, 0.0, eps)
    var_C = (scale_C.square().reciprocal() - eps).clamp_min(0)
    count = mean_C.new_full((1,), x.numel() // x.shape[1])
    every_RK = group.gather(torch.cat([mean_C, var_C, count]).unsqueeze(0))
    mean_RC, var_RC = every_RK[:, :-1].chunk(2, dim=1)
    share_R1 = every_RK[:, -1:] / every_RK[:, -1:].sum()
    mean_C = (share_R1 * mean_RC).sum(0)
    var_C = (share_R1 * (var_RC + (mean_RC - mean_C).square())).sum(0)
    return mean_C, var_C, every_RK[:, -1].sum()
