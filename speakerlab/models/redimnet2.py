"""ReDimNet2: ReDimNet with fewer frames in its maps, which allows more channels.

Yakovlev, Okhotnikov: "ReDimNet2: Scaling Speaker Verification via Time-Pooled Dimension Reshaping",
Interspeech 2026, arXiv 2603.11841. The sizes come from the authors' recipes
(github.com/entn-at/redimnet2 at cdc8756), whose numbers of parameters match the published ones; the
sizes b0 to b5 of WeSpeaker at dfa7419 differ. Names and shapes of the parameters follow the
authors' code, except that the stages are in one list, and that a single input has no weight.

Letters as in redimnet.py: B batch, T frames, C channels, F frequency bins, K = C x F, D embedding;
also G groups of frames, R repetitions of a frame, S pooled statistics.
"""

from functools import partial
from math import gcd, prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from speakerlab.core.full_precision import autocast_off, widened
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


# A size consists of the channels after the stem, those of the last map (0: as many as the last
# stage has) and the stages. The numbers of a stage are stride, num_blocks, widening, reduction and
# time_stride.
_B3_STAGES = "1 2 4 24 1, 2 3 3 24 1, 1 4 2 24 2, 2 5 1 24 1, 1 4 1 24 2, 2 3 1 24 1"
_B5_STAGES = "1 2 4 48 1, 2 3 3 48 1, 1 4 2 48 2, 2 5 1 48 1, 1 4 1 32 2, 2 3 1 32 1"
_B6_STAGES = (
    "1 3 3 64 1, 2 4 2 64 1, 1 5 2 48 2, 2 5 1 48 1, 1 4 0.75 32 2, 2 3 0.5 24 1"
)
SIZES: dict[str, Size] = {
    "b0": _size(
        12, 64, "1 2 2 36 1, 2 3 1 36 1, 1 4 1 36 2, 2 5 1 36 1, 1 4 1 18 2, 2 3 1 18 1"
    ),
    "b1": _size(
        16, 0, "1 2 2 32 1, 2 3 1 32 1, 1 4 1 32 2, 2 5 1 32 1, 1 4 1 16 2, 2 3 1 16 1"
    ),
    "b2": _size(
        20, 0, "1 2 2 40 1, 2 3 1 30 1, 1 4 1 30 2, 3 5 1 20 1, 1 4 1 20 2, 2 3 1 10 1"
    ),
    "b3": _size(24, 0, _B3_STAGES),
    "b4": _size(32, 0, _B3_STAGES),
    "b5": _size(48, 256, _B5_STAGES),
    "b6": _size(64, 224, _B6_STAGES),
}


