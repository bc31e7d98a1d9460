"""ReDimNet2: ReDimNet whose maps have fewer frames, which pays for more channels.

Yakovlev, Okhotnikov: "ReDimNet2: Scaling Speaker Verification via Time-Pooled Dimension Reshaping",
Interspeech 2026, arXiv 2603.11841. The sizes are those of the authors' recipes
(github.com/entn-at/redimnet2 at cdc8756), whose numbers of parameters are the published ones; the
sizes b0 to b5 of WeSpeaker at dfa7419 are others. Names and shapes of the parameters are the
authors', except that the stages are in one list, and that a single input has no weight.

Letters as in redimnet.py: B batch, T frames, C channels, F frequency bins, K = C x F, D embedding.
"""

from functools import partial
from math import gcd, prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from speakerlab.core.full_precision import fp32_island, widened
from speakerlab.models.pooling import ASTP, refuse_unusable
from speakerlab.models.redimnet import (
    NORM_EPS,
    ChannelNorm,
    ResidualBlock,
    StageSize,
    TimeContext,
    ToSequence,
    read_stages,
    refuse_bins,
    weighted_sum,
)


class Size(NamedTuple):
    channels: int  # after the stem
    out_channels: int  # of the last map; 0: as many as the last stage has
    stages: list[StageSize]


def _size(channels: int, out_channels: int, text: str) -> Size:
    return Size(channels, out_channels, read_stages(text))


_B3_STAGES = "1 2 4 24 1, 2 3 3 24 1, 1 4 2 24 2, 2 5 1 24 1, 1 4 1 24 2, 2 3 1 24 1"
_B5_STAGES = "1 2 4 48 1, 2 3 3 48 1, 1 4 2 48 2, 2 5 1 48 1, 1 4 1 32 2, 2 3 1 32 1"
_B6_STAGES = "1 3 3 64 1, 2 4 2 64 1, 1 5 2 48 2, 2 5 1 48 1, 1 4 0.75 32 2, 2 3 0.5 24 1"
SIZES: dict[str, Size] = {
    "b0": _size(12, 64, "1 2 2 36 1, 2 3 1 36 1, 1 4 1 36 2, 2 5 1 36 1, 1 4 1 18 2, 2 3 1 18 1"),
    "b1": _size(16, 0, "1 2 2 32 1, 2 3 1 32 1, 1 4 1 32 2, 2 5 1 32 1, 1 4 1 16 2, 2 3 1 16 1"),
    "b2": _size(20, 0, "1 2 2 40 1, 2 3 1 30 1, 1 4 1 30 2, 3 5 1 20 1, 1 4 1 20 2, 2 3 1 10 1"),
    "b3": _size(24, 0, _B3_STAGES),
    "b4": _size(32, 0, _B3_STAGES),
    "b5": _size(48, 256, _B5_STAGES),
    "b6": _size(64, 224, _B6_STAGES),
}


class ReDimNet2(nn.Module):
    """ReDimNet2, published with 72 mel bins; as published, it ignores the last one to three frames
    of a number that is no multiple of 4.

    `feat_dim` must be a multiple of 8, for b2 of 12. group_norm: normalise every output that later
    stages sum, as in the authors' recipes but not in their weights for VoxCeleb2. dual: let them
    also sum what a stage gives before its time context; the authors introduced both for VoxBlink2.
    """

    def __init__(
        self,
        *,
        feat_dim: int = 72,
        embed_dim: int = 192,
        size: Literal["b0", "b1", "b2", "b3", "b4", "b5", "b6"] = "b0",
        group_norm: bool = False,
        dual: bool = False,
    ) -> None:
        super().__init__()
        self.feat_dim, self.embed_dim = feat_dim, embed_dim
        refuse_bins(feat_dim, SIZES[size].stages, model="ReDimNet2")
        self.min_frames = prod(stage.time_stride for stage in SIZES[size].stages)
        self.backbone = Backbone(SIZES[size], num_bins=feat_dim, group_norm=group_norm, dual=dual)
        self.pool = ASTP(self.backbone.out_dim, eps=1e-7, global_context=True)
        self.bn = nn.BatchNorm1d(self.pool.out_dim)
        self.linear = nn.Linear(self.pool.out_dim, embed_dim)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        groups_BGFT = feats_BTF.unfold(1, self.min_frames, self.min_frames)  # without the rest
        x_BFT = groups_BGFT.transpose(1, 2).flatten(2)
        return self.linear(self.bn(self.pool(self.backbone(x_BFT.unsqueeze(1)))))


