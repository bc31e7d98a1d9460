"""Averages over time, shared by the models: statistics pooling, and means over short segments.

In: feature maps whose last axis is time, in any float type. Out: fp32 (fp64 of fp64).
Sums of squares leave the range of fp16 and lose most digits in bf16, so everything here is computed
in at least fp32 whatever autocast says. Input that is too short to pool is refused here, too.

Letters: B batch, C channels, T frames, F mel bins, S segments, K = 2 x everything between B and T.
"""

import torch
from torch import Tensor

# What the square root is kept away from where a model adds no epsilon of its own. Far below any
# variance that fp32 features have, and its root (1e-15) still divides without overflow.
TINY_VARIANCE = 1e-30


def fp32_island(x: Tensor) -> torch.autocast:
    """A context in which autocast is off on the device of `x`; the only such place in `models`."""
    return torch.autocast(x.device.type, enabled=False)


def widened(x: Tensor) -> Tensor:
    """`x` in fp32, or as it is where it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def refuse_unusable(feats_BTF: Tensor, *, name: str, feat_dim: int, min_frames: int) -> None:
    """Raise ValueError, one line, unless the features are (B, T >= min_frames, feat_dim)."""
    shape = tuple(feats_BTF.shape)
    if len(shape) != 3 or shape[2] != feat_dim:
        raise ValueError(
            f"{name}: features have the wrong shape, got {shape}; "
            f"give (batch, frames, {feat_dim}), or build the model with another feat_dim"
        )
    if shape[1] < min_frames:
        raise ValueError(
            f"{name}: too few frames to pool, got {shape[1]}; give at least {min_frames}"
        )


def mean_std(x_BCT: Tensor, *, eps: float) -> Tensor:
    """Mean and standard deviation over time, (B, ..., T) -> (B, K): all means, then all deviations.

    The deviation is sqrt(var + eps) with the unbiased variance; one frame has variance 0. The
    gradient is finite everywhere: with eps 0 it is zero where the variance is.
    """
    with fp32_island(x_BCT):
        unbiased = 1 if x_BCT.shape[-1] > 1 else 0
        var, mean = torch.var_mean(widened(x_BCT), dim=-1, correction=unbiased)
        std = (var + eps).clamp_min(TINY_VARIANCE).sqrt()
        return torch.cat([mean.flatten(1), std.flatten(1)], dim=1)


def segment_members(num_frames: int, segment_frames: int, *, like: Tensor) -> Tensor:
    """Which frame is in which segment: 1 or 0, (T, S) fp32, on the device of `like`.

    The last segment with frames may be partial. An empty one follows it, so that S is never 1 and
    an export with dynamic length meets no special case.
    """
    num_segments = (num_frames - 1) // segment_frames + 2
    segment_T = torch.arange(num_frames, device=like.device) // segment_frames
    segment_S = torch.arange(num_segments, device=like.device)
    return (segment_T.unsqueeze(1) == segment_S).float()


def segment_context(x_BCT: Tensor, members_TS: Tensor) -> Tensor:
    """Mean over all frames plus mean over each segment, (B, C, S).

    Explicit sums and counts: `ceil_mode` pooling divides a partial segment by its true length in
    some runtimes and by the full one in others.
    """
    with fp32_island(x_BCT):
        wide_BCT = widened(x_BCT)
        sum_BCS = wide_BCT @ members_TS.to(wide_BCT.dtype)
        count_S = members_TS.sum(0).clamp_min(1)
        return sum_BCS.sum(-1, keepdim=True) / x_BCT.shape[-1] + sum_BCS / count_S


def spread_segments(mask_BCS: Tensor, members_TS: Tensor) -> Tensor:
    """Repeat the value of each segment for its frames, (B, C, S) -> (B, C, T); exact copies."""
    return mask_BCS @ members_TS.to(mask_BCS.dtype).T
