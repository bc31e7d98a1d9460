"""Parts that models share: poolings over time, shortcuts, memory layout, and the last layers.

In: feature maps whose last axis is time, in any float type. Out: fp32 (fp64 of fp64).
Sums of squares leave the range of fp16 and lose most digits in bf16, so statistics are computed in
at least fp32 even under autocast; only the convolutions that score frames for attention are not.

Letters: B batch, C channels, T frames, F mel bins, D embedding, K statistics, the mean and the
deviation for each index of the axes between B and T.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from speakerlab.core.full_precision import autocast_off, widened

# Keeps the square root above 0 where a model adds no epsilon. Far below any variance that fp32
# features have, and its root (1e-15) still divides without overflow.
TINY_VARIANCE = 1e-30
# Number of values that stay in a CPU's cache during a computation: 2 MiB in fp32.
CACHED_VALUES = 1 << 19


def refuse_unusable(model: Any, feats_BTF: Tensor) -> None:
    """Raise ValueError unless the features are (B, T, feat_dim) with T at least `min_frames`."""
    name = type(model).__name__
    feat_dim = model.feat_dim
    shape = tuple(feats_BTF.shape)
    has_three_axes = len(shape) == 3
    if not has_three_axes or shape[2] != feat_dim:
        raise ValueError(
            f"{name}: features have the shape {shape}; give (batch, frames,"
            f" {feat_dim}), or build the model with another feat_dim"
        )
    if shape[1] < model.min_frames:
        raise ValueError(
            f"{name}: {shape[1]} frames are too few to pool; give at least"
            f" {model.min_frames}"
        )


def feature_map(feats_BTF: Tensor) -> Tensor:
    """Return features as a map of one channel, (B, T, F) -> (B, 1, F, T)."""
    feats_BFT = feats_BTF.transpose(1, 2).contiguous()
    return feats_BFT.unsqueeze(1)


def subsample(stride: int | tuple[int, int]) -> nn.Module:
    """Return a layer that keeps every `stride`-th bin and frame.

    It comes before a 1x1 convolution that could stride itself, because the backward pass of a
    strided 1x1 convolution is slow on a CPU.
    """
    if stride in (1, (1, 1)):
        return nn.Identity()
    if isinstance(stride, int):
        return Subsample(stride, stride)
    bins, frames = stride
    return Subsample(bins, frames)


class Subsample(nn.Module):
    """Keeps every `bins`-th bin and every `frames`-th frame of (B, C, F, T)."""

    def __init__(self, bins: int, frames: int) -> None:
        super().__init__()
        self.bins = bins
        self.frames = frames

    def forward(self, x_BCFT: Tensor) -> Tensor:
        return _Sliced.apply(x_BCFT, self.bins, self.frames)  # pyright: ignore[reportReturnType]


class _Sliced(torch.autograd.Function):
    """A copy of a slice, with a gradient in the layout of the map; torch's loses the layout."""

    @staticmethod
    def forward(ctx: Any, x_BCFT: Tensor, bins: int, frames: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The backward pass needs the layout of the map, but none of its values.
        ctx.bins = bins
        ctx.frames = frames
        ctx.layout = (x_BCFT.shape, x_BCFT.stride())
        slice_BCFT = x_BCFT[:, :, ::bins, ::frames]
        return slice_BCFT.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_y_BCFT,) = grads
        shape, strides = ctx.layout
        d_x_BCFT = d_y_BCFT.new_empty_strided(shape, strides)
        # Dropped bins and frames have a gradient of zero.
        d_x_BCFT.zero_()
        d_slice_BCFT = d_x_BCFT[:, :, :: ctx.bins, :: ctx.frames]
        d_slice_BCFT.copy_(d_y_BCFT)
        return d_x_BCFT, None, None


def named_sequential(**layers: nn.Module) -> nn.Sequential:
    """Return layers in a row, under the names that they have in published checkpoints."""
    return nn.Sequential(OrderedDict(layers))


