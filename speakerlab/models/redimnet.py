"""ReDimNet: one signal, seen in turn as a map of frequency and time and as a sequence in time.

In: feats_BTF, log mel features, fp32. Out: emb_BD.
Yakovlev, Makarov, Balykin, Malov, Okhotnikov, Torgashov: "Reshape Dimensions Network for Speaker
Recognition", Interspeech 2024, arXiv 2407.18223. The sizes, and the names and shapes of the
parameters, are those of WeSpeaker, but for the stages, which are numbered in one list here, and for
the weight of the first stage's only input, which is always one.

Letters: B batch, T frames, C channels, F frequency bins, K = C x F, the same at every stage,
D embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from speakerlab.models.pooling import fp32_island, make_pooling, refuse_unusable
from speakerlab.models.redimnet_blocks import (
    NORM_EPS,
    NUM_HEADS,
    ChannelNorm,
    TimeContext,
    map_block,
)


@dataclass(frozen=True)
class StageSize:
    stride: int  # what the bins are divided by, and the channels multiplied
    num_blocks: int
    widening: int  # of the channels inside the stage
    reduction: int | None  # of K before the time context; None: no time context


@dataclass(frozen=True)
class Size:
    channels: int  # after the stem
    block: str  # see `map_block`
    group_size: int  # channels that a grouped convolution sees together
    stages: tuple[StageSize, ...]

    @property
    def stride(self) -> int:
        """What the number of mel bins must be a multiple of."""
        return prod(stage.stride for stage in self.stages)


def _stages(*rows: tuple[int, int, int, int | None]) -> tuple[StageSize, ...]:
    return tuple(StageSize(*row) for row in rows)


_B4_STAGES = _stages(
    (1, 4, 2, 48), (2, 4, 2, 48), (1, 6, 2, 48), (2, 6, 1, 32), (1, 8, 1, 24), (2, 4, 1, 16)
)
SIZES: dict[str, Size] = {
    "b0": Size(
        10,
        "resnet",
        1,
        _stages((1, 2, 1, 30), (2, 3, 2, 30), (1, 3, 3, 30), (2, 4, 2, 10), (1, 3, 1, 10)),
    ),
    "b1": Size(
        12,
        "convnext",
        8,
        _stages((1, 2, 1, None), (2, 3, 1, None), (3, 4, 1, 12), (2, 5, 1, 12), (2, 3, 1, 8)),
    ),
    "b2": Size(
        16,
        "convnext",
        4,
        _stages(
            (1, 2, 1, 12), (2, 2, 1, 12), (1, 3, 1, 12), (2, 4, 1, 8), (1, 4, 1, 8), (2, 4, 1, 4)
        ),
    ),
    "b3": Size(
        16,
        "resnet_weighted",
        1,
        _stages(
            (1, 6, 4, 32),
            (2, 6, 2, 32),
            (1, 8, 2, 32),
            (2, 10, 2, 16),
            (1, 10, 1, 16),
            (2, 8, 1, 16),
        ),
    ),
    "b4": Size(32, "resnet_weighted", 1, _B4_STAGES),
    "b5": Size(32, "resnet_weighted", 16, _B4_STAGES),
    "b6": Size(
        32,
        "resnet",
        32,
        _stages(
            (1, 4, 4, 32), (2, 6, 2, 32), (1, 6, 2, 24), (3, 8, 1, 24), (1, 8, 1, 16), (2, 8, 1, 16)
        ),
    ),
}


class ReDimNet(nn.Module):
    """ReDimNet, published as B0 with 60 mel bins and as B1 to B6 with 72.

    A stem and five or six stages, then attentive statistics pooling. Time is never divided.
    `feat_dim` must be a multiple of 4 (b0), 24 (b1), 8 (b2 to b5) or 12 (b6).
    """

    def __init__(
        self,
        *,
        feat_dim: int = 72,
        embed_dim: int = 192,
        size: Literal["b0", "b1", "b2", "b3", "b4", "b5", "b6"] = "b2",
    ) -> None:
        super().__init__()
        if size not in SIZES:
            raise ValueError(
                f"ReDimNet: unknown size, got {size!r}; give one of {', '.join(SIZES)}"
            )
        if feat_dim % SIZES[size].stride or feat_dim < 1:
            raise ValueError(
                f"ReDimNet: the strides of {size} do not divide the mel bins, got {feat_dim}; "
                f"give a multiple of {SIZES[size].stride}"
            )
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        self.backbone = Backbone(SIZES[size], num_bins=feat_dim)
        self.pool = make_pooling(
            "astp", SIZES[size].channels * feat_dim, eps=1e-7, global_context=True
        )
        self.min_frames = self.pool.min_frames
        self.seg_1 = nn.Linear(self.pool.out_dim, embed_dim)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        """Return embeddings (B, D) of features (B, T, F) with at least `min_frames` frames."""
        refuse_unusable(self, feats_BTF)
        x_BCFT = feats_BTF.transpose(1, 2).contiguous().unsqueeze(1)
        return self.seg_1(self.pool(self.backbone(x_BCFT)))


class Backbone(nn.Module):
    """The stem and the stages: (B, 1, F, T) -> (B, K, T).

    A stage's input is a weighted sum of the outputs of the stem and of all stages before it, and so
    is the result; the weights are learned, per row of K, and sum to one.
    """

    def __init__(self, size: Size, *, num_bins: int) -> None:
        super().__init__()
        channels, bins = size.channels, num_bins
        num_rows = channels * bins
        # By the number of stages done; the stage that is first has one input, which needs none.
        self.inputs_weights = nn.ParameterDict(
            {
                str(done): nn.Parameter(torch.zeros(1, done + 1, num_rows, 1))
                for done in range(1, len(size.stages) + 1)
            }
        )
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), ChannelNorm(channels))
        self.stages = nn.ModuleList()
        self.stage_channels: list[int] = []  # of the map that goes in
        make_block = map_block(size.block, group_size=size.group_size)
        for stage in size.stages:
            self.stage_channels.append(channels)
            out_channels, bins = channels * stage.stride, bins // stage.stride
            layers = _stage(
                stage, channels, bins=bins, make_block=make_block, group_size=size.group_size
            )
            layers.append(ToSequence())
            if stage.reduction is not None:
                layers.append(TimeContext(num_rows, context_width(num_rows, stage.reduction)))
            self.stages.append(nn.Sequential(*layers))
            channels = out_channels

    def forward(self, x_BCFT: Tensor) -> Tensor:
        outputs = [to_sequence(self.stem(x_BCFT))]
        x_BKT = outputs[0]
        for done, (stage, channels) in enumerate(zip(self.stages, self.stage_channels), 1):
            outputs.append(stage(to_map(x_BKT, channels)))
            x_BKT = weighted_sum(outputs, self.inputs_weights[str(done)])
        return x_BKT


class ToSequence(nn.Module):
    """`to_sequence` as a layer."""

    def forward(self, x_BCFT: Tensor) -> Tensor:
        return to_sequence(x_BCFT)


def to_sequence(x_BCFT: Tensor) -> Tensor:
    """(B, C, F, T) -> (B, K, T), the channels of a bin beside each other."""
    return x_BCFT.transpose(1, 2).flatten(1, 2)


def to_map(x_BKT: Tensor, channels: int) -> Tensor:
    """(B, K, T) -> (B, C, F, T), the inverse of `to_sequence`."""
    return x_BKT.unflatten(1, (-1, channels)).transpose(1, 2)


def weighted_sum(outputs: list[Tensor], weights: Tensor) -> Tensor:
    """Of N outputs (B, K, T), with the softmax of the weights (1, N, K, 1) over N.

    They are added up one by one: a stack would copy all outputs at every stage.
    """
    with fp32_island(weights):
        first, *others = weights.softmax(1).unbind(1)
        return sum((share * x for share, x in zip(others, outputs[1:])), first * outputs[0])


def context_width(num_rows: int, reduction: int) -> int:
    """Channels of a time context, for whole heads: with the published mel bins K / reduction."""
    return max(num_rows // reduction // NUM_HEADS, 1) * NUM_HEADS


def _stage(
    stage: StageSize,
    channels: int,
    *,
    bins: int,
    make_block: Callable[[int, int], nn.Module],
    group_size: int,
) -> list[nn.Module]:
    """Layers over maps: fewer bins and more channels, blocks, and no wider in the end than K."""
    out_channels = channels * stage.stride
    wide = out_channels * stage.widening
    stride = (stage.stride, 1)
    layers: list[nn.Module] = [nn.Conv2d(channels, wide, stride, stride=stride)]
    layers += [make_block(wide, bins) for _ in range(stage.num_blocks)]
    if stage.widening != 1:
        groups = out_channels // group_size
        layers.append(
            nn.Sequential(
                nn.Conv2d(wide, out_channels, 3, padding=1, groups=groups),
                nn.BatchNorm2d(out_channels, eps=NORM_EPS),
                nn.GELU(),
                nn.Conv2d(out_channels, out_channels, 1),
            )
        )
    return layers
