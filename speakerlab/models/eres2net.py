"""ERes2Net: a Res2Net with attentive fusion inside its blocks and between its stages.

In: feats_BTF, log mel features, fp32. Out: emb_BD.
Chen, Zheng, Wang, Cheng, Chen, Qi: "An Enhanced Res2Net with Local and Global Feature Fusion for
Speaker Verification", Interspeech 2023, arXiv 2305.12838. Names and shapes of the parameters are
those of the published checkpoints.

Letters: B batch, T frames, F mel bins (both divided by up to eight on the way), C channels,
D embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.models.pooling import mean_std, refuse_unusable


class ERes2Net(nn.Module):
    """ERes2Net (defaults: the published base model; `m_channels` 64, `embed_dim` 512: large).

    Four residual stages, the last three halving time and frequency. Global fusion runs beside them:
    what was fused so far is strided down and merged with the output of the next stage.
    """

    min_frames = 9  # three halvings, rounding up, leave two frames for the unbiased deviation

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 192,
        m_channels: int = 32,
        blocks: tuple[int, ...] = (3, 4, 6, 3),
        base_width: int = 32,
        scale: int = 2,
        expansion: int = 2,
    ) -> None:
        super().__init__()
        if len(blocks) != 4:
            raise ValueError(f"ERes2Net: blocks are counted per stage, got {blocks}; give four")
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        self.conv1 = nn.Conv2d(1, m_channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(m_channels)

        wide = [m_channels * expansion * 2**i for i in range(4)]  # channels after each stage
        stages: list[nn.Sequential] = []
        for i, depth in enumerate(blocks):
            units = [
                Res2Block(
                    (m_channels if i == 0 else wide[i - 1]) if j == 0 else wide[i],
                    wide[i],
                    width=m_channels * 2**i * base_width // 64,
                    scale=scale,
                    stride=2 if i > 0 and j == 0 else 1,
                    attentive=i >= 2,  # local fusion in the two deeper stages only
                )
                for j in range(depth)
            ]
            stages.append(nn.Sequential(*units))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages

        self.layer1_downsample = _halve(wide[0], wide[1])
        self.layer2_downsample = _halve(wide[1], wide[2])
        self.layer3_downsample = _halve(wide[2], wide[3])
        self.fuse_mode12 = AttentiveFusion(wide[1])
        self.fuse_mode123 = AttentiveFusion(wide[2])
        self.fuse_mode1234 = AttentiveFusion(wide[3])

        last_bins = -(-feat_dim // 8)  # each halving rounds up
        self.seg_1 = nn.Linear(2 * wide[3] * last_bins, embed_dim)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        """Embeddings (B, D) of features (B, T, F), T at least `min_frames`."""
        refuse_unusable(
            feats_BTF, name="ERes2Net", feat_dim=self.feat_dim, min_frames=self.min_frames
        )
        x_BCFT = feats_BTF.transpose(1, 2).contiguous().unsqueeze(1)
        stage1 = self.layer1(F.relu(self.bn1(self.conv1(x_BCFT)), inplace=True))
        stage2 = self.layer2(stage1)
        fused = self.fuse_mode12(stage2, self.layer1_downsample(stage1))
        stage3 = self.layer3(stage2)
        fused = self.fuse_mode123(stage3, self.layer2_downsample(fused))
        stage4 = self.layer4(stage3)
        fused = self.fuse_mode1234(stage4, self.layer3_downsample(fused))
        return self.seg_1(mean_std(fused, eps=1e-8))


class AttentiveFusion(nn.Module):
    """Weighs two maps against each other, per place and channel: x * (1 + a) + y * (1 - a).

    `a` lies in (-1, 1) and is computed from both maps.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(1, channels // 4)
        self.local_att = nn.Sequential(
            nn.Conv2d(2 * channels, hidden, 1),
            nn.BatchNorm2d(hidden),
            nn.SiLU(inplace=True),
            nn.Conv2d(hidden, channels, 1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x_BCFT: Tensor, y_BCFT: Tensor) -> Tensor:
        a_BCFT = self.local_att(torch.cat([x_BCFT, y_BCFT], dim=1)).tanh()
        return x_BCFT * (1 + a_BCFT) + y_BCFT * (1 - a_BCFT)


class Res2Block(nn.Module):
    """A bottleneck block whose middle is `scale` 3x3 convolutions, each fed the output of the last.

    A group of `width` channels joins the running output by a sum, or by `AttentiveFusion` where the
    block is `attentive`. A `stride` skips places of the input: both convolutions that read it are
    1x1, and the backward pass of a strided 1x1 convolution is slow on a CPU.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        width: int,
        scale: int,
        stride: int,
        attentive: bool,
    ) -> None:
        super().__init__()
        self.width = width
        self.stride = stride
        self.conv1 = nn.Conv2d(in_channels, width * scale, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width * scale)
        self.convs = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(scale)
        )
        self.bns = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(scale))
        num_fusions = scale - 1 if attentive else 0
        self.fuse_models = nn.ModuleList(AttentiveFusion(width) for _ in range(num_fusions))
        self.conv3 = nn.Conv2d(width * scale, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x_BCFT: Tensor) -> Tensor:
        x_BCFT = x_BCFT[:, :, :: self.stride, :: self.stride]
        groups = _clipped_relu(self.bn1(self.conv1(x_BCFT))).split(self.width, dim=1)
        outputs: list[Tensor] = []
        for i, (conv, norm) in enumerate(zip(self.convs, self.bns)):
            into = groups[i] if i == 0 else self._join(i, outputs[-1], groups[i])
            outputs.append(_clipped_relu(norm(conv(into))))
        y_BCFT = self.bn3(self.conv3(torch.cat(outputs, dim=1)))
        return _clipped_relu(y_BCFT + self.shortcut(x_BCFT))

    def _join(self, i: int, running: Tensor, group: Tensor) -> Tensor:
        return self.fuse_models[i - 1](running, group) if self.fuse_models else running + group


def _halve(in_channels: int, out_channels: int) -> nn.Conv2d:
    """Half the frames and half the bins, rounded up."""
    return nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1, bias=False)


def _clipped_relu(x: Tensor) -> Tensor:
    """ReLU with the ceiling of 20 that the published models were trained with."""
    return F.hardtanh(x, 0.0, 20.0, inplace=True)