def shortcut(
    in_channels: int,
    out_channels: int,
    *,
    stride: int | tuple[int, int] = 1,
) -> nn.Sequential:
    """Return the identity, or a projection where a block changes the shape; named as published."""
    keeps_size = stride in (1, (1, 1))
    if keeps_size and in_channels == out_channels:
        return nn.Sequential()
    projection = nn.Conv2d(in_channels, out_channels, kernel_size=1, bias=False)
    layers: dict[str, nn.Module] = {
        "subsample": subsample(stride),
        "0": projection,
        "1": nn.BatchNorm2d(out_channels),
    }
    return named_sequential(**layers)


def keep_gradient_layout(x: Tensor) -> Tensor:
    """Return x, whose gradient will be in channels last if x is a map in channels last.

    Call it where the gradient would come back contiguous: before pooling or flattening a map. One
    contiguous gradient would make the gradients of all layers before it contiguous, too. Layers
    with both layouts are several times slower, on a CPU and in 16 bits on a GPU, than with either.
    """
    if torch.compiler.is_compiling():
        return x
    in_channels_last = x.dim() == 4 and not x.is_contiguous()
    if in_channels_last and x.requires_grad:
        to_channels_last = partial(
            Tensor.contiguous,
            memory_format=torch.channels_last,
        )
        x.register_hook(to_channels_last)
    return x


def mean_std(x_BCT: Tensor, *, eps: float) -> Tensor:
    """Return means over time, then standard deviations, (B, ..., T) -> (B, K).

    The deviation is sqrt(var + eps) with the unbiased variance; one frame has variance 0. The
    gradient is finite everywhere: with eps 0 it is zero where the variance is.
    """
    # The unbiased variance of one frame would be 0 / 0.
    num_frames = x_BCT.shape[-1]
    correction = 1 if num_frames > 1 else 0
    mean, var = moments(x_BCT, correction=correction)
    floored_var = (var + eps).clamp_min(TINY_VARIANCE)
    std = floored_var.sqrt()

    mean_and_std = [mean.flatten(1), std.flatten(1)]
    return torch.cat(mean_and_std, dim=1)


