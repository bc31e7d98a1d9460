"""CAM++: a densely connected TDNN with context-aware masking (D-TDNN-CAM).

Wang, Zheng, Chen, Cheng, Chen: "CAM++: A Fast and Efficient Network for Speaker Verification Using
Context-Aware Masking", Interspeech 2023, arXiv 2303.00332. Parameter names and shapes are those of
the published checkpoints, where the front-end convolution module (FCM) is called `head`.

Letters: B batch, T frames (halved by the first TDNN layer), N = B x T, F mel bins, C channels,
S segments, D embedding.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import fp32_island, widened
from speakerlab.models.cpu import dense
from speakerlab.models.pooling import TSTP, keep_layout, named, refuse_unusable
from speakerlab.models.resnet import BasicBlock

SEGMENT_FRAMES = 100  # at half the frame rate: 2 s with a 10-ms shift


class CAMPPlus(nn.Module):
    """CAM++ (defaults: the published model of 7.2 M parameters).

    The FCM divides the frequency axis by eight; its channels and bins are stacked and go through a
    strided TDNN layer, dense blocks that each end in a halving transition layer, and statistics
    pooling with the deviation sqrt(var + pool_eps) (0 in 3D-Speaker, 1e-7 in WeSpeaker).
    """

    min_frames = 3  # leaves two frames for the unbiased deviation

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
    ) -> None:
        super().__init__()
        if not len(blocks) == len(kernel_sizes) == len(dilations):
            raise ValueError(
                f"CAMPPlus: blocks, kernel_sizes and dilations differ in length: {blocks}, "
                f"{kernel_sizes}, {dilations}; give one of each per block"
            )
        self.feat_dim, self.embed_dim = feat_dim, embed_dim
        self.head = FCM(head_channels, head_blocks)
        fcm_bins = -(-feat_dim // 2 ** (len(head_blocks) + 1))  # each halving rounds up
        channels = init_channels
        first = nn.Conv1d(head_channels * fcm_bins, channels, 5, stride=2, padding=2, bias=False)
        tdnn = named(linear=first, nonlinear=_norm_relu(channels))
        layers = OrderedDict[str, nn.Module](tdnn=tdnn)
        for i, (depth, kernel_size, dilation) in enumerate(zip(blocks, kernel_sizes, dilations), 1):
            block = DenseBlock()
            for j in range(1, depth + 1):
                block[f"tdnnd{j}"] = DenseLayer(
                    channels,
                    growth_rate=growth_rate,
                    bottleneck=bn_size * growth_rate,
                    kernel_size=kernel_size,
                    dilation=dilation,
                )
                channels += growth_rate
            layers[f"block{i}"] = block
            half = nn.Conv1d(channels, channels // 2, 1, bias=False)
            layers[f"transit{i}"] = InRows(nonlinear=_norm_relu(channels), linear=half)
            channels //= 2
        norm, relu = nn.BatchNorm1d(channels), nn.ReLU(inplace=True)
        layers["out_nonlinear"] = InRows(batchnorm=norm, relu=relu)
        layers["stats"] = TSTP(channels, eps=pool_eps)
        layers["column"] = nn.Unflatten(1, (-1, 1))  # a sequence of one frame
        last = nn.Conv1d(2 * channels, embed_dim, 1, bias=False)
        norm = named(batchnorm=nn.BatchNorm1d(embed_dim, affine=False))
        layers["dense"] = named(linear=last, nonlinear=norm)
        self.xvector = nn.Sequential(layers)
        self.apply(_init_weights)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        x_BCFT = self.head(feats_BTF.transpose(1, 2).contiguous().unsqueeze(1))
        x_BCT = keep_layout(x_BCFT).flatten(1, 2)
        return self.xvector(x_BCT).squeeze(-1)


class FCM(nn.Sequential):
    """Front-end convolution module on (B, 1, F, T): each stage and `conv2` halve F."""

    def __init__(self, channels: int, blocks: tuple[int, ...]) -> None:
        layers = OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(1, channels, 3, padding=1, bias=False),
            bn1=nn.BatchNorm2d(channels),
            relu1=nn.ReLU(inplace=True),
        )
        for i, depth in enumerate(blocks, 1):
            strides = [2] + [1] * (depth - 1)
            stage = (BasicBlock(channels, channels, stride=(stride, 1)) for stride in strides)
            layers[f"layer{i}"] = nn.Sequential(*stage)
        layers["conv2"] = nn.Conv2d(channels, channels, 3, stride=(2, 1), padding=1, bias=False)
        layers["bn2"] = nn.BatchNorm2d(channels)
        layers["relu2"] = nn.ReLU(inplace=True)
        super().__init__(layers)


class ContextAwareMasking(nn.Module):
    """A dilated convolution over time whose output is scaled by a mask made from the context.

    The context of a frame is the mean of the utterance plus the mean of the frame's segment. It is
    the same for all frames of a segment, so the mask is computed once per segment.
    """

    fp32_layers = ("linear1", "linear2")  # too little work for 16 bits to save time; see `forward`

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

    def forward(self, x_BCT: Tensor, segments: tuple[Tensor, Tensor]) -> Tensor:
        context_TS, frames_ST = segments
        with fp32_island(x_BCT):
            context_BCS = widened(x_BCT) @ context_TS
            hidden_BCS = F.relu(self.linear1(context_BCS), inplace=True)
            mask_BCS = self.linear2(hidden_BCS).sigmoid()
        mask_BCT = mask_BCS.to(x_BCT.dtype) @ frames_ST
        return self.linear_local(x_BCT) * mask_BCT


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
    ) -> None:
        super().__init__()
        self.nonlinear1 = _norm_relu(in_channels)
        self.linear1 = nn.Conv1d(in_channels, bottleneck, 1, bias=False)
        self.nonlinear2 = _norm_relu(bottleneck)
        self.cam_layer = ContextAwareMasking(
            bottleneck, growth_rate, kernel_size=kernel_size, dilation=dilation
        )

    def forward(self, x_BCT: Tensor, segments: tuple[Tensor, Tensor]) -> Tensor:
        hidden_BCT = self.nonlinear2(self.linear1(self.nonlinear1(x_BCT)))
        return self.cam_layer(hidden_BCT, segments)


class DenseBlock(nn.ModuleDict):
    """`DenseLayer`s by name; each sees the block's input and the outputs of all layers before it.

    On a CPU the same is computed faster by cpu/dense.py, wherever that code applies.
    """

    def forward(self, x_BCT: Tensor) -> Tensor:
        layers = list(self.values())
        computed_BCT = dense.run_block(layers, x_BCT, segment_frames=SEGMENT_FRAMES)
        if computed_BCT is not None:
            return computed_BCT
        segments = segments_of(x_BCT, SEGMENT_FRAMES)
        for layer in layers:
            x_BCT = torch.cat([x_BCT, layer(x_BCT, segments)], dim=1)
        return x_BCT


class InRows(nn.Sequential):
    """Layers that treat each frame alone, such as BatchNorm, ReLU and 1x1 convolutions.

    After a dense block on a CPU, a channel of all utterances is one row in memory. The layers would
    copy such a map, but not if it is passed as one utterance with all frames.
    """

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__(OrderedDict(layers))

    def forward(self, x_BCT: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not dense.is_in_rows(x_BCT):
            return super().forward(x_BCT)
        x_CBT = x_BCT.transpose(0, 1)
        trains = any(module.training for module in self.modules())
        x_CN = x_CBT.flatten(1) if trains else dense.whole_rows(x_CBT)
        y_CN = super().forward(x_CN.unsqueeze(0)).squeeze(0)[:, : x_CBT.shape[1:].numel()]
        return y_CN.unflatten(1, x_CBT.shape[1:]).transpose(0, 1)


def segments_of(x_BCT: Tensor, segment_frames: int) -> tuple[Tensor, Tensor]:
    """Return matrices that give segments from the frames of `x_BCT`, and frames from segments.

    context_TS: the mean over all frames plus the mean over the segment, at least fp32.
    frames_ST: the value of each frame's segment, in the format of the frames.

    The last segment with frames may be shorter. An empty one follows it, so that S is never 1,
    which an export with dynamic length would treat as a special case. Matrices with explicit
    counts, because `ceil_mode` pooling divides a partial segment by its true length in some
    runtimes and by the full length in others.
    """
    num_frames, device = x_BCT.shape[-1], x_BCT.device
    segment_T = torch.arange(num_frames, device=device) // segment_frames
    segment_S = torch.arange((num_frames - 1) // segment_frames + 2, device=device)
    members_TS = widened((segment_T.unsqueeze(1) == segment_S).to(x_BCT.dtype))
    context_TS = members_TS / members_TS.sum(0).clamp_min(1) + 1 / num_frames
    return context_TS, members_TS.T.to(x_BCT.dtype)


def _norm_relu(channels: int) -> nn.Sequential:
    return named(batchnorm=nn.BatchNorm1d(channels), relu=nn.ReLU(inplace=True))


def _init_weights(module: nn.Module) -> None:
    """Use He initialisation for 1-D convolutions and torch's for 2-D ones, as published."""
    if isinstance(module, nn.Conv1d):
        nn.init.kaiming_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