class Backbone(nn.Module):
    """The stem, the stages and the last map: (B, 1, F, T) -> (B, out_dim, T)."""

    def __init__(self, size: Size, *, num_bins: int, group_norm: bool, dual: bool) -> None:
        super().__init__()
        channels, bins, num_inputs, time_stride = size.channels, num_bins, 1, 1
        num_rows = channels * bins
        norm = partial(RowNorm, channels, num_rows) if group_norm else nn.Identity
        conv = nn.Conv2d(1, channels, 3, padding=1)
        self.stem = nn.Sequential(conv, ChannelNorm(channels), ToSequence())
        self.stem_gnorm = norm()
        self.stages = nn.ModuleList()
        for stage in size.stages:
            time_stride *= stage.time_stride
            inputs = Aggregate(num_inputs, num_rows), ToMap(channels)
            norms: list[nn.Module] = [norm() for _ in range(1 + dual)]
            self.stages.append(Stage(stage, inputs, channels, num_rows, time_stride, norms))
            channels, bins = channels * stage.stride, bins // stage.stride
            num_inputs += len(norms)
        self.fin_wght1d = Aggregate(num_inputs, num_rows)
        self.to_map, self.head = ToMap(channels), nn.Identity()
        if size.out_channels:
            self.head = nn.Conv2d(channels, size.out_channels, 1)
        self.out_dim = (size.out_channels or channels) * bins

    def forward(self, x_BCFT: Tensor) -> Tensor:
        outputs: list[Tensor] = [self.stem_gnorm(self.stem(x_BCFT))]
        for stage in self.stages:
            outputs += stage(outputs)
        return self.head(self.to_map(self.fin_wght1d(outputs))).flatten(1, 2)


class Stage(nn.Module):
    """Blocks over a map of fewer bins and frames, then the time context.

    In: the outputs before, (B, K, T) each. Out: those of this stage, with as many frames.
    """

    def __init__(
        self,
        stage: StageSize,
        inputs: tuple[nn.Module, nn.Module],
        channels: int,
        num_rows: int,
        time_stride: int,
        norms: list[nn.Module],
    ) -> None:
        super().__init__()
        self.time_stride = time_stride
        out_channels, stride = channels * stage.stride, (stage.stride, time_stride)
        wide = int(out_channels * stage.widening)
        layers: list[nn.Module] = [
            nn.Conv2d(channels, wide, stride, stride=stride, groups=gcd(channels, wide))
        ]
        for _ in range(stage.num_blocks):
            layers.append(ResidualBlock(wide, group_size=1, weighted_bins=None))
        if wide != out_channels:
            norm = nn.BatchNorm2d(out_channels, eps=NORM_EPS)
            layers.append(nn.Sequential(nn.Conv2d(wide, out_channels, 1), norm))
        self.pre = nn.Sequential(*inputs, *layers, ToSequence())
        self.context = TimeContext(num_rows, stage.reduction)
        self.norms = nn.ModuleList(norms)

    def forward(self, outputs: list[Tensor]) -> list[Tensor]:
        x_BKT = self.pre(outputs)
        parts = [x_BKT, self.context(x_BKT)][-len(self.norms) :]
        return [norm(self.repeated(part)) for norm, part in zip(self.norms, parts)]

    def repeated(self, x_BKT: Tensor) -> Tensor:
        """Repeat each frame, so that there are as many as before the stage."""
        return x_BKT.unsqueeze(-1).expand(-1, -1, -1, self.time_stride).flatten(2)


class Aggregate(nn.Module):
    """Weighted sum of N outputs (B, K, T), with a learned weight per row; one is left as it is."""

    def __init__(self, num_inputs: int, num_rows: int) -> None:
        super().__init__()
        weights = nn.Parameter(torch.zeros(1, num_inputs, num_rows, 1))
        self.w = weights if num_inputs > 1 else None

    def forward(self, outputs: list[Tensor]) -> Tensor:
        return outputs[0] if self.w is None else weighted_sum(outputs, self.w)


class ToMap(nn.Module):
    """Reshape (B, K, T) to (B, C, F, T): inverts `ToSequence`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x_BKT: Tensor) -> Tensor:
        return x_BKT.unflatten(1, (-1, self.channels)).transpose(1, 2)


class RowNorm(nn.GroupNorm):
    """GroupNorm over the rows of (B, K, T), its statistics in fp32."""

    def forward(self, input: Tensor) -> Tensor:
        with fp32_island(input):
            return super().forward(widened(input)).to(input.dtype)
