"""What models share: poolings over time, shortcuts, memory layout, and the last layers.

In: feature maps whose last axis is time, in any float type. Out: fp32 (fp64 of fp64).
Sums of squares leave the range of fp16 and lose most digits in bf16, so statistics are computed in
at least fp32 even under autocast; only the convolutions that score frames for attention are not.

Letters: B batch, C channels, T frames, F mel bins, D embedding, K = 2 x everything between B and T.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from speakerlab.core.full_precision import fp32_island, widened

# Keeps the square root off 0 where a model adds no epsilon. Far below any variance that fp32
# features have, and its root (1e-15) still divides without overflow.
TINY_VARIANCE = 1e-30
CACHED_VALUES = 1 << 19  # 2 MiB in fp32


def refuse_unusable(model: Any, feats_BTF: Tensor) -> None:
    """Raise ValueError unless the features are (B, T, feat_dim) with T at least `min_frames`."""
    shape, feat_dim, name = tuple(feats_BTF.shape), model.feat_dim, type(model).__name__
    if len(shape) != 3 or shape[2] != feat_dim:
        raise ValueError(
            f"{name}: features have the shape {shape}; give (batch, frames, {feat_dim}), or build "
            "the model with another feat_dim"
        )
    if shape[1] < model.min_frames:
        raise ValueError(
            f"{name}: {shape[1]} frames are too few to pool; give at least {model.min_frames}"
        )


def subsample(stride: int | tuple[int, int]) -> nn.Module:
    """Return a layer that keeps every `stride`-th bin and frame.

    It comes before a 1x1 convolution that could stride itself, because the backward pass of a
    strided 1x1 convolution is slow on a CPU.
    """
    if stride in (1, (1, 1)):
        return nn.Identity()
    return Subsample(*(stride if isinstance(stride, tuple) else (stride, stride)))


class Subsample(nn.Module):
    """Keeps every `bins`-th bin and every `frames`-th frame of (B, C, F, T)."""

    def __init__(self, bins: int, frames: int) -> None:
        super().__init__()
        self.bins, self.frames = bins, frames

    def forward(self, x_BCFT: Tensor) -> Tensor:
        return _Sliced.apply(x_BCFT, self.bins, self.frames)  # pyright: ignore[reportReturnType]


class _Sliced(torch.autograd.Function):
    """A copy of a slice; its gradient keeps the layout of the map, which that of a slice loses."""

    @staticmethod
    def forward(ctx: Any, x_BCFT: Tensor, bins: int, frames: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.bins, ctx.frames, ctx.layout = bins, frames, (x_BCFT.shape, x_BCFT.stride())
        return x_BCFT[:, :, ::bins, ::frames].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_x_BCFT = grads[0].new_empty_strided(*ctx.layout).zero_()
        d_x_BCFT[:, :, :: ctx.bins, :: ctx.frames] = grads[0]
        return d_x_BCFT, None, None


def named(**layers: nn.Module) -> nn.Sequential:
    """Return layers in a row, under the names that they have in published checkpoints."""
    return nn.Sequential(OrderedDict(layers))


def shortcut(
    in_channels: int, out_channels: int, *, stride: int | tuple[int, int] = 1
) -> nn.Sequential:
    """Return the identity, or a projection where a block changes the shape; named as published."""
    if stride in (1, (1, 1)) and in_channels == out_channels:
        return nn.Sequential()
    conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
    layers = {"0": conv, "1": nn.BatchNorm2d(out_channels)}
    return named(subsample=subsample(stride), **layers)


def keep_layout(x: Tensor) -> Tensor:
    """Return x, whose gradient will be in channels last if x is a map in channels last.

    Call it where the gradient would come back contiguous: before pooling or flattening a map. One
    such gradient would make those of all layers before it contiguous, too, and layers that meet
    both orders are several times slower on a CPU, and in 16 bits on a GPU, than with either.
    """
    is_map = x.dim() == 4 and not x.is_contiguous()
    if is_map and x.requires_grad and not torch.compiler.is_compiling():
        x.register_hook(partial(Tensor.contiguous, memory_format=torch.channels_last))
    return x


def mean_std(x_BCT: Tensor, *, eps: float) -> Tensor:
    """Return means over time, then standard deviations, (B, ..., T) -> (B, K).

    The deviation is sqrt(var + eps) with the unbiased variance; one frame has variance 0. The
    gradient is finite everywhere: with eps 0 it is zero where the variance is.
    """
    mean, var = moments(x_BCT, correction=1 if x_BCT.shape[-1] > 1 else 0)
    std = (var + eps).clamp_min(TINY_VARIANCE).sqrt()
    return torch.cat([mean.flatten(1), std.flatten(1)], dim=1)


def attentive_mean_std(x_BCT: Tensor, scores_BCT: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Return the mean and deviation (B, C) with the weights softmax(scores) over time.

    The deviation is sqrt(max(var, eps)) of the weighted variance.
    """
    mean_BC1, var_BC1 = _WeightedMoments.apply(x_BCT, scores_BCT)
    std_BC1 = var_BC1.clamp_min(max(eps, TINY_VARIANCE)).sqrt()
    return mean_BC1.squeeze(-1), std_BC1.squeeze(-1)


