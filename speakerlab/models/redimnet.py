"""ReDimNet: one signal, treated in turn as a map of frequency and time and as a sequence.

Yakovlev, Makarov, Balykin, Malov, Okhotnikov, Torgashov: "Reshape Dimensions Network for Speaker
Recognition", Interspeech 2024, arXiv 2407.18223. The sizes, and the names and shapes of the
parameters, are those of WeSpeaker, except that the stages are numbered in one list here, and that
the first stage's only input has no weight.

Letters: B batch, T frames, C channels, F frequency bins, K = C x F, the same at every stage,
D embedding, H heads of attention.
"""

import json
from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import fp32_island, widened
from speakerlab.models.pooling import ASTP, PooledModel, named, refuse_unusable

NUM_HEADS = 4
TIME_KERNELS = (7, 19, 31, 59)  # frames, of the convolutions before attention
NORM_EPS = 1e-6
KERNELS = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d)}  # by dimensions


class StageSize(NamedTuple):
    stride: int  # divides the bins and multiplies the channels
    num_blocks: int
    widening: float  # of the channels inside the stage
    reduction: int  # of K before the time context; 0: no time context
    time_stride: int = 1  # in ReDimNet2: divides the frames, in this stage and those after it


class Size(NamedTuple):
    channels: int  # after the stem
    block: str  # "resnet", "resnet_weighted" or "convnext"
    group_size: int  # channels that a grouped convolution sees together
    stages: list[StageSize]


def read_stages(text: str) -> list[StageSize]:
    """Return the stages that a text has between commas, each with its numbers between blanks."""
    return [StageSize(*map(json.loads, numbers.split())) for numbers in text.split(",")]


_B2_STAGES = read_stages("1 2 1 12, 2 2 1 12, 1 3 1 12, 2 4 1 8, 1 4 1 8, 2 4 1 4")
_B3_STAGES = read_stages("1 6 4 32, 2 6 2 32, 1 8 2 32, 2 10 2 16, 1 10 1 16, 2 8 1 16")
_B4_STAGES = read_stages("1 4 2 48, 2 4 2 48, 1 6 2 48, 2 6 1 32, 1 8 1 24, 2 4 1 16")
_B6_STAGES = read_stages("1 4 4 32, 2 6 2 32, 1 6 2 24, 3 8 1 24, 1 8 1 16, 2 8 1 16")
SIZES: dict[str, Size] = {
    "b0": Size(10, "resnet", 1, read_stages("1 2 1 30, 2 3 2 30, 1 3 3 30, 2 4 2 10, 1 3 1 10")),
    "b1": Size(12, "convnext", 8, read_stages("1 2 1 0, 2 3 1 0, 3 4 1 12, 2 5 1 12, 2 3 1 8")),
    "b2": Size(16, "convnext", 4, _B2_STAGES),
    "b3": Size(16, "resnet_weighted", 1, _B3_STAGES),
    "b4": Size(32, "resnet_weighted", 1, _B4_STAGES),
    "b5": Size(32, "resnet_weighted", 16, _B4_STAGES),
    "b6": Size(32, "resnet", 32, _B6_STAGES),
}


class ReDimNet(PooledModel):
    """ReDimNet, published as B0 with 60 mel bins and as B1 to B6 with 72.

    `feat_dim` must be a multiple of 4 (b0), 24 (b1), 8 (b2 to b5) or 12 (b6).
    """

    def __init__(
        self,
        *,
        feat_dim: int = 72,
        embed_dim: int = 192,
        size: Literal["b0", "b1", "b2", "b3", "b4", "b5", "b6"] = "b2",
    ) -> None:
        super().__init__(feat_dim, embed_dim)
        refuse_bins(feat_dim, SIZES[size].stages, model="ReDimNet")
        self.backbone = Backbone(SIZES[size], num_bins=feat_dim)
        num_rows = SIZES[size].channels * feat_dim
        self.add_embedding_layers(ASTP(num_rows, eps=1e-7, global_context=True))

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        x_BCFT = feats_BTF.transpose(1, 2).contiguous().unsqueeze(1)
        return self.embed(self.backbone(x_BCFT))


