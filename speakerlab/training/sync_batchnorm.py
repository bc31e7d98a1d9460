"""BatchNorm over the rows of several ranks.

n ranks with B rows each compute the outputs, gradients and running statistics of one batch of n x B
rows, up to rounding. The gradients of scale and shift cover a rank's own rows; DDP adds them up.
torch's SyncBatchNorm needs a GPU, and makes the host wait for it in every layer.

Ioffe, Szegedy: "Batch Normalization", ICML 2015, arXiv 1502.03167. Moments of parts are merged as
in Chan, Golub, LeVeque: "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979.

Letters: B rows, C channels, R ranks of the group, K = 2 C + 1 numbers that a rank sends. Axes after
B and C are averaged over.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from speakerlab.training.distributed import Ranks


def join_batchnorms(module: nn.Module, group: Ranks) -> None:
    """Turn every BatchNorm in `module` into a BatchNorm over the rows of the whole group.

    Parameters, buffers and their names stay, for checkpoints and optimizers. Every rank of the
    group must then run each training pass.
    """
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            norm: Any = layer
            # The state is the same, only the class differs.
            norm.__class__ = JoinedBatchNorm
            norm.group = group


class JoinedBatchNorm(_BatchNorm):
    """BatchNorm of the rows of a group; no `SyncBatchNorm`, because DDP rejects that on a CPU."""

    group: Ranks

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any shape (B, C, ...)."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        weight_C = self.weight
        bias_C = self.bias
        # With affine=False there are none. The dtype of a scale is also the dtype of the sums.
        if weight_C is None or bias_C is None:
            weight_C = torch.ones(
                self.num_features,
                dtype=torch.promote_types(input.dtype, torch.float32),
                device=input.device,
            )
            bias_C = torch.zeros_like(weight_C)
        y, mean_C, var_C, num_values = _Normalise.apply(
            input,
            weight_C,
            bias_C,
            self.eps,
            self.group,
        )
        self._track(mean_C, var_C, num_values)
        return y

    @torch.no_grad()
    def _track(self, mean_C: Tensor, var_C: Tensor, num_values: Tensor) -> None:
        """Update the running statistics as torch does, with the unbiased variance."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        mean_dtype = self.running_mean.dtype
        var_dtype = self.running_var.dtype
        momentum = self.momentum
        # torch's convention: without a momentum, a plain mean over all batches.
        if momentum is None:
            num_batches = self.num_batches_tracked.to(mean_dtype)
            momentum = num_batches.reciprocal()
        correction = num_values / (num_values - 1).clamp_min(1)
        unbiased_C = var_C * correction
        self.running_mean.lerp_(mean_C.to(mean_dtype), momentum)
        self.running_var.lerp_(unbiased_C.to(var_dtype), momentum)


class _Normalise(torch.autograd.Function):
    """weight * (x - mean) / sqrt(var + eps) + bias with the group's mean and variance.

    torch's kernels of BatchNorm read x in its own dtype; their sums are in at least fp32.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        x, weight_C, bias_C, eps, group = args
        ctx.eps = eps
        ctx.group = group
        moments = _group_moments(x, weight_C, eps, group)
        ctx.save_for_backward(x, weight_C, *moments)
        ctx.mark_non_differentiable(*moments)
        # As in eval mode: with moments from outside.
        y = F.batch_norm(
            x,
            moments.mean_C,
            moments.var_C,
            weight_C,
            bias_C,
            eps=eps,
        )
        return y, *moments

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_C, mean_C, var_C, num_values = ctx.saved_tensors
        grad_y = grads[0]
        scale_C = (var_C + ctx.eps).rsqrt()
        # With z = (x - mean) / sqrt(var + eps), the gradient of x is
        #     weight / sqrt(var + eps) * (grad_y - mean of grad_y - z * mean of grad_y * z).
        # torch's kernel takes these two means over this rank's rows. They should be over the rows
        # of the group: the difference is added below.
        grad_x, grad_weight_C, grad_bias_C = torch.ops.aten.native_batch_norm_backward(
            grad_y,
            x,
            weight_C,
            running_mean=None,
            running_var=None,
            save_mean=mean_C,
            save_invstd=scale_C,
            train=True,
            eps=ctx.eps,
            output_mask=[True, True, True],
        )
        # The gradients of weight and bias are the sums of grad_y * z and of grad_y.
        sums_2C = torch.stack([grad_weight_C, grad_bias_C])
        group_sums_2C = ctx.group.sum(sums_2C)
        num_channels = x.shape[1]
        num_of_rank = x.numel() / num_channels
        excess_2C = sums_2C / num_of_rank - group_sums_2C / num_values
        slope_C, shift_C = excess_2C * scale_C * weight_C
        # BatchNorm's formula computes the difference: slope * z + shift.
        grad_x += F.batch_norm(
            x,
            mean_C,
            var_C,
            slope_C,
            shift_C,
            eps=ctx.eps,
        )
        # The numbers eps and group have no gradient.
        return grad_x, grad_weight_C, grad_bias_C, None, None


class _Moments(NamedTuple):
    """Moments of each channel over the group."""

    mean_C: Tensor
    var_C: Tensor  # biased
    num_values: Tensor  # of a channel


def _group_moments(x: Tensor, weight_C: Tensor, eps: float, group: Ranks) -> _Moments:
    """Return mean and biased variance of each channel over the group, and the number of values.

    weight_C: only its dtype matters, at least fp32: the moments get the same.
    """
    # This rank's moments; the kernel returns 1 / sqrt(var + eps).
    _, rank_mean_C, rank_scale_C = torch.native_batch_norm(
        x,
        weight_C,
        bias=None,
        running_mean=None,
        running_var=None,
        training=True,
        momentum=0.0,
        eps=eps,
    )
    # Rounding may leave a channel that is constant a variance just below 0.
    rank_var_C = (rank_scale_C.square().reciprocal() - eps).clamp_min(0)
    num_channels = x.shape[1]
    num_of_rank = rank_mean_C.new_full((1,), x.numel() // num_channels)

    # One collective for all three; a row per rank.
    packed_K = torch.cat([rank_mean_C, rank_var_C, num_of_rank])
    packed_RK = group.gather(packed_K.unsqueeze(0))
    moments_of_ranks = packed_RK[:, :-1]
    mean_RC, var_RC = moments_of_ranks.chunk(2, dim=1)
    num_R1 = packed_RK[:, -1:]

    # Chan et al.: the variance within ranks, plus the variance of the ranks' means.
    share_R1 = num_R1 / num_R1.sum()
    mean_C = (share_R1 * mean_RC).sum(0)
    between_RC = (mean_RC - mean_C).square()
    weighted_RC = share_R1 * (var_RC + between_RC)
    var_C = weighted_RC.sum(0)
    num_values = packed_RK[:, -1].sum()
    return _Moments(mean_C, var_C, num_values)