def attentive_mean_std(
    x_BCT: Tensor, scores_BCT: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the mean and deviation (B, C) with the weights softmax(scores) over time.

    The deviation is sqrt(max(var, eps)) of the weighted variance.
    """
    mean_BC1, var_BC1 = _WeightedMoments.apply(x_BCT, scores_BCT)
    # The slope of the square root at 0 is infinite.
    min_variance = max(eps, TINY_VARIANCE)
    std_BC1 = var_BC1.clamp_min(min_variance).sqrt()
    mean_BC = mean_BC1.squeeze(-1)
    std_BC = std_BC1.squeeze(-1)
    return mean_BC, std_BC


def moments(x_BCT: Tensor, *, correction: int) -> tuple[Tensor, Tensor]:
    """Return the mean and variance over time, (B, ..., T) -> (B, ..., 1)."""
    return _Moments.apply(x_BCT, correction)  # pyright: ignore[reportReturnType]


# The functions below compute relative to the first frame, so that constants and single frames are
# exact and large values cost no digits. They keep the type of the maps, and on a CPU they compute a
# few utterances at a time, so that maps in fp32 stay in its cache.


class _Moments(torch.autograd.Function):
    """Mean and variance over time; the variance is unbiased if `correction` is 1."""

    @staticmethod
    def forward(ctx: Any, x_BCT: Tensor, correction: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        degrees = x_BCT.shape[-1] - correction

        def moments_of(x: Tensor) -> tuple[Tensor, Tensor]:
            wide = widened(x)
            # On a CPU, torch's function takes six times as long as the code below.
            if x.device.type != "cpu":
                var, mean = torch.var_mean(
                    wide,
                    -1,
                    correction=correction,
                    keepdim=True,
                )
                return mean, var
            first = wide[..., :1]
            offset = wide - first
            mean = offset.mean(-1, keepdim=True)
            squares = (offset - mean).square_()
            sum_of_squares = squares.sum(-1, keepdim=True)
            var = sum_of_squares / degrees
            return first + mean, var

        mean, var = _compute_in_cache(moments_of, x_BCT)
        ctx.save_for_backward(x_BCT, mean)
        ctx.degrees = degrees
        return mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mean: Tensor, d_var: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BCT, means = ctx.saved_tensors
        num_frames = x_BCT.shape[-1]
        d_x_BCT = torch.empty_like(x_BCT)
        # d_x = slope * (x - mean) + constant
        slopes = d_var * (2 / ctx.degrees)
        constants = d_mean / num_frames
        for x, mean, slope, constant, d_x in _in_cache(
            x_BCT, means, slopes, constants, d_x_BCT
        ):
            d_x_in_fp32 = widened(x) - mean
            d_x_in_fp32.mul_(slope).add_(constant)
            d_x.copy_(d_x_in_fp32)
        return d_x_BCT, None


class _WeightedMoments(torch.autograd.Function):
    """Mean and variance over time with the weights softmax(scores)."""

    @staticmethod
    def forward(ctx: Any, x_BCT: Tensor, scores_BCT: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        def moments_of(x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
            weight = widened(scores).softmax(-1)
            wide = widened(x)
            first = wide[..., :1]
            offset = wide - first
            mean = (weight * offset).sum(-1, keepdim=True)
            squares = (offset - mean).square_()
            weighted_squares = squares.mul_(weight)
            var = weighted_squares.sum(-1, keepdim=True)
            return first + mean, var

        mean, var = _compute_in_cache(moments_of, x_BCT, scores_BCT)
        ctx.save_for_backward(x_BCT, scores_BCT, mean, var)
        return mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_means: Tensor, d_vars: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BCT, scores_BCT, means, variances = ctx.saved_tensors
        d_x_BCT = torch.empty_like(x_BCT)
        d_scores_BCT = torch.empty_like(scores_BCT)
        utterances = _in_cache(
            x_BCT,
            scores_BCT,
            means,
            variances,
            d_means,
            d_vars,
            d_x_BCT,
            d_scores_BCT,
        )
        # With o = x - mean and the weight w: d_x = w (d_mean + 2 o d_var), and
        # d_scores = w (o (d_mean + o d_var) - var d_var).
        for x, scores, mean, var, d_mean, d_var, d_x, d_scores in utterances:
            weight = widened(scores).softmax(-1)
            offset = widened(x) - mean
            scaled = offset * d_var

            # In place, so that as few maps as possible have to share the cache.
            slope = torch.add(d_mean, scaled, alpha=2)
            slope.mul_(weight)
            d_x.copy_(slope)

            scaled.add_(d_mean).mul_(offset)
            scaled.sub_(d_var * var).mul_(weight)
            d_scores.copy_(scaled)
        return d_x_BCT, d_scores_BCT


def _in_cache(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split tensors by utterances into parts that fit in a CPU's cache; on a GPU, into one part.

    The first tensor determines how many utterances a part has.
    """
    x_BCT = tensors[0]
    on_cpu = x_BCT.device.type == "cpu"
    if not on_cpu or torch.compiler.is_compiling():
        return [tensors]
    values_per_utt = x_BCT[0].numel()
    num_utts = max(1, CACHED_VALUES // values_per_utt)
    chunks = [tensor.split(num_utts) for tensor in tensors]
    return zip(*chunks)


def _compute_in_cache(
    moments_of: Callable[..., tuple[Tensor, Tensor]],
    *tensors: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of all utterances, computed for some at a time."""
    means: list[Tensor] = []
    variances: list[Tensor] = []
    for utterances in _in_cache(*tensors):
        mean, var = moments_of(*utterances)
        means.append(mean)
        variances.append(var)

    # Joining a single tensor would copy it.
    if len(means) == 1:
        return means[0], variances[0]
    return torch.cat(means), torch.cat(variances)


def convolve_with_context(
    conv: nn.Conv1d,
    x_BCT: Tensor,
    context_BK: Tensor,
) -> Tensor:
    """Return a 1x1 convolution of x and, after it, of a context that all frames share.

    Equal to `conv(cat([x, context.expand(..., T)], 1))`; the context's part of the sum is computed
    once for each utterance, and in fp32, so that two overflows of fp16 never meet as inf - inf.
    """
    # The first inputs of the convolution are the frame's channels, the others the context.
    channels = x_BCT.shape[1]
    frame_weight = conv.weight[:, :channels]
    from_frames_BCT = F.conv1d(x_BCT, frame_weight, conv.bias)
    with autocast_off(x_BCT):
        context_weight = conv.weight[:, channels:, 0]
        context_weight_CK = widened(context_weight)
        from_context_BC = F.linear(context_BK, context_weight_CK)
    return from_frames_BCT + from_context_BC.unsqueeze(-1)


class Pooling(nn.Module):
    """Statistics over time: (B, C, T) or (B, C, F, T) -> (B, out_dim), `in_dim` being C or C x F.

    `eps` keeps the variance above 0: 1e-7 in WeSpeaker; in 3D-Speaker 1e-8, with attention 1e-10.
    The statistics of one frame are finite, but its deviation is a constant.
    """

    def __init__(self, in_dim: int, *, eps: float = 1e-7) -> None:
        super().__init__()
        self.out_dim = 2 * in_dim
        self.eps = eps


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
        self,
        in_dim: int,
        *,
        eps: float = 1e-7,
        bottleneck: int = 128,
        global_context: bool = False,
    ) -> None:
        super().__init__(in_dim, eps=eps)
        self.global_context = global_context
        # With context, the network sees the frame, the mean and the deviation.
        attention_dim = 3 * in_dim if global_context else in_dim
        self.linear1 = nn.Conv1d(attention_dim, bottleneck, kernel_size=1)
        self.linear2 = nn.Conv1d(bottleneck, in_dim, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x_BCT = x.flatten(1, -2)
        # Without autocast, a convolution accepts only the type of its weights.
        cast_BCT = x_BCT.to(self.linear1.weight.dtype)
        if self.global_context:
            context_BK = mean_std(x_BCT, eps=self.eps)
            hidden = convolve_with_context(self.linear1, cast_BCT, context_BK)
        else:
            hidden = self.linear1(cast_BCT)
        scores_BCT = self.linear2(hidden.tanh())
        mean_and_std = attentive_mean_std(x_BCT, scores_BCT, eps=self.eps)
        return torch.cat(mean_and_std, dim=1)


PoolingName = Literal["tstp", "astp"]
POOLINGS: dict[PoolingName, Callable[..., Pooling]] = {
    "tstp": TSTP,
    "astp": ASTP,
}


class PooledModel(nn.Module):
    """Base class of models that end in a pooling and one or two linear layers.

    With `two_emb_layer` there are two, with ReLU and BatchNorm between them, and the second returns
    the embedding.
    """

    # Frames to pool; more in a subclass that pools fewer frames than it is given.
    min_frames = 2
    pool: Pooling

    def __init__(
        self,
        feat_dim: int,
        embed_dim: int,
        *,
        two_emb_layer: bool = False,
    ) -> None:
        super().__init__()
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        self.two_emb_layer = two_emb_layer

    def add_embedding_layers(self, pool: Pooling) -> None:
        """Add the pooling and the linear layers; a subclass calls it after its own layers."""
        self.pool = pool
        embed_dim = self.embed_dim
        # The names are the published ones.
        self.seg_1 = nn.Linear(pool.out_dim, embed_dim)
        if self.two_emb_layer:
            self.seg_bn_1 = nn.BatchNorm1d(embed_dim, affine=False)
            self.seg_2 = nn.Linear(embed_dim, embed_dim)

    def embed(self, x: Tensor) -> Tensor:
        """Pool maps or sequences (B, ..., T) and return embeddings (B, D)."""
        stats_BK = self.pool(keep_gradient_layout(x))
        emb_BD = self.seg_1(stats_BK)
        if not self.two_emb_layer:
            return emb_BD

        # The second layer reads the first one's output after ReLU and BatchNorm.
        hidden_BD = F.relu(emb_BD)
        hidden_BD = self.seg_bn_1(hidden_BD)
        return self.seg_2(hidden_BD)
