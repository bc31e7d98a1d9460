"""ReDimNet: one signal, treated in turn as a map of frequency and time and as a sequence.

Yakovlev, Makarov, Balykin, Malov, Okhotnikov, Torgashov: "Reshape Dimensions Network for Speaker
Recognition", Interspeech 2024, arXiv 2407.18223. The sizes, and the names and shapes of the
parameters, follow WeSpeaker, except that the stages are numbered in one list here, and that the
first stage's only input has no weight.

Letters: B batch, T frames, C channels, F frequency bins, K = C x F, the same at every stage,
D embedding, H heads of attention, N outputs that are summed, S hidden units of the frequency
weights.
"""

import json
from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import autocast_off, widened
from speakerlab.models.pooling import (
    ASTP,
    PooledModel,
    feature_map,
    named_sequential,
    refuse_unusable,
)

NUM_HEADS = 4
TIME_KERNELS = (7, 19, 31, 59)  # frames, of the convolutions before attention
NORM_EPS = 1e-6
# Convolution and normalisation, by the number of dimensions: 1 for sequences, 2 for maps.
KERNELS = {
    1: (nn.Conv1d, nn.BatchNorm1d),
    2: (nn.Conv2d, nn.BatchNorm2d),
}


class StageSize(NamedTuple):
    stride: int  # divides the bins and multiplies the channels
    num_blocks: int
    widening: float  # of the channels inside the stage
    reduction: int  # of K before the time context; 0: no time context
    # In ReDimNet2: divides the frames, in this stage and in the stages after it.
    time_stride: int = 1


class Size(NamedTuple):
    channels: int  # after the stem
    block: str  # "resnet", "resnet_weighted" or "convnext"
    group_size: int  # channels that a grouped convolution sees together
    stages: list[StageSize]


def read_stages(text: str) -> list[StageSize]:
    """Read stages from text: commas between stages, blanks between the numbers of `StageSize`."""
    stages: list[StageSize] = []
    for stage_text in text.split(","):
        number_texts = stage_text.split()
        # json reads integers as int, which sizes must be, and fractions as float.
        numbers = [json.loads(number_text) for number_text in number_texts]
        stages.append(StageSize(*numbers))
    return stages


