"""Gemini DF-ResNet: a deep, narrow ResNet that halves time once and frequency four times.

Liu, Lee, Wang, Li: "Golden Gemini Is All You Need: Finding the Sweet Spots for Speaker
Verification", IEEE/ACM TASLP 2024, arXiv 2312.03620, on the design of Liu, Chen, Wang, Wang, Han,
Qian: "DF-ResNet: Boosting Speaker Verification Performance with Depth-First Design", Interspeech
2022.

Letters: B batch, T frames (halved once on the way), F mel bins (divided by sixteen), C channels,
D embedding.
"""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.models.pooling import POOLINGS, PooledModel, PoolingName, refuse_unusable
from speakerlab.models.resnet import Bottleneck

# depth, counting the strided convolutions -> blocks per stage
STAGES: dict[int, tuple[int, int, int, int]] = {
    60: (3, 3, 9, 3),
    114: (3, 3, 27, 3),
    183: (3, 8, 45, 3),
    237: (3, 8, 63, 3),
}
WIDENING = (1, 1, 2, 4, 8)  # channels of the stem and of each stage, in `m_channels`
STRIDES = ((2, 1), (2, 2), (2, 1), (2, 1))  # (frequency, time), before each stage
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
        self.downsample_layers = nn.ModuleList([_conv_norm(1, widths[0], stride=(1, 1))])
        self.stages = nn.ModuleList()
        for before, channels, num_blocks, stride in zip(widths, widths[1:], STAGES[depth], STRIDES):
            self.downsample_layers.append(_conv_norm(before, channels, stride=stride))
            wide = EXPANSION * channels
            units = (
                Bottleneck(channels, wide, groups=wide, out_channels=channels)
                for _ in range(num_blocks)
            )
            self.stages.append(nn.Sequential(*units))
        last_bins = -(-feat_dim // 16)  # each halving rounds up
        self.add_embedding_layers(POOLINGS[pooling](widths[-1] * last_bins, eps=pool_eps))

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        x_BCFT = feats_BTF.transpose(1, 2).contiguous().unsqueeze(1)
        stem, *downsamples = self.downsample_layers
        x_BCFT = F.relu(stem(x_BCFT), inplace=True)
        for downsample, stage in zip(downsamples, self.stages):
            x_BCFT = stage(downsample(x_BCFT))
        return self.embed(x_BCFT)


def _conv_norm(in_channels: int, out_channels: int, *, stride: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
    )