def moments(x_BCT: Tensor, *, correction: int) -> tuple[Tensor, Tensor]:
    """Return the mean and variance over time, (B, ..., T) -> (B, ..., 1)."""
    return _Moments.apply(x_BCT, correction)  # pyright: ignore[reportReturnType]


# The functions below compute relative to the first frame, so that constants and single frames are
# exact and large values cost no digits. They keep maps in the type in which they came, and on a CPU
# compute by utterances, so that maps in fp32 stay in its cache.


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BCT: Tensor, correction: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        degrees = x_BCT.shape[-1] - correction

        def of(x: Tensor) -> tuple[Tensor, Tensor]:
            wide = widened(x)
            if x.device.type != "cpu":  # on a CPU, torch's takes six times as long as ours
                var, mean = torch.var_mean(wide, -1, correction=correction, keepdim=True)
                return mean, var
            first = wide[..., :1]
            offset = wide - first
            mean = offset.mean(-1, keepdim=True)
            return first + mean, (offset - mean).square_().sum(-1, keepdim=True) / degrees

        mean, var = _joined(of(*piece) for piece in _in_cache(x_BCT))
        ctx.save_for_backward(x_BCT, mean)
        ctx.degrees = degrees
        return mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mean: Tensor, d_var: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BCT, mean = ctx.saved_tensors
        d_x_BCT, frames = torch.empty_like(x_BCT), x_BCT.shape[-1]
        whole = x_BCT, mean, d_mean / frames, d_var * (2 / ctx.degrees), d_x_BCT
        for x, mean, d_mean, d_var, d_x in _in_cache(*whole):
            d_x.copy_((widened(x) - mean).mul_(d_var).add_(d_mean))
        return d_x_BCT, None


