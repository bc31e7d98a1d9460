"""ResNet on log mel features: 18 to 293 layers, a 3x3 stem and no max pooling.

He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv 1512.03385, in
the form of Wang, Liang, Wang, Chen, Zhang, Xiang, Deng, Qian: "Wespeaker: A Research and Production
Oriented Speaker Embedding Learning Toolkit", ICASSP 2023, arXiv 2210.17016.

Letters: B batch, T frames, F mel bins (both divided by up to eight on the way), C channels,
D embedding.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.models.pooling import (
    POOLINGS,
    PooledModel,
    PoolingName,
    feature_map,
    refuse_unusable,
    shortcut,
)

# depth -> blocks per stage; from 50 on they are bottlenecks
STAGES: dict[int, tuple[int, int, int, int]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    221: (6, 16, 48, 3),
    293: (10, 20, 64, 3),
}


class ResidualModel(PooledModel):
    """A 3x3 stem, four residual stages, the last three halving time and frequency, and pooling."""

    min_frames = 9  # three halvings, rounding up, leave two

    def add_stages(
        self,
        make: Callable[..., nn.Module],
        m_channels: int,
        blocks: Sequence[int],
        *,
        expansion: int,
    ) -> int:
        """Add the stem and the stages; return the channels times bins to pool."""
        # The stem has no stride and no pooling, so the first stage sees all bins and frames.
        self.conv1 = nn.Conv2d(
            1,
            m_channels,
            kernel_size=3,
            padding=1,
            bias=False,
        )
        self.bn1 = nn.BatchNorm2d(m_channels)
        stages = residual_stages(
            make,
            m_channels,
            blocks,
            expansion=expansion,
        )
        # Attributes instead of a list: these are the published names.
        self.layer1 = stages[0]
        self.layer2 = stages[1]
        self.layer3 = stages[2]
        self.layer4 = stages[3]

        # The channels of a stage's output double from stage to stage.
        first_width = m_channels * expansion
        widths = [first_width * 2**stage for stage in range(4)]
        self.add_fusions(*widths)
        last_bins = math.ceil(self.feat_dim / 8)  # each of three halvings rounds up
        return widths[-1] * last_bins

    def add_fusions(self, *stage_channels: int) -> None:
        """Add the layers with which a subclass fuses its stages."""

    def maps(self, x_BCFT: Tensor) -> Tensor:
        """Return the map to pool, given the output of the stem."""
        x_BCFT = self.layer1(x_BCFT)
        x_BCFT = self.layer2(x_BCFT)
        x_BCFT = self.layer3(x_BCFT)
        return self.layer4(x_BCFT)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        x_BCFT = feature_map(feats_BTF)
        x_BCFT = self.bn1(self.conv1(x_BCFT))
        x_BCFT = F.relu(x_BCFT, inplace=True)
        x_BCFT = self.maps(x_BCFT)
        return self.embed(x_BCFT)


def residual_stages(
    make: Callable[..., nn.Module],
    m_channels: int,
    blocks: Sequence[int],
    *,
    expansion: int = 1,
) -> list[nn.Sequential]:
    """Return stages of blocks `make(in_channels, channels, stride=...)`.

    `channels` double from stage to stage; a block returns `expansion` times as many.
    """
    in_channels = m_channels
    stages: list[nn.Sequential] = []
    for stage_index, depth in enumerate(blocks):
        channels = m_channels * 2**stage_index
        stage: list[nn.Module] = []
        for block_index in range(depth):
            # The first block of each stage but the first halves bins and frames.
            halves = stage_index > 0 and block_index == 0
            stride = 2 if halves else 1
            block = make(in_channels, channels, stride=stride)
            stage.append(block)
            # The next block reads the output of this one.
            in_channels = channels * expansion
        stages.append(nn.Sequential(*stage))
    return stages


class ResNet(ResidualModel):
    """ResNet. The defaults are those of WeSpeaker's ResNet34.

    3D-Speaker's models have `two_emb_layer` and a `pool_eps` of 1e-8.
    """

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 256,
        depth: Literal[18, 34, 50, 101, 152, 221, 293] = 34,
        m_channels: int = 32,
        pooling: PoolingName = "tstp",
        pool_eps: float = 1e-7,
        two_emb_layer: bool = False,
    ) -> None:
        super().__init__(feat_dim, embed_dim, two_emb_layer=two_emb_layer)
        # As in He et al., deep networks use bottlenecks, whose layers cost less.
        block = BasicBlock if depth < 50 else Bottleneck
        in_dim = self.add_stages(
            block,
            m_channels,
            STAGES[depth],
            expansion=block.expansion,
        )
        pool = POOLINGS[pooling](in_dim, eps=pool_eps)
        self.add_embedding_layers(pool)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; the first may stride."""

    expansion = 1

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        stride: int | tuple[int, int],
    ) -> None:
        super().__init__()
        # Convolutions have no bias, because the BatchNorms after them have one.
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
        self.shortcut = shortcut(in_channels, channels, stride=stride)

    def forward(self, x_BCFT: Tensor) -> Tensor:
        y_BCFT = self.bn1(self.conv1(x_BCFT))
        y_BCFT = F.relu(y_BCFT, inplace=True)
        # In place, because the sum would be one more map of this size.
        y_BCFT = self.bn2(self.conv2(y_BCFT))
        y_BCFT += self.shortcut(x_BCFT)
        return F.relu(y_BCFT, inplace=True)


class Bottleneck(nn.Module):
    """A 3x3 convolution, which may stride and have groups, between two 1x1 ones, and a shortcut."""

    expansion = 4  # of the channels at the end, unless `out_channels` are given

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        stride: int = 1,
        groups: int = 1,
        out_channels: int | None = None,
    ) -> None:
        super().__init__()
        # Gemini DF-ResNet sets `out_channels`, because its bottlenecks are wide inside.
        out_channels = out_channels or channels * self.expansion
        # Without a bias, as in `BasicBlock`.
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(
            channels,
            channels,
            kernel_size=3,
            stride=stride,
            padding=1,
            groups=groups,
            bias=False,
        )
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = shortcut(in_channels, out_channels, stride=stride)

    def forward(self, x_BCFT: Tensor) -> Tensor:
        y_BCFT = self.bn1(self.conv1(x_BCFT))
        y_BCFT = F.relu(y_BCFT, inplace=True)
        y_BCFT = self.bn2(self.conv2(y_BCFT))
        y_BCFT = F.relu(y_BCFT, inplace=True)
        # In place, as in `BasicBlock`.
        y_BCFT = self.bn3(self.conv3(y_BCFT))
        y_BCFT += self.shortcut(x_BCFT)
        return F.relu(y_BCFT, inplace=True)
