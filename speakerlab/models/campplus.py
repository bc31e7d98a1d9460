"""CAM++: a densely connected TDNN whose layers are masked by their context.

In: feats_BTF, log mel features, fp32. Out: emb_BD.
Wang, Zheng, Chen, Cheng, Chen: "CAM++: A Fast and Efficient Network for Speaker Verification Using
Context-Aware Masking", Interspeech 2023, arXiv 2303.00332. Names and shapes of the parameters are
those of the published checkpoints.

Letters: B batch, T frames (halved by the first TDNN layer), F mel bins, C channels, S segments,
D embedding.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.models.batchnorm import BatchNorm2d
from speakerlab.models.dense import append_rows, can_append, is_rows, mix_rows, norm_relu
from speakerlab.models.layout import hold_layout, skip_places
from speakerlab.models.pooling import (
    mean_std,
    refuse_unusable,
    segment_context,
    segment_members,
    spread_segments,
)

SEGMENT_FRAMES = 100  # of the halved rate: 2 s with a 10-ms shift


class CAMPPlus(nn.Module):
    """CAM++ (defaults: the published 7.2 M parameters).

    A 2-D residual `head` divides the frequency axis by eight; what is left is stacked into channels
    and goes through one strided TDNN layer, dense blocks that each end in a halving `transit`, and
    statistics pooling, of the deviation sqrt(var + pool_eps) (0 in 3D-Speaker, 1e-7 in WeSpeaker).
    `memory_efficient` recomputes part of each dense layer in the backward pass (not where a dense
    block has to take its plain formulation, see dense.py).
    """

    min_frames = 3  # the shortest input that leaves two frames for the unbiased deviation

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 512,
        init_channels: int = 128,
        growth_rate: int = 32,
        bn_size: int = 4,
        blocks: tuple[int, ...] = (12, 24, 16),
        kernel_sizes: tuple[int, ...] = (3, 3, 3),
        dilations: tuple[int, ...] = (1, 2, 2),
        head_channels: int = 32,
        head_blocks: tuple[int, ...] = (2, 2),
        pool_eps: float = 0.0,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        if not len(blocks) == len(kernel_sizes) == len(dilations):
            raise ValueError(
                "CAMPPlus: blocks, kernel_sizes and dilations differ in length, got "
                f"{blocks}, {kernel_sizes}, {dilations}; give one of each per block"
            )
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        self.head = _head(head_channels, head_blocks)
        head_bins = -(-feat_dim // 2 ** (len(head_blocks) + 1))  # each halving rounds up
        channels = init_channels
        layers = OrderedDict[str, nn.Module](
            tdnn=_tdnn(head_channels * head_bins, channels, kernel_size=5, stride=2)
        )
        for i, (depth, kernel_size, dilation) in enumerate(zip(blocks, kernel_sizes, dilations), 1):
            block = DenseBlock()
            for j in range(1, depth + 1):
                block[f"tdnnd{j}"] = DenseLayer(
                    channels,
                    growth_rate=growth_rate,
                    bottleneck=bn_size * growth_rate,
                    kernel_size=kernel_size,
                    dilation=dilation,
                    memory_efficient=memory_efficient,
                )
                channels += growth_rate
            layers[f"block{i}"] = block
            layers[f"transit{i}"] = _transit(channels, channels // 2)
            channels //= 2
        layers["out_nonlinear"] = _norm_relu(channels)
        layers["stats"] = Statistics(eps=pool_eps)
        layers["dense"] = _dense(2 * channels, embed_dim)
        self.xvector = nn.Sequential(layers)
        self.apply(_init_weights)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        """Embeddings (B, D) of features (B, T, F), T at least `min_frames`."""
        refuse_unusable(
            feats_BTF, name="CAMPPlus", feat_dim=self.feat_dim, min_frames=self.min_frames
        )
        x_BCFT = hold_layout(self.head(feats_BTF.transpose(1, 2).contiguous().unsqueeze(1)))
        return self.xvector(x_BCFT.flatten(1, 2)).squeeze(-1)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; `stride` is along frequency only.

    The shortcut skips bins before its 1x1 convolution and not by a stride of it: the same values,
    and the backward pass of a strided 1x1 convolution is slow on a CPU.
    """

    def __init__(self, channels: int, *, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv1 = nn.Conv2d(channels, channels, 3, stride=(stride, 1), padding=1, bias=False)
        self.bn1 = BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, channels, 1, bias=False), BatchNorm2d(channels)
            )

    def forward(self, x_BCFT: Tensor) -> Tensor:
        y_BCFT = F.relu(self.bn1(self.conv1(x_BCFT)), inplace=True)
        y_BCFT = self.bn2(self.conv2(y_BCFT))
        kept_BCFT = skip_places(x_BCFT, bins=self.stride, frames=1)
        return F.relu(y_BCFT.add_(self.shortcut(kept_BCFT)), inplace=True)


