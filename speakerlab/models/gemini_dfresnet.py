"""Gemini DF-ResNet: a deep, narrow ResNet that halves time once and frequency four times.

Liu, Lee, Wang, Li: "Golden Gemini Is All You Need: Finding the Sweet Spots for Speaker
Verification", IEEE/ACM TASLP 2024, arXiv 2312.03620, on the design of Liu, Chen, Wang, Wang, Han,
Qian: "DF-ResNet: Boosting Speaker Verification Performance with Depth-First Design", Interspeech
2022.

Letters: B batch, T frames (halved once on the way), F mel bins (divided by sixteen), C channels,
D embedding.
"""

import math
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.models.pooling import (
    POOLINGS,
    PooledModel,
    PoolingName,
    feature_map,
    refuse_unusable,
)
from speakerlab.models.resnet import Bottleneck

# depth, counting the strided convolutions -> blocks per stage
STAGES: dict[int, tuple[int, int, int, int]] = {
    60: (3, 3, 9, 3),
    114: (3, 3, 27, 3),
    183: (3, 8, 45, 3),
    237: (3, 8, 63, 3),
}
WIDENING = (1, 1, 2, 4, 8)  # channels of the stem and of each stage, in `m_channels`
# (frequency, time), before each stage. The paper finds that time should be kept longer than
# frequency: the number of frames is halved only once.
STRIDES = ((2, 1), (2, 2), (2, 1), (2, 1))
EXPANSION = 4


class GeminiDFResNet(PooledModel):
    """Gemini DF-ResNet (default: the 114 layers of WeSpeaker's recipe; 60, 183 and 237 exist)."""

    min_frames = 3  # half of them, rounded up, are two

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 256,
        depth: Literal[60, 114, 183, 237] = 114,
        m_channels: int = 32,
        pooling: PoolingName = "tstp",
        pool_eps: float = 1e-7,
    ) -> None:
        super().__init__(feat_dim, embed_dim)
        widths = [m_channels * factor for factor in WIDENING]
        stem = _conv_norm(1, widths[0], stride=(1, 1))
        self.downsample_layers = nn.ModuleList([stem])
        self.stages = nn.ModuleList()
        for index, num_blocks in enumerate(STAGES[depth]):
            in_channels = widths[index]
            channels = widths[index + 1]
            downsample = _conv_norm(in_channels, channels, stride=STRIDES[index])
            self.downsample_layers.append(downsample)
            # Inverted bottlenecks: wide inside, with a convolution per channel.
            wide = EXPANSION * channels
            blocks: list[nn.Module] = []
            for _ in range(num_blocks):
                block = Bottleneck(
                    channels,
                    wide,
                    groups=wide,
                    out_channels=channels,
                )
                blocks.append(block)
            stage = nn.Sequential(*blocks)
            self.stages.append(stage)
        last_bins = math.ceil(feat_dim / 16)  # each of four halvings rounds up
        pool = POOLINGS[pooling](widths[-1] * last_bins, eps=pool_eps)
        self.add_embedding_layers(pool)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        # The first of the downsampling layers is the stem, which keeps the size.
        stem, *downsamples = self.downsample_layers
        x_BCFT = stem(feature_map(feats_BTF))
        x_BCFT = F.relu(x_BCFT, inplace=True)
        for downsample, stage in zip(downsamples, self.stages):
            x_BCFT = downsample(x_BCFT)
            x_BCFT = stage(x_BCFT)
        return self.embed(x_BCFT)


def _conv_norm(
    in_channels: int,
    out_channels: int,
    *,
    stride: tuple[int, int],
) -> nn.Sequential:
    conv = nn.Conv2d(
        in_channels,
        out_channels,
        kernel_size=3,
        stride=stride,
        padding=1,
        bias=False,
    )
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))
