"""ResNet on log mel features: 18 to 293 layers, a 3x3 stem and no max pooling.

In: feats_BTF, log mel features, fp32. Out: emb_BD.
He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv 1512.03385, in
the form of Wang, Liang, Wang, Chen, Zhang, Xiang, Deng, Qian: "Wespeaker: A Research and Production
Oriented Speaker Embedding Learning Toolkit", ICASSP 2023, arXiv 2210.17016. Names and shapes of the
parameters are those of the checkpoints that WeSpeaker and 3D-Speaker publish.

Letters: B batch, T frames, F mel bins (both divided by up to eight on the way), C channels,
D embedding.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.models.pooling import PooledModel, projection, refuse_unusable

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


class ResNet(PooledModel):
    """ResNet (defaults: ResNet34 as WeSpeaker publishes it).

    Four residual stages, the last three halving time and frequency, then a pooling (see pooling.py
    for the names and `pool_eps`). `two_emb_layer` adds ReLU, BatchNorm and a second linear layer,
    whose output is then the embedding; 3D-Speaker's have it, and a `pool_eps` of 1e-8.
    """

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 256,
        depth: int = 34,
        m_channels: int = 32,
        pooling: str = "tstp",
        pool_eps: float = 1e-7,
        two_emb_layer: bool = False,
    ) -> None:
        super().__init__(feat_dim, embed_dim)
        if depth not in STAGES:
            known = ", ".join(map(str, STAGES))
            raise ValueError(f"ResNet: there is no depth {depth}; give one of {known}")
        self.conv1 = nn.Conv2d(1, m_channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(m_channels)

        block = BasicBlock if depth < 50 else Bottleneck
        stages: list[nn.Sequential] = []
        channels = m_channels
        for i, num_blocks in enumerate(STAGES[depth]):
            blocks: list[nn.Module] = []
            for j in range(num_blocks):
                stride = 2 if i > 0 and j == 0 else 1
                blocks.append(block(channels, m_channels * 2**i, stride=stride))
                channels = m_channels * 2**i * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages

        last_bins = -(-feat_dim // 8)  # each halving rounds up
        self.add_embedding_layers(
            channels * last_bins, pooling=pooling, pool_eps=pool_eps, two=two_emb_layer
        )
        self.min_frames = 8 * (self.pool.min_frames - 1) + 1  # so does each halving of the frames

    def forward(self, feats_BTF: Tensor) -> Tensor:
        """Return embeddings (B, D) of features (B, T, F) with at least `min_frames` frames."""
        refuse_unusable(self, feats_BTF)
        x_BCFT = feats_BTF.transpose(1, 2).contiguous().unsqueeze(1)
        x_BCFT = F.relu(self.bn1(self.conv1(x_BCFT)), inplace=True)
        return self.embed(self.layer4(self.layer3(self.layer2(self.layer1(x_BCFT)))))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; the first may stride."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(in_channels, channels, stride)

    def forward(self, x_BCFT: Tensor) -> Tensor:
        y_BCFT = F.relu(self.bn1(self.conv1(x_BCFT)), inplace=True)
        y_BCFT = self.bn2(self.conv2(y_BCFT))
        return F.relu(y_BCFT.add_(self.shortcut(x_BCFT)), inplace=True)


class Bottleneck(nn.Module):
    """A 3x3 convolution, which may stride, between two 1x1 ones, and a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, *, stride: int) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = _shortcut(in_channels, out_channels, stride)

    def forward(self, x_BCFT: Tensor) -> Tensor:
        y_BCFT = F.relu(self.bn1(self.conv1(x_BCFT)), inplace=True)
        y_BCFT = F.relu(self.bn2(self.conv2(y_BCFT)), inplace=True)
        y_BCFT = self.bn3(self.conv3(y_BCFT))
        return F.relu(y_BCFT.add_(self.shortcut(x_BCFT)), inplace=True)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    """Return the identity, or a projection where shapes change."""
    if stride == 1 and in_channels == out_channels:
        return nn.Sequential()
    return projection(in_channels, out_channels, stride=stride)
