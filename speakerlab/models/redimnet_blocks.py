"""Blocks of ReDimNet over maps (B, C, F, T) and over sequences (B, C, T).

In and out: feature maps of the same shape. See redimnet.py for the paper and the names.

Letters: B batch, C channels, F frequency bins, T frames, H heads of attention.
"""

from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.models.pooling import fp32_island, widened

NUM_HEADS = 4
TIME_KERNELS = (7, 19, 31, 59)  # frames, of the convolutions before attention
NORM_EPS = 1e-6
KERNELS = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d)}  # by dimensions


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels, the second axis, of each place; statistics in fp32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        with fp32_island(x):
            var, mean = torch.var_mean(widened(x), dim=1, correction=0, keepdim=True)
            per_channel = (-1, *[1] * (x.ndim - 2))
            normal = (widened(x) - mean) * (var + NORM_EPS).rsqrt()
            return torch.addcmul(
                self.bias.view(per_channel), self.weight.view(per_channel), normal
            ).to(x.dtype)


class ResidualBlock(nn.Module):
    """Two pairs of a grouped 3x3 and a 1x1 convolution, then frequency weights where wanted.

    ReLU comes before the first normalisation, as published.
    """

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
    """Squeeze and excitation of frequency bins: each is scaled by a weight made from all means.

    The name `exitation` is that of the published checkpoints.
    """

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
        grouped = convolution(
            channels,
            channels,
            kernel_size,
            padding=kernel_size // 2,
            groups=channels // group_size,
        )
        self.dwconvs = nn.ModuleList([grouped])
        self.norm = norm(channels)
        self.pwconv1 = convolution(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pwconv1(F.gelu(self.norm(self.dwconvs[0](x))))


class TimeContext(nn.Module):
    """A residual of fewer channels: convolutions over ever longer times, then attention."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.red_dim_conv = nn.Sequential(nn.Conv1d(channels, hidden, 1), ChannelNorm(hidden))
        convolutions = (
            ConvNeXtBlock(hidden, kernel_size=kernel_size, group_size=1, ndim=1)
            for kernel_size in TIME_KERNELS
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
        self.feed_forward = nn.Sequential(
            OrderedDict(
                intermediate_dense=nn.Linear(channels, channels),
                gelu=nn.GELU(approximate="tanh"),
                output_dense=nn.Linear(channels, channels),
            )
        )
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
        self.k_proj = nn.Linear(channels, channels)
        self.v_proj = nn.Linear(channels, channels)
        self.q_proj = nn.Linear(channels, channels)
        self.out_proj = nn.Linear(channels, channels)

    def forward(self, x_BTC: Tensor) -> Tensor:
        query, key, value = (
            project(x_BTC).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y_BHTC = F.scaled_dot_product_attention(query, key, value)
        return self.out_proj(y_BHTC.transpose(1, 2).flatten(2))
