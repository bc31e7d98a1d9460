"""SimAM-ResNet: a ResNet whose blocks weigh each place of a map by its distance from the mean.

Qin, Li, Weng, Su, Li: "Simple Attention Module Based Speaker Verification with Iterative Noisy
Label Detection", ICASSP 2022, arXiv 2110.06534; the attention is from Yang, Zhang, Li, Xie: "SimAM:
A Simple, Parameter-Free Attention Module for Convolutional Neural Networks", ICML 2021.

Letters: B batch, T frames, F mel bins (both divided by up to eight on the way), C channels,
K mean and deviation of C x F, D embedding.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import autocast_off, widened
from speakerlab.models.pooling import (
    attentive_mean_std,
    feature_map,
    keep_gradient_layout,
    named_sequential,
    refuse_unusable,
    shortcut,
)
from speakerlab.models.resnet import residual_stages

Depth = Literal[34, 100]
# depth -> blocks per stage
STAGES: dict[int, tuple[int, int, int, int]] = {
    34: (3, 4, 6, 3),
    100: (6, 16, 24, 3),
}
ATTENTION_CHANNELS = 128
VARIANCE_FLOOR = 1e-5  # of the pooled deviations
REGULARISATION = 1e-4  # lambda of SimAM


class SimAMResNet(nn.Module):
    """SimAM-ResNet (default: SimAM-ResNet34 as WeSpeaker publishes it; `depth` may be 100)."""

    min_frames = 9  # three halvings, rounding up, leave two frames for the deviation

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 256,
        depth: Depth = 34,
        m_channels: int = 64,
    ) -> None:
        super().__init__()
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        stem_conv = nn.Conv2d(1, m_channels, kernel_size=3, padding=1, bias=False)
        layers: dict[str, nn.Module] = {
            "conv1": stem_conv,
            "bn1": nn.BatchNorm2d(m_channels),
            "relu": nn.ReLU(inplace=True),
        }
        stages = residual_stages(SimAMBlock, m_channels, STAGES[depth])
        for number, stage in enumerate(stages, start=1):
            layers[f"layer{number}"] = stage
        self.front = named_sequential(**layers)
        # Each of the three halvings rounds up.
        last_bins = math.ceil(feat_dim / 8)
        self.pooling = AttentivePooling(8 * m_channels * last_bins)
        self.bottleneck = nn.Linear(self.pooling.out_dim, embed_dim)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        x_BCFT = self.front(feature_map(feats_BTF))
        # The pooling reads a sequence, in which a frame has C x F channels.
        x_BCT = keep_gradient_layout(x_BCFT).flatten(1, 2)
        stats_BK = self.pooling(x_BCT)
        return self.bottleneck(stats_BK)


class SimAMBlock(nn.Module):
    """Two 3x3 convolutions and `simam`, beside a shortcut; the first convolution may stride."""

    def __init__(self, in_channels: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(
            in_channels,
            channels,
            kernel_size=3,
            stride=stride,
            padding=1,
            bias=False,
        )
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(
            channels,
            channels,
            kernel_size=3,
            padding=1,
            bias=False,
        )
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = shortcut(in_channels, channels, stride=stride)

    def forward(self, x_BCFT: Tensor) -> Tensor:
        y_BCFT = self.bn1(self.conv1(x_BCFT))
        y_BCFT = F.relu(y_BCFT, inplace=True)
        y_BCFT = self.bn2(self.conv2(y_BCFT))
        # Before the sum, so that the shortcut passes the input on without weights.
        y_BCFT = simam(y_BCFT)
        y_BCFT = y_BCFT + self.downsample(x_BCFT)
        return F.relu(y_BCFT, inplace=True)


class AttentivePooling(nn.Module):
    """Weighted mean and deviation, (B, C, T) -> (B, 2C), weighted by a small network."""

    def __init__(self, in_dim: int) -> None:
        super().__init__()
        self.out_dim = 2 * in_dim
        # Unlike `ASTP`, with ReLU and BatchNorm between the convolutions instead of tanh.
        self.attention = nn.Sequential(
            nn.Conv1d(in_dim, ATTENTION_CHANNELS, kernel_size=1),
            nn.ReLU(inplace=True),
            nn.BatchNorm1d(ATTENTION_CHANNELS),
            nn.Conv1d(ATTENTION_CHANNELS, in_dim, kernel_size=1),
        )

    def forward(self, x_BCT: Tensor) -> Tensor:
        scores_BCT = self.attention(x_BCT)
        mean_and_std = attentive_mean_std(x_BCT, scores_BCT, eps=VARIANCE_FLOOR)
        return torch.cat(mean_and_std, dim=1)


def simam(x_BCFT: Tensor) -> Tensor:
    """Return each value times the sigmoid of its inverse energy.

    The inverse energy grows with the distance from the mean of the channel's map: it is
    (x - mean)^2 / (4 (variance + lambda)) + 1/2, with the unbiased variance over the places of the
    map, of which there are at least two. It is computed in fp32, because squares of fp16 overflow.
    """
    with autocast_off(x_BCFT):
        wide_BCFT = widened(x_BCFT)
        # torch's variance is the unbiased one unless a correction is given.
        var, mean = torch.var_mean(wide_BCFT, dim=(2, 3), keepdim=True)
        distance = (wide_BCFT - mean).square()
        scale = 4 * (var + REGULARISATION)
        inverse_energy = distance / scale + 0.5
        y_BCFT = wide_BCFT * inverse_energy.sigmoid()
        return y_BCFT.to(x_BCFT.dtype)