def refuse_bins(feat_dim: int, stages: Sequence[StageSize], *, model: str) -> None:
    """Raise ValueError unless the strides of the stages divide the mel bins."""
    stride = prod(stage.stride for stage in stages)
    if feat_dim % stride or feat_dim < 1:
        raise ValueError(
            f"{model}: the strides of this size do not divide {feat_dim} mel bins; give a multiple "
            f"of {stride}"
        )


class Backbone(nn.Module):
    """The stem and the stages: (B, 1, F, T) -> (B, K, T).

    A stage's input is a weighted sum of the outputs of the stem and of all stages before it, and so
    is the result; the weights are learned, per row of K, and sum to one.
    """

    def __init__(self, size: Size, *, num_bins: int) -> None:
        super().__init__()
        channels, bins = size.channels, num_bins
        num_rows = channels * bins
        self.inputs_weights = nn.ParameterDict()
        for done in range(1, len(size.stages) + 1):
            self.inputs_weights[str(done)] = nn.Parameter(torch.zeros(1, done + 1, num_rows, 1))
        conv = nn.Conv2d(1, channels, 3, padding=1)
        self.stem = nn.Sequential(conv, ChannelNorm(channels), ToSequence())
        self.stages = nn.ModuleList()
        self.stage_channels: list[int] = []  # of the input map
        for stage in size.stages:
            self.stage_channels.append(channels)
            layers = [*_stage(stage, size, channels, bins // stage.stride), ToSequence()]
            if stage.reduction:
                layers.append(TimeContext(num_rows, stage.reduction))
            self.stages.append(nn.Sequential(*layers))
            channels, bins = channels * stage.stride, bins // stage.stride

    def forward(self, x_BCFT: Tensor) -> Tensor:
        outputs = [x_BKT := self.stem(x_BCFT)]
        for done, (stage, channels) in enumerate(zip(self.stages, self.stage_channels), 1):
            x_BCFT = x_BKT.unflatten(1, (-1, channels)).transpose(1, 2)  # inverts `ToSequence`
            outputs.append(stage(x_BCFT))
            x_BKT = weighted_sum(outputs, self.inputs_weights[str(done)])
        return x_BKT


class ToSequence(nn.Module):
    """Reshape (B, C, F, T) to (B, K, T), the channels of a bin next to each other."""

    def forward(self, x_BCFT: Tensor) -> Tensor:
        return x_BCFT.transpose(1, 2).flatten(1, 2)


def weighted_sum(outputs: list[Tensor], weights: Tensor) -> Tensor:
    """Return the sum of N outputs (B, K, T), weighted by the softmax of `weights` (1, N, K, 1).

    They are added one by one: a stack would copy all outputs at every stage.
    """
    with fp32_island(weights):
        first, *others = weights.softmax(1).unbind(1)
        return sum((share * x for share, x in zip(others, outputs[1:])), first * outputs[0])


def _stage(stage: StageSize, size: Size, channels: int, bins: int) -> list[nn.Module]:
    """Return the layers over maps: fewer bins and more channels, blocks, and back to K values."""
    out_channels, stride = channels * stage.stride, (stage.stride, 1)
    wide = int(out_channels * stage.widening)
    layers: list[nn.Module] = [nn.Conv2d(channels, wide, stride, stride=stride)]
    for _ in range(stage.num_blocks):
        if size.block == "convnext":
            block = ConvNeXtBlock(wide, kernel_size=3, group_size=size.group_size, ndim=2)
        else:
            weighted_bins = bins if size.block == "resnet_weighted" else None
            block = ResidualBlock(wide, group_size=size.group_size, weighted_bins=weighted_bins)
        layers.append(block)
    if stage.widening != 1:
        groups = out_channels // size.group_size
        narrowing = (
            nn.Conv2d(wide, out_channels, 3, padding=1, groups=groups),
            nn.BatchNorm2d(out_channels, eps=NORM_EPS),
            nn.GELU(),
            nn.Conv2d(out_channels, out_channels, 1),
        )
        layers.append(nn.Sequential(*narrowing))
    return layers


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels, the second axis, of each place; statistics in fp32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        with fp32_island(x):
            var, mean = torch.var_mean(widened(x), dim=1, correction=0, keepdim=True)
            normal = (widened(x) - mean) * (var + NORM_EPS).rsqrt()
            bias, weight = (p.view(-1, *[1] * (x.ndim - 2)) for p in (self.bias, self.weight))
            return torch.addcmul(bias, weight, normal).to(x.dtype)


class ResidualBlock(nn.Module):
    """Two pairs of a grouped 3x3 and a 1x1 convolution, then frequency weights where wanted."""

    def __init__(self, channels: int, *, group_size: int, weighted_bins: int | None) -> None:
        super().__init__()
        groups = channels // group_size
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False, groups=groups)
        self.conv1pw = nn.Conv2d(channels, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False, groups=groups)
        self.conv2pw = nn.Conv2d(channels, channels, 1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.se = nn.Identity()
        if weighted_bins is not None:
            self.se = FrequencyWeights(weighted_bins, hidden=min(64, max(channels, 32)))

    def forward(self, x_BCFT: Tensor) -> Tensor:
        y_BCFT = self.bn1(F.relu(self.conv1pw(self.conv1(x_BCFT)), inplace=True))
        y_BCFT = self.se(self.bn2(self.conv2pw(self.conv2(y_BCFT))))
        return F.relu(y_BCFT + x_BCFT, inplace=True)


class FrequencyWeights(nn.Module):
    """Squeeze and excitation of frequency bins: each is scaled by a weight made from all means."""

    def __init__(self, num_bins: int, *, hidden: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(num_bins, hidden)
        self.exitation = nn.Linear(hidden, num_bins)

    def forward(self, x_BCFT: Tensor) -> Tensor:
        mean_BF = x_BCFT.mean(dim=(1, 3))
        weight_BF = self.exitation(F.relu(self.squeeze(mean_BF))).sigmoid()
        return x_BCFT * weight_BF[:, None, :, None]


class ConvNeXtBlock(nn.Module):
    """A grouped convolution and a 1x1 one, beside a shortcut: over maps (2) or sequences (1)."""

    def __init__(
        self, channels: int, *, kernel_size: int, group_size: int, ndim: Literal[1, 2]
    ) -> None:
        super().__init__()
        convolution, norm = KERNELS[ndim]
        padding, groups = kernel_size // 2, channels // group_size
        grouped = convolution(channels, channels, kernel_size, padding=padding, groups=groups)
        self.dwconvs = nn.ModuleList([grouped])
        self.norm = norm(channels)
        self.pwconv1 = convolution(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pwconv1(F.gelu(self.norm(self.dwconvs[0](x))))


class TimeContext(nn.Module):
    """A residual of fewer channels: convolutions over ever longer times, then attention."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        hidden = max(channels // reduction // NUM_HEADS, 1) * NUM_HEADS
        self.red_dim_conv = nn.Sequential(nn.Conv1d(channels, hidden, 1), ChannelNorm(hidden))
        convolutions = (
            ConvNeXtBlock(hidden, kernel_size=size, group_size=1, ndim=1) for size in TIME_KERNELS
        )
        self.tcm = nn.Sequential(*convolutions, TransformerLayer(hidden))
        self.exp_dim_conv = nn.Conv1d(hidden, channels, 1)

    def forward(self, x_BCT: Tensor) -> Tensor:
        return x_BCT + self.exp_dim_conv(self.tcm(self.red_dim_conv(x_BCT)))


class TransformerLayer(nn.Module):
    """Self-attention and two linear layers, each normalised after its sum with its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = Attention(channels)
        self.layer_norm = nn.LayerNorm(channels, eps=NORM_EPS)
        first, last = nn.Linear(channels, channels), nn.Linear(channels, channels)
        gelu = nn.GELU(approximate="tanh")
        self.feed_forward = named(intermediate_dense=first, gelu=gelu, output_dense=last)
        self.final_layer_norm = nn.LayerNorm(channels, eps=NORM_EPS)

    def forward(self, x_BCT: Tensor) -> Tensor:
        x_BTC = x_BCT.transpose(1, 2)
        x_BTC = self.layer_norm(x_BTC + self.attention(x_BTC))
        x_BTC = self.final_layer_norm(x_BTC + self.feed_forward(x_BTC))
        return x_BTC.transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al., arXiv 1706.03762), every frame to every frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            nn.Linear(channels, channels) for _ in range(4)
        )

    def forward(self, x_BTC: Tensor) -> Tensor:
        query, key, value = (
            project(x_BTC).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y_BHTC = F.scaled_dot_product_attention(query, key, value)
        return self.out_proj(y_BHTC.transpose(1, 2).flatten(2))