class ContextMask(nn.Module):
    """A dilated convolution over time, each channel scaled by a mask made from its context.

    The context of a frame is the mean of the utterance plus the mean of the frame's segment. It is
    the same for all frames of a segment, and so is the mask, which is therefore computed once per
    segment: a hundredth of the work of the per-frame formulation, and the same values.
    """

    wide_layers = ("linear1", "linear2")  # so little work that 16 bits would only cost time

    def __init__(
        self, in_channels: int, out_channels: int, *, kernel_size: int, dilation: int
    ) -> None:
        super().__init__()
        self.linear_local = nn.Conv1d(
            in_channels,
            out_channels,
            kernel_size,
            padding=kernel_size // 2 * dilation,
            dilation=dilation,
            bias=False,
        )
        self.linear1 = nn.Conv1d(in_channels, in_channels // 2, 1)
        self.linear2 = nn.Conv1d(in_channels // 2, out_channels, 1)

    def forward(self, x_BCT: Tensor, members_TS: Tensor) -> Tensor:
        context_BCS = segment_context(x_BCT, members_TS)
        hidden_BCS = F.relu(self.linear1(context_BCS), inplace=True)
        mask_BCS = self.linear2(hidden_BCS).sigmoid()
        return self.linear_local(x_BCT) * spread_segments(mask_BCS, members_TS)


class DenseLayer(nn.Module):
    """Bottleneck to `bottleneck` channels, then a masked convolution to `growth_rate` channels."""

    def __init__(
        self,
        in_channels: int,
        *,
        growth_rate: int,
        bottleneck: int,
        kernel_size: int,
        dilation: int,
        memory_efficient: bool,
    ) -> None:
        super().__init__()
        self.memory_efficient = memory_efficient
        self.nonlinear1 = _norm_relu(in_channels)
        self.linear1 = nn.Conv1d(in_channels, bottleneck, 1, bias=False)
        self.nonlinear2 = _norm_relu(bottleneck)
        self.cam_layer = ContextMask(
            bottleneck, growth_rate, kernel_size=kernel_size, dilation=dilation
        )

    def forward(self, x_BCT: Tensor, members_TS: Tensor) -> Tensor:
        """The plain formulation; dense.py has the one that is computed where it can be."""
        hidden_BCT = self.nonlinear2(self.linear1(self.nonlinear1(x_BCT)))
        return self.cam_layer(hidden_BCT, members_TS)


class DenseBlock(nn.ModuleDict):
    """Named `DenseLayer`s that each see the input and the outputs of all layers before them."""

    def forward(self, x_BCT: Tensor) -> Tensor:
        layers: list[Any] = list(self.values())
        if can_append(layers, x_BCT):
            return append_rows(layers, x_BCT, segment_frames=SEGMENT_FRAMES)
        members_TS = segment_members(x_BCT.shape[-1], SEGMENT_FRAMES, like=x_BCT)
        for layer in layers:
            x_BCT = torch.cat([x_BCT, layer(x_BCT, members_TS)], dim=1)
        return x_BCT


class NormRelu(nn.Sequential):
    """Normalisation and ReLU; by rows where a dense block left them."""

    def forward(self, input: Tensor) -> Tensor:
        norm: Any = self[0]
        return norm_relu(norm, input) if is_rows(norm, input) else super().forward(input)


class Transit(nn.Sequential):
    """Normalisation and ReLU, then a 1x1 convolution to fewer channels; likewise."""

    def forward(self, input: Tensor) -> Tensor:
        nonlinear: Any = self[0]
        linear: Any = self[1]
        if is_rows(nonlinear[0], input):
            return mix_rows(linear, nonlinear(input))
        return super().forward(input)


class Statistics(nn.Module):
    """Mean and deviation of each channel, as a sequence of one frame: (B, C, T) -> (B, 2C, 1)."""

    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x_BCT: Tensor) -> Tensor:
        return mean_std(x_BCT, eps=self.eps).unsqueeze(-1)


def _head(channels: int, blocks: tuple[int, ...]) -> nn.Sequential:
    """2-D convolutions on (B, 1, F, T); each stage and the last convolution halve F, none T."""
    layers = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(1, channels, 3, padding=1, bias=False),
        bn1=BatchNorm2d(channels),
        relu1=nn.ReLU(inplace=True),
    )
    for i, depth in enumerate(blocks, 1):
        strides = [2] + [1] * (depth - 1)
        layers[f"layer{i}"] = nn.Sequential(*(ResidualBlock(channels, stride=s) for s in strides))
    layers["conv2"] = nn.Conv2d(channels, channels, 3, stride=(2, 1), padding=1, bias=False)
    layers["bn2"] = BatchNorm2d(channels)
    layers["relu2"] = nn.ReLU(inplace=True)
    return nn.Sequential(layers)


def _norm_relu(channels: int) -> NormRelu:
    return NormRelu(OrderedDict(batchnorm=nn.BatchNorm1d(channels), relu=nn.ReLU(inplace=True)))


def _tdnn(in_channels: int, out_channels: int, *, kernel_size: int, stride: int) -> nn.Sequential:
    """Convolution over time, then normalisation and ReLU."""
    linear = nn.Conv1d(
        in_channels, out_channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=False
    )
    return nn.Sequential(OrderedDict(linear=linear, nonlinear=_norm_relu(out_channels)))


def _transit(in_channels: int, out_channels: int) -> Transit:
    linear = nn.Conv1d(in_channels, out_channels, 1, bias=False)
    return Transit(OrderedDict(nonlinear=_norm_relu(in_channels), linear=linear))


def _dense(in_channels: int, out_channels: int) -> nn.Sequential:
    """The embedding layer; its normalisation has no scale or shift."""
    norm = nn.Sequential(OrderedDict(batchnorm=nn.BatchNorm1d(out_channels, affine=False)))
    linear = nn.Conv1d(in_channels, out_channels, 1, bias=False)
    return nn.Sequential(OrderedDict(linear=linear, nonlinear=norm))


def _init_weights(module: nn.Module) -> None:
    """He initialisation of 1-D convolutions; the 2-D ones keep torch's default, as published."""
    if isinstance(module, nn.Conv1d):
        nn.init.kaiming_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