class ReDimNet2(nn.Module):
    """ReDimNet2, published with 72 mel bins.

    As published, it ignores the last one to three frames if their number is no multiple of 4.
    `feat_dim` must be a multiple of 8, for b2 of 12. group_norm: normalise every output that later
    stages sum. dual: later stages also sum the output of a stage before its time context. The
    authors introduced both for VoxBlink2; their weights for VoxCeleb2 have no group norm, unlike
    their recipes.
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
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        sizes = SIZES[size]
        refuse_bins(feat_dim, sizes.stages, model="ReDimNet2")
        # In the last stages, so many frames become one.
        time_strides = [stage.time_stride for stage in sizes.stages]
        self.min_frames = prod(time_strides)
        self.backbone = Backbone(
            sizes,
            num_bins=feat_dim,
            group_norm=group_norm,
            dual=dual,
        )
        self.pool = ASTP(self.backbone.out_dim, eps=1e-7, global_context=True)
        stats_dim = self.pool.out_dim
        self.bn = nn.BatchNorm1d(stats_dim)
        self.linear = nn.Linear(stats_dim, embed_dim)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        # Whole groups of frames, so that every stride divides them.
        group_frames = self.min_frames
        groups_BGFT = feats_BTF.unfold(1, size=group_frames, step=group_frames)
        groups_BFGT = groups_BGFT.transpose(1, 2)
        x_BFT = groups_BFGT.flatten(2)

        map_BKT = self.backbone(x_BFT.unsqueeze(1))
        stats_BS = self.pool(map_BKT)
        stats_BS = self.bn(stats_BS)
        return self.linear(stats_BS)


class Backbone(nn.Module):
    """The stem, the stages and the last map: (B, 1, F, T) -> (B, out_dim, T)."""

    def __init__(
        self,
        size: Size,
        *,
        num_bins: int,
        group_norm: bool,
        dual: bool,
    ) -> None:
        super().__init__()
        channels = size.channels
        bins = num_bins
        num_inputs = 1  # of the next stage: the stem and the outputs of the stages
        time_stride = 1
        num_rows = channels * bins
        make_norm = nn.Identity  # which has no parameters
        if group_norm:
            # In all stages, there are as many groups as the stem has channels.
            make_norm = partial(RowNorm, num_groups=channels, num_channels=num_rows)

        conv = nn.Conv2d(1, channels, kernel_size=3, padding=1)
        self.stem = nn.Sequential(
            conv,
            ChannelNorm(channels),
            ToSequence(),
        )
        self.stem_gnorm = make_norm()
        self.stages = nn.ModuleList()
        # A dual stage also returns its output before the time context.
        num_outputs = 2 if dual else 1
        for stage in size.stages:
            time_stride *= stage.time_stride
            aggregate = Aggregate(num_inputs, num_rows)
            norms: list[nn.Module] = [make_norm() for _ in range(num_outputs)]
            new_stage = Stage(
                stage,
                inputs=(aggregate, ToMap(channels)),
                channels=channels,
                num_rows=num_rows,
                time_stride=time_stride,
                norms=norms,
            )
            self.stages.append(new_stage)
            channels *= stage.stride
            bins //= stage.stride
            num_inputs += num_outputs

        # The names of the last layers are the published ones.
        self.fin_wght1d = Aggregate(num_inputs, num_rows)
        self.to_map = ToMap(channels)
        self.head = nn.Identity()
        out_channels = channels
        if size.out_channels:
            out_channels = size.out_channels
            self.head = nn.Conv2d(channels, out_channels, kernel_size=1)
        self.out_dim = out_channels * bins

    def forward(self, x_BCFT: Tensor) -> Tensor:
        x_BKT = self.stem(x_BCFT)
        x_BKT = self.stem_gnorm(x_BKT)
        outputs: list[Tensor] = [x_BKT]
        # A stage reads all outputs so far, and appends its own.
        for stage in self.stages:
            outputs += stage(outputs)

        x_BKT = self.fin_wght1d(outputs)
        x_BCFT = self.to_map(x_BKT)
        x_BCFT = self.head(x_BCFT)
        return x_BCFT.flatten(1, 2)


class Stage(nn.Module):
    """Blocks over a map of fewer bins and frames, then the time context.

    In: the outputs of the stem and of the stages before, (B, K, T) each. Out: one or, if the model
    is dual, two outputs of this stage, with as many frames.
    """

    def __init__(
        self,
        stage: StageSize,
        *,
        inputs: tuple[nn.Module, nn.Module],
        channels: int,
        num_rows: int,
        time_stride: int,
        norms: list[nn.Module],
    ) -> None:
        super().__init__()
        self.time_stride = time_stride
        out_channels = channels * stage.stride
        wide = int(out_channels * stage.widening)
        # The stride over time includes the strides of all stages so far, because every stage reads
        # outputs with all frames.
        stride = (stage.stride, time_stride)
        # The largest number of groups that divides the channels on both sides.
        strided_conv = nn.Conv2d(
            channels,
            wide,
            kernel_size=stride,
            stride=stride,
            groups=gcd(channels, wide),
        )
        layers: list[nn.Module] = [strided_conv]
        for _ in range(stage.num_blocks):
            block = ResidualBlock(wide, group_size=1, weighted_bins=None)
            layers.append(block)
        # Back to `out_channels`, and so to K values per frame.
        if wide != out_channels:
            norm = nn.BatchNorm2d(out_channels, eps=NORM_EPS)
            narrowing_conv = nn.Conv2d(wide, out_channels, kernel_size=1)
            layers.append(nn.Sequential(narrowing_conv, norm))
        # In the published names, the sum of the inputs is the first layer of `pre`.
        self.pre = nn.Sequential(*inputs, *layers, ToSequence())
        self.context = TimeContext(num_rows, stage.reduction)
        self.norms = nn.ModuleList(norms)

    def forward(self, outputs: list[Tensor]) -> list[Tensor]:
        before_BKT = self.pre(outputs)
        after_BKT = self.context(before_BKT)
        # With two norms the model is dual; with one, only the output after the context counts.
        is_dual = len(self.norms) == 2
        stage_outputs = [before_BKT, after_BKT] if is_dual else [after_BKT]

        normalised: list[Tensor] = []
        for norm, output_BKT in zip(self.norms, stage_outputs):
            # Outputs can be summed only if all have the same number of frames.
            repeated_BKT = self.repeated(output_BKT)
            normalised.append(norm(repeated_BKT))
        return normalised

    def repeated(self, x_BKT: Tensor) -> Tensor:
        """Repeat each frame, so that there are as many as before the stage."""
        x_BKT1 = x_BKT.unsqueeze(-1)
        x_BKTR = x_BKT1.expand(-1, -1, -1, self.time_stride)
        return x_BKTR.flatten(2)


class Aggregate(nn.Module):
    """Weighted sum of N outputs (B, K, T), with a learned weight per row; a single one stays."""

    def __init__(self, num_inputs: int, num_rows: int) -> None:
        super().__init__()
        # The softmax of a single weight is 1, so a single input has none.
        self.w: nn.Parameter | None = None
        if num_inputs > 1:
            weights = torch.zeros(1, num_inputs, num_rows, 1)
            self.w = nn.Parameter(weights)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        if self.w is None:
            return outputs[0]
        return weighted_sum(outputs, self.w)


class ToMap(nn.Module):
    """Reshape (B, K, T) to (B, C, F, T): inverts `ToSequence`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x_BKT: Tensor) -> Tensor:
        x_BFCT = x_BKT.unflatten(1, (-1, self.channels))
        return x_BFCT.transpose(1, 2)


class RowNorm(nn.GroupNorm):
    """GroupNorm over the rows of (B, K, T), its statistics in fp32."""

    def forward(self, input: Tensor) -> Tensor:
        with autocast_off(input):
            output = super().forward(widened(input))
            return output.to(input.dtype)