# A size consists of the channels after the stem, the kind of block, the group size and the stages.
# The numbers of a stage are stride, num_blocks, widening and reduction.
_B2_STAGES = read_stages("1 2 1 12, 2 2 1 12, 1 3 1 12, 2 4 1 8, 1 4 1 8, 2 4 1 4")
_B3_STAGES = read_stages("1 6 4 32, 2 6 2 32, 1 8 2 32, 2 10 2 16, 1 10 1 16, 2 8 1 16")
_B4_STAGES = read_stages("1 4 2 48, 2 4 2 48, 1 6 2 48, 2 6 1 32, 1 8 1 24, 2 4 1 16")
_B6_STAGES = read_stages("1 4 4 32, 2 6 2 32, 1 6 2 24, 3 8 1 24, 1 8 1 16, 2 8 1 16")
SIZES: dict[str, Size] = {
    "b0": Size(
        10, "resnet", 1, read_stages("1 2 1 30, 2 3 2 30, 1 3 3 30, 2 4 2 10, 1 3 1 10")
    ),
    "b1": Size(
        12, "convnext", 8, read_stages("1 2 1 0, 2 3 1 0, 3 4 1 12, 2 5 1 12, 2 3 1 8")
    ),
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
        sizes = SIZES[size]
        refuse_bins(feat_dim, sizes.stages, model="ReDimNet")
        self.backbone = Backbone(sizes, num_bins=feat_dim)
        num_rows = sizes.channels * feat_dim
        pool = ASTP(num_rows, eps=1e-7, global_context=True)
        self.add_embedding_layers(pool)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        feats_B1FT = feature_map(feats_BTF)
        x_BKT = self.backbone(feats_B1FT)
        return self.embed(x_BKT)


def refuse_bins(
    feat_dim: int,
    stages: Sequence[StageSize],
    *,
    model: str,
) -> None:
    """Raise ValueError unless the strides of the stages divide the mel bins."""
    stride = prod(stage.stride for stage in stages)
    if feat_dim % stride or feat_dim < 1:
        raise ValueError(
            f"{model}: the strides of this size do not divide {feat_dim} mel bins; give"
            f" a multiple of {stride}"
        )


class Backbone(nn.Module):
    """The stem and the stages: (B, 1, F, T) -> (B, K, T).

    The input of a stage is a weighted sum of the outputs of the stem and of all stages before it.
    The result is the same sum over all stages. The weights are learned for each of the K rows, and
    sum to one.
    """

    def __init__(self, size: Size, *, num_bins: int) -> None:
        super().__init__()
        channels = size.channels
        bins = num_bins
        num_rows = channels * bins

        # After each stage, a weight for the stem and for each stage so far.
        self.inputs_weights = nn.ParameterDict()
        num_stages = len(size.stages)
        for number in range(1, num_stages + 1):
            num_outputs = number + 1
            # With zeros, the softmax weighs all outputs equally at first.
            weights = torch.zeros(1, num_outputs, num_rows, 1)
            self.inputs_weights[str(number)] = nn.Parameter(weights)

        conv = nn.Conv2d(1, channels, kernel_size=3, padding=1)
        self.stem = nn.Sequential(
            conv,
            ChannelNorm(channels),
            ToSequence(),
        )
        self.stages = nn.ModuleList()
        self.stage_channels: list[int] = []  # of the input map
        for stage in size.stages:
            self.stage_channels.append(channels)
            # K stays the same: as many times more channels as there are fewer bins.
            bins //= stage.stride
            layers = _stage(stage, size, channels, bins)
            layers.append(ToSequence())
            if stage.reduction:
                layers.append(TimeContext(num_rows, stage.reduction))
            stage_layers = nn.Sequential(*layers)
            self.stages.append(stage_layers)
            channels *= stage.stride

    def forward(self, x_BCFT: Tensor) -> Tensor:
        x_BKT = self.stem(x_BCFT)
        outputs = [x_BKT]
        for index, stage in enumerate(self.stages):
            # The inverse of `ToSequence`.
            channels = self.stage_channels[index]
            x_BFCT = x_BKT.unflatten(1, (-1, channels))
            x_BCFT = x_BFCT.transpose(1, 2)
            outputs.append(stage(x_BCFT))

            weights = self.inputs_weights[str(index + 1)]
            x_BKT = weighted_sum(outputs, weights)
        return x_BKT


class ToSequence(nn.Module):
    """Reshape (B, C, F, T) to (B, K, T), the channels of a bin next to each other."""

    def forward(self, x_BCFT: Tensor) -> Tensor:
        x_BFCT = x_BCFT.transpose(1, 2)
        return x_BFCT.flatten(1, 2)


def weighted_sum(outputs: list[Tensor], weights: Tensor) -> Tensor:
    """Return the sum of N outputs (B, K, T), weighted by the softmax of `weights` (1, N, K, 1).

    They are added one by one: a stack would copy all outputs at every stage.
    """
    # The shares are fp32 and so is the sum: in 16 bits, each addition would round it.
    with autocast_off(weights):
        shares_1NK1 = weights.softmax(1)
        first_share, *shares = shares_1NK1.unbind(1)
        first_output, *other_outputs = outputs
        total_BKT = first_share * first_output
        for share_1K1, output_BKT in zip(shares, other_outputs):
            total_BKT = total_BKT + share_1K1 * output_BKT
        return total_BKT


def _stage(
    stage: StageSize,
    size: Size,
    channels: int,
    bins: int,
) -> list[nn.Module]:
    """Return the layers over maps: fewer bins and more channels, blocks, and back to K values.

    bins: after the stride.
    """
    out_channels = channels * stage.stride
    wide = int(out_channels * stage.widening)
    # The kernel is as large as the stride, so each bin is read once.
    stride = (stage.stride, 1)  # of frequency and time
    strided_conv = nn.Conv2d(
        channels,
        wide,
        kernel_size=stride,
        stride=stride,
    )
    layers: list[nn.Module] = [strided_conv]
    for _ in range(stage.num_blocks):
        if size.block == "convnext":
            block = ConvNeXtBlock(
                wide,
                kernel_size=3,
                group_size=size.group_size,
                ndim=2,
            )
        else:
            block = ResidualBlock(
                wide,
                group_size=size.group_size,
                weighted_bins=bins if size.block == "resnet_weighted" else None,
            )
        layers.append(block)

    # Back to `out_channels`, and so to K values per frame.
    if stage.widening != 1:
        grouped_conv = nn.Conv2d(
            wide,
            out_channels,
            kernel_size=3,
            padding=1,
            groups=out_channels // size.group_size,
        )
        narrowing = nn.Sequential(
            grouped_conv,
            nn.BatchNorm2d(out_channels, eps=NORM_EPS),
            nn.GELU(),
            nn.Conv2d(out_channels, out_channels, kernel_size=1),
        )
        layers.append(narrowing)
    return layers


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels, the second axis, of each place; statistics in fp32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        ones_C = torch.ones(channels)
        zeros_C = torch.zeros(channels)
        self.weight = nn.Parameter(ones_C)
        self.bias = nn.Parameter(zeros_C)

    def forward(self, x: Tensor) -> Tensor:
        # Written out, because torch's LayerNorm normalises only the last axes.
        with autocast_off(x):
            var, mean = torch.var_mean(
                widened(x),
                dim=1,
                correction=0,
                keepdim=True,
            )
            inv_std = (var + NORM_EPS).rsqrt()
            normal = (widened(x) - mean) * inv_std

            # A value per channel, with an axis of length 1 for each axis after the channels.
            num_axes_after = x.ndim - 2
            per_channel = (-1,) + (1,) * num_axes_after
            bias = self.bias.view(per_channel)
            weight = self.weight.view(per_channel)
            y = torch.addcmul(bias, weight, normal)
            return y.to(x.dtype)


class ResidualBlock(nn.Module):
    """Two pairs of a grouped 3x3 and a 1x1 convolution, then optional frequency weights."""

    def __init__(
        self,
        channels: int,
        *,
        group_size: int,
        weighted_bins: int | None,
    ) -> None:
        super().__init__()
        groups = channels // group_size
        self.conv1 = nn.Conv2d(
            channels,
            channels,
            kernel_size=3,
            padding=1,
            bias=False,
            groups=groups,
        )
        self.conv1pw = nn.Conv2d(channels, channels, kernel_size=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(
            channels,
            channels,
            kernel_size=3,
            padding=1,
            bias=False,
            groups=groups,
        )
        self.conv2pw = nn.Conv2d(channels, channels, kernel_size=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.se = nn.Identity()
        if weighted_bins is not None:
            # As published: as many hidden units as channels, but at least 32 and at most 64.
            hidden = min(64, max(channels, 32))
            self.se = FrequencyWeights(weighted_bins, hidden=hidden)

    def forward(self, x_BCFT: Tensor) -> Tensor:
        # The published order is ReLU, then BatchNorm, in the first pair; the second pair has its
        # ReLU after the sum.
        y_BCFT = self.conv1(x_BCFT)
        y_BCFT = self.conv1pw(y_BCFT)
        y_BCFT = F.relu(y_BCFT, inplace=True)
        y_BCFT = self.bn1(y_BCFT)

        y_BCFT = self.conv2(y_BCFT)
        y_BCFT = self.conv2pw(y_BCFT)
        y_BCFT = self.bn2(y_BCFT)
        y_BCFT = self.se(y_BCFT)
        return F.relu(y_BCFT + x_BCFT, inplace=True)


class FrequencyWeights(nn.Module):
    """Squeeze and excitation of frequency bins: a network of all means weighs each bin."""

    def __init__(self, num_bins: int, *, hidden: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(num_bins, hidden)
        self.exitation = nn.Linear(hidden, num_bins)  # spelled as published

    def forward(self, x_BCFT: Tensor) -> Tensor:
        mean_BF = x_BCFT.mean(dim=(1, 3))
        hidden_BS = F.relu(self.squeeze(mean_BF))
        # Between 0 and 1: a bin can be suppressed, but not amplified.
        weight_BF = self.exitation(hidden_BS).sigmoid()
        weight_B1F1 = weight_BF[:, None, :, None]
        return x_BCFT * weight_B1F1


class ConvNeXtBlock(nn.Module):
    """A grouped convolution and a 1x1 convolution, beside a shortcut.

    ndim: 2 for maps, 1 for sequences.
    """

    def __init__(
        self,
        channels: int,
        *,
        kernel_size: int,
        group_size: int,
        ndim: Literal[1, 2],
    ) -> None:
        super().__init__()
        convolution, norm = KERNELS[ndim]
        grouped = convolution(
            channels,
            channels,
            kernel_size,
            padding=kernel_size // 2,
            groups=channels // group_size,
        )
        # In the published code a block may have several grouped convolutions, hence the list.
        self.dwconvs = nn.ModuleList([grouped])
        self.norm = norm(channels)
        self.pwconv1 = convolution(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dwconvs[0](x)
        hidden = self.norm(hidden)
        hidden = F.gelu(hidden)
        return x + self.pwconv1(hidden)


class TimeContext(nn.Module):
    """Adds context over time: convolutions with ever longer kernels, then attention.

    The context is computed in fewer channels and added to the input.
    """

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        # A multiple of the heads, each of at least one channel.
        channels_per_head = max(channels // reduction // NUM_HEADS, 1)
        hidden = channels_per_head * NUM_HEADS
        self.red_dim_conv = nn.Sequential(
            nn.Conv1d(channels, hidden, kernel_size=1),
            ChannelNorm(hidden),
        )
        # From a few frames to the whole recording, which only the attention sees.
        layers: list[nn.Module] = []
        for kernel_size in TIME_KERNELS:
            block = ConvNeXtBlock(
                hidden,
                kernel_size=kernel_size,
                group_size=1,
                ndim=1,
            )
            layers.append(block)
        layers.append(TransformerLayer(hidden))
        self.tcm = nn.Sequential(*layers)
        self.exp_dim_conv = nn.Conv1d(hidden, channels, kernel_size=1)

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT = self.red_dim_conv(x_BCT)
        y_BCT = self.tcm(y_BCT)
        y_BCT = self.exp_dim_conv(y_BCT)
        return x_BCT + y_BCT


class TransformerLayer(nn.Module):
    """Self-attention and two linear layers, each normalised after its sum with its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = Attention(channels)
        self.layer_norm = nn.LayerNorm(channels, eps=NORM_EPS)
        self.feed_forward = named_sequential(
            intermediate_dense=nn.Linear(channels, channels),
            gelu=nn.GELU(approximate="tanh"),
            output_dense=nn.Linear(channels, channels),
        )
        self.final_layer_norm = nn.LayerNorm(channels, eps=NORM_EPS)

    def forward(self, x_BCT: Tensor) -> Tensor:
        # Linear layers and LayerNorm read the last axis.
        x_BTC = x_BCT.transpose(1, 2)
        x_BTC = x_BTC + self.attention(x_BTC)
        x_BTC = self.layer_norm(x_BTC)
        x_BTC = x_BTC + self.feed_forward(x_BTC)
        x_BTC = self.final_layer_norm(x_BTC)
        return x_BTC.transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al., arXiv 1706.03762), every frame to every frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.k_proj = nn.Linear(channels, channels)
        self.v_proj = nn.Linear(channels, channels)
        self.q_proj = nn.Linear(channels, channels)
        self.out_proj = nn.Linear(channels, channels)

    def forward(self, x_BTC: Tensor) -> Tensor:
        # There is no positional encoding; the convolutions before the attention encode the order.
        query_BHTC = self._split_heads(self.q_proj(x_BTC))
        key_BHTC = self._split_heads(self.k_proj(x_BTC))
        value_BHTC = self._split_heads(self.v_proj(x_BTC))
        y_BHTC = F.scaled_dot_product_attention(query_BHTC, key_BHTC, value_BHTC)

        # The heads' channels come next to each other again.
        y_BTHC = y_BHTC.transpose(1, 2)
        return self.out_proj(y_BTHC.flatten(2))

    def _split_heads(self, x_BTC: Tensor) -> Tensor:
        x_BTHC = x_BTC.unflatten(-1, (NUM_HEADS, -1))
        return x_BTHC.transpose(1, 2)