class _WeightedMoments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BCT: Tensor, scores_BCT: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        def of(x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
            weight, wide = widened(scores).softmax(-1), widened(x)
            first = wide[..., :1]
            offset = wide - first
            mean = (weight * offset).sum(-1, keepdim=True)
            return first + mean, (offset - mean).square_().mul_(weight).sum(-1, keepdim=True)

        mean, var = _joined(of(*piece) for piece in _in_cache(x_BCT, scores_BCT))
        ctx.save_for_backward(x_BCT, scores_BCT, mean, var)
        return mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mean: Tensor, d_var: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_x_BCT, d_scores_BCT = map(torch.empty_like, ctx.saved_tensors[:2])
        whole = *ctx.saved_tensors, d_mean, d_var, d_x_BCT, d_scores_BCT
        for x, scores, mean, var, d_mean, d_var, d_x, d_scores in _in_cache(*whole):
            weight, offset = widened(scores).softmax(-1), widened(x) - mean
            scaled = offset * d_var
            d_x.copy_(torch.add(d_mean, scaled, alpha=2).mul_(weight))
            d_scores.copy_(scaled.add_(d_mean).mul_(offset).sub_(d_var * var).mul_(weight))
        return d_x_BCT, d_scores_BCT


def _in_cache(x_BCT: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Yield as many utterances at a time as a CPU's cache holds, on a GPU all at once."""
    if x_BCT.device.type != "cpu" or torch.compiler.is_compiling():
        return [(x_BCT, *others)]
    num_utts = max(1, CACHED_VALUES // x_BCT[0].numel())
    return zip(*(whole.split(num_utts) for whole in (x_BCT, *others)))


def _joined(pieces: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of all utterances from those of pieces."""
    mean, var = (one[0] if len(one) == 1 else torch.cat(one) for one in zip(*pieces))
    return mean, var


def convolve_with_context(conv: nn.Conv1d, x_BCT: Tensor, context_BK: Tensor) -> Tensor:
    """Return a 1x1 convolution of x and, after it, of a context that all frames share.

    Equal to `conv(cat([x, context.expand(..., T)], 1))`; the share of the context is computed once
    for each utterance, and in fp32, so that two overflows of fp16 never meet as inf - inf.
    """
    channels = x_BCT.shape[1]
    share_BCT = F.conv1d(x_BCT, conv.weight[:, :channels], conv.bias)
    with fp32_island(x_BCT):
        weight_CK = widened(conv.weight[:, channels:, 0])
        share_BC = F.linear(context_BK, weight_CK)
    return share_BCT + share_BC.unsqueeze(-1)


class Pooling(nn.Module):
    """Statistics over time: (B, C, T) or (B, C, F, T) -> (B, out_dim), `in_dim` being C or C x F.

    `eps` keeps the variance off 0: 1e-7 in WeSpeaker; in 3D-Speaker 1e-8, with attention 1e-10.
    The statistics of one frame are finite, but its deviation is a constant.
    """

    def __init__(self, in_dim: int, *, eps: float = 1e-7) -> None:
        super().__init__()
        self.out_dim, self.eps = 2 * in_dim, eps


class TSTP(Pooling):
    """Temporal statistics pooling: mean and deviation (Snyder et al., "X-Vectors", ICASSP 2018)."""

    def forward(self, x: Tensor) -> Tensor:
        return mean_std(x, eps=self.eps)


class ASTP(Pooling):
    """Attentive statistics pooling: each channel weighs the frames by a small network.

    Okabe, Koshinaka, Shinoda: "Attentive Statistics Pooling for Deep Speaker Embedding",
    Interspeech 2018, arXiv 1803.10963; per channel, and with `global_context` (the network also
    sees mean and deviation of the utterance) as in ECAPA-TDNN, arXiv 2005.07143.
    """

    def __init__(
        self, in_dim: int, *, eps: float = 1e-7, bottleneck: int = 128, global_context: bool = False
    ) -> None:
        super().__init__(in_dim, eps=eps)
        self.global_context = global_context
        self.linear1 = nn.Conv1d(in_dim * (3 if global_context else 1), bottleneck, 1)
        self.linear2 = nn.Conv1d(bottleneck, in_dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        x_BCT = x.flatten(1, -2)
        into_BCT = x_BCT.to(self.linear1.weight.dtype)
        if self.global_context:
            context_BK = mean_std(x_BCT, eps=self.eps)
            hidden = convolve_with_context(self.linear1, into_BCT, context_BK)
        else:
            hidden = self.linear1(into_BCT)
        scores_BCT = self.linear2(hidden.tanh())
        return torch.cat(attentive_mean_std(x_BCT, scores_BCT, eps=self.eps), dim=1)


PoolingName = Literal["tstp", "astp"]
POOLINGS: dict[PoolingName, Callable[..., Pooling]] = {"tstp": TSTP, "astp": ASTP}


class PooledModel(nn.Module):
    """A model that ends in a pooling and one linear layer or, with `two_emb_layer`, two, ReLU and
    BatchNorm between, of which the second gives the embedding."""

    min_frames = 2  # to pool; more in a subclass that has fewer frames there than it is given
    pool: Pooling

    def __init__(self, feat_dim: int, embed_dim: int, *, two_emb_layer: bool = False) -> None:
        super().__init__()
        self.feat_dim, self.embed_dim, self.two_emb_layer = feat_dim, embed_dim, two_emb_layer

    def add_embedding_layers(self, pool: Pooling) -> None:
        self.pool = pool
        self.seg_1 = nn.Linear(pool.out_dim, self.embed_dim)
        if self.two_emb_layer:
            self.seg_bn_1 = nn.BatchNorm1d(self.embed_dim, affine=False)
            self.seg_2 = nn.Linear(self.embed_dim, self.embed_dim)

    def embed(self, x: Tensor) -> Tensor:
        """Return embeddings (B, D) of what is pooled, (B, ..., T)."""
        emb_BD = self.seg_1(self.pool(keep_layout(x)))
        return self.seg_2(self.seg_bn_1(F.relu(emb_BD))) if self.two_emb_layer else emb_BD
