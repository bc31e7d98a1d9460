"""ECAPA-TDNN as WeSpeaker publishes it.

In: feats_BTF, log mel features, fp32. Out: emb_BD.
Desplanques, Thienpondt, Demuynck: "ECAPA-TDNN: Emphasized Channel Attention, Propagation and
Aggregation in TDNN Based Speaker Verification", Interspeech 2020, arXiv 2005.07143, in the form of
Wang et al.: "Wespeaker: A Research and Production Oriented Speaker Embedding Learning Toolkit",
ICASSP 2023, arXiv 2210.17016.

Unlike the network of ecapa_tdnn.py it pads with zeros, passes on the last channel group instead of
the first, aggregates to 1536 channels at any width, and has no BatchNorm after the aggregation or
in the attention. Names and shapes of the parameters are the published ones.

Letters: B batch, T frames, F mel bins, C channels, D embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.models.ecapa_tdnn import DILATIONS, refuse_scale
from speakerlab.models.pooling import make_pooling, refuse_unusable


class ECAPATDNNWeSpeaker(nn.Module):
    """ECAPA-TDNN of WeSpeaker (`channels` 512 or 1024; with `global_context` its GLOB variants).

    `emb_bn` adds a BatchNorm to the embedding, as in its self-supervised recipes.
    """

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 192,
        channels: int = 512,
        scale: int = 8,
        squeezed_channels: int = 128,
        stats_channels: int = 1536,
        pooling: str = "astp",
        pool_eps: float = 1e-7,
        global_context: bool = False,
        emb_bn: bool = False,
    ) -> None:
        super().__init__()
        refuse_scale(channels, scale)
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        self.layer1 = TimeDelay(feat_dim, channels, kernel=5)
        self.layer2, self.layer3, self.layer4 = (
            Block(channels, dilation=dilation, scale=scale, squeezed_channels=squeezed_channels)
            for dilation in DILATIONS
        )
        self.conv = nn.Conv1d(len(DILATIONS) * channels, stats_channels, 1)
        self.pool = make_pooling(
            pooling, stats_channels, eps=pool_eps, global_context=global_context
        )
        self.min_frames = self.pool.min_frames
        self.bn = nn.BatchNorm1d(self.pool.out_dim)
        self.linear = nn.Linear(self.pool.out_dim, embed_dim)
        self.bn2 = nn.BatchNorm1d(embed_dim) if emb_bn else nn.Identity()

    def forward(self, feats_BTF: Tensor) -> Tensor:
        """Return embeddings (B, D) of features (B, T, F) with at least `min_frames` frames."""
        refuse_unusable(self, feats_BTF)
        out1 = self.layer1(feats_BTF.transpose(1, 2))
        out2 = self.layer2(out1)
        out3 = self.layer3(out2)
        out4 = self.layer4(out3)
        x_BCT = F.relu(self.conv(torch.cat([out2, out3, out4], dim=1)), inplace=True)
        return self.bn2(self.linear(self.bn(self.pool(x_BCT))))


class TimeDelay(nn.Module):
    """Convolution over time that keeps the number of frames by zeros, ReLU, BatchNorm."""

    def __init__(self, in_channels: int, out_channels: int, *, kernel: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, padding=kernel // 2)
        self.bn = nn.BatchNorm1d(out_channels)

    def forward(self, x_BCT: Tensor) -> Tensor:
        return self.bn(F.relu(self.conv(x_BCT), inplace=True))


class Block(nn.Module):
    """Residual block: 1x1 layer, Res2Net split, 1x1 layer and squeeze-excitation."""

    def __init__(self, channels: int, *, dilation: int, scale: int, squeezed_channels: int) -> None:
        super().__init__()
        self.se_res2block = nn.Sequential(
            TimeDelay(channels, channels),
            Res2Split(channels, dilation=dilation, scale=scale),
            TimeDelay(channels, channels),
            SqueezeExcitation(channels, squeezed_channels),
        )

    def forward(self, x_BCT: Tensor) -> Tensor:
        return x_BCT + self.se_res2block(x_BCT)


class Res2Split(nn.Module):
    """Channels in `scale` groups: the last is passed on, each other is convolved in turn."""

    def __init__(self, channels: int, *, dilation: int, scale: int) -> None:
        super().__init__()
        width = channels // scale
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, 3, dilation=dilation, padding=dilation)
            for _ in range(scale - 1)
        )
        self.bns = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(scale - 1))

    def forward(self, x_BCT: Tensor) -> Tensor:
        *groups, last = x_BCT.chunk(len(self.convs) + 1, dim=1)
        outputs: list[Tensor] = []
        for i, (conv, norm, group) in enumerate(zip(self.convs, self.bns, groups)):
            into_BCT = group if i == 0 else group + outputs[-1]
            outputs.append(norm(F.relu(conv(into_BCT), inplace=True)))
        return torch.cat([*outputs, last], dim=1)


class SqueezeExcitation(nn.Module):
    """Weighs the channels of an utterance by a small network of their means."""

    def __init__(self, channels: int, squeezed_channels: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(channels, squeezed_channels)
        self.linear2 = nn.Linear(squeezed_channels, channels)

    def forward(self, x_BCT: Tensor) -> Tensor:
        weight_BC = self.linear2(F.relu(self.linear1(x_BCT.mean(-1)))).sigmoid()
        return x_BCT * weight_BC.unsqueeze(-1)
