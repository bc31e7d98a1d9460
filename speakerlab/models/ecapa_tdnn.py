"""ECAPA-TDNN: time-delay layers with Res2Net splits and squeeze-excitation, attentive pooling.

Desplanques, Thienpondt, Demuynck: "ECAPA-TDNN: Emphasized Channel Attention, Propagation and
Aggregation in TDNN Based Speaker Verification", Interspeech 2020, arXiv 2005.07143.

`ECAPATDNN` is the network of SpeechBrain and 3D-Speaker. `ECAPATDNNWeSpeaker` (Wang et al.:
"Wespeaker: A Research and Production Oriented Speaker Embedding Learning Toolkit", ICASSP 2023,
arXiv 2210.17016) pads with zeros, passes on the last channel group instead of the first, aggregates
to 1536 channels at any width, and has no BatchNorm after the aggregation or in the attention.

Letters: B batch, T frames, F mel bins, C channels, G channels of a group, H hidden units of a
squeeze-excitation, K mean and deviation of C, D embedding.
"""

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from speakerlab.models.pooling import (
    ASTP,
    POOLINGS,
    Pooling,
    PoolingName,
    attentive_mean_std,
    convolve_with_context,
    moments,
    named_sequential,
    refuse_unusable,
)

# Of the three blocks: frames between two taps of a kernel. A later block sees more context.
DILATIONS = (2, 3, 4)


class ECAPATDNN(nn.Module):
    """ECAPA-TDNN (default: as 3D-Speaker publishes it; `channels` 512: the paper's smaller one)."""

    # Padding reflects up to four frames at an edge, without the frame at the edge itself.
    min_frames = 5

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 192,
        channels: int = 1024,
        scale: int = 8,
        squeezed_channels: int = 128,
        attention_channels: int = 128,
        global_context: bool = True,
    ) -> None:
        super().__init__()
        refuse_scale(channels, scale)
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        blocks: list[nn.Module] = []
        for dilation in DILATIONS:
            block = residual_block(
                channels,
                dilation=dilation,
                scale=scale,
                squeezed_channels=squeezed_channels,
            )
            blocks.append(block)
        # The published names count the first layer as one of the blocks.
        first_layer = time_delay(feat_dim, channels, kernel=5)
        self.blocks = nn.ModuleList([first_layer, *blocks])

        # Multi-layer feature aggregation reads the outputs of all three blocks.
        wide = len(blocks) * channels
        self.mfa = time_delay(wide, wide)
        self.asp = AttentiveStatistics(
            wide,
            attention_channels=attention_channels,
            global_context=global_context,
        )
        # The published last layer is a 1x1 convolution, not a linear layer.
        stats_dim = 2 * wide  # mean and deviation
        self.asp_bn = named_sequential(norm=nn.BatchNorm1d(stats_dim))
        last_conv = nn.Conv1d(stats_dim, embed_dim, kernel_size=1)
        self.fc = named_sequential(conv=last_conv)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        outputs = [feats_BTF.transpose(1, 2)]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        # Without the features and the output of the first layer.
        _, _, *block_outputs = outputs
        x_BCT = torch.cat(block_outputs, dim=1)
        x_BCT = self.mfa(x_BCT)

        stats_BK = self.asp(x_BCT)
        stats_BK = self.asp_bn(stats_BK)
        # A convolution reads a sequence; this one has one frame.
        emb_BD1 = self.fc(stats_BK.unsqueeze(-1))
        return emb_BD1.squeeze(-1)


def time_delay(
    in_channels: int,
    out_channels: int,
    *,
    kernel: int = 1,
    dilation: int = 1,
) -> nn.Sequential:
    """Return a convolution over time that is padded by reflection, ReLU and BatchNorm."""
    convolution = OrderedDict[str, nn.Module]()
    if kernel > 1:
        # So many frames that the output is as long as the input.
        width = dilation * (kernel // 2)
        convolution["pad"] = Reflection(width)
    convolution["conv"] = nn.Conv1d(
        in_channels,
        out_channels,
        kernel,
        dilation=dilation,
    )
    return named_sequential(
        conv=nn.Sequential(convolution),
        relu=nn.ReLU(inplace=True),
        # The published names are norm.norm.weight and so on.
        norm=named_sequential(norm=nn.BatchNorm1d(out_channels)),
    )


class Reflection(nn.Module):
    """Padding by reflection, at both ends of the time axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x_BCT: Tensor) -> Tensor:
        # A graph that is compiled or exported gets torch's padding, which it can represent.
        needs_gradient = x_BCT.requires_grad
        if needs_gradient and not torch.compiler.is_compiling():
            return _Reflect.apply(x_BCT, self.width)  # pyright: ignore[reportReturnType]
        padding = (self.width, self.width)
        return F.pad(x_BCT, padding, mode="reflect")


class _Reflect(torch.autograd.Function):
    """Padding by reflection with a backward pass that keeps no input.

    torch's own backward pass keeps it, and is not deterministic on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x_BCT: Tensor, width: int) -> Tensor:
        ctx.width = width
        padding = (width, width)
        return F.pad(x_BCT, padding, mode="reflect")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BCT: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        width = ctx.width
        d_x_BCT = grad_BCT[..., width:-width].clone()

        # A reflected frame adds its gradient to the frame that it is a copy of.
        d_start_BCT = grad_BCT[..., :width].flip(-1)
        d_end_BCT = grad_BCT[..., -width:].flip(-1)
        d_x_BCT[..., 1 : width + 1] += d_start_BCT
        d_x_BCT[..., -width - 1 : -1] += d_end_BCT
        return d_x_BCT, None


class Residual(nn.Sequential):
    """Layers in a row, beside a shortcut."""

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


def residual_block(
    channels: int,
    *,
    dilation: int,
    scale: int,
    squeezed_channels: int,
) -> Residual:
    """Return a residual block: 1x1 layer, Res2Net split, 1x1 layer and squeeze-excitation."""
    layers = OrderedDict[str, nn.Module](
        tdnn1=time_delay(channels, channels),
        res2net_block=Res2Split(channels, dilation=dilation, scale=scale),
        tdnn2=time_delay(channels, channels),
        se_block=SqueezeExcitation(channels, squeezed_channels),
    )
    return Residual(layers)


class Res2Split(nn.Module):
    """Channels in `scale` groups: the first is passed on, each other is convolved in turn."""

    def __init__(self, channels: int, *, dilation: int, scale: int) -> None:
        super().__init__()
        width = channels // scale
        # One layer fewer than there are groups, because the first group has none.
        self.blocks = nn.ModuleList(
            time_delay(width, width, kernel=3, dilation=dilation)
            for _ in range(scale - 1)
        )

    def forward(self, x_BCT: Tensor) -> Tensor:
        num_groups = len(self.blocks) + 1
        first_BGT, *groups = x_BCT.chunk(num_groups, dim=1)
        outputs = [first_BGT]
        for index, layer in enumerate(self.blocks):
            x_BGT = groups[index]
            # Each convolution but the first also reads the output of the one before it, so that the
            # context grows from group to group.
            if index > 0:
                x_BGT = x_BGT + outputs[-1]
            outputs.append(layer(x_BGT))
        return torch.cat(outputs, dim=1)


class SqueezeExcitation(nn.Module):
    """Weighs the channels of an utterance by a small network of their means."""

    def __init__(self, channels: int, squeezed_channels: int) -> None:
        super().__init__()
        squeeze = nn.Conv1d(channels, squeezed_channels, kernel_size=1)
        excite = nn.Conv1d(squeezed_channels, channels, kernel_size=1)
        self.conv1 = named_sequential(conv=squeeze)
        self.conv2 = named_sequential(conv=excite)

    def forward(self, x_BCT: Tensor) -> Tensor:
        mean_BC1 = x_BCT.mean(-1, keepdim=True)
        hidden_BH1 = F.relu(self.conv1(mean_BC1))
        # Between 0 and 1: a channel can be suppressed, but not amplified.
        weight_BC1 = self.conv2(hidden_BH1).sigmoid()
        return x_BCT * weight_BC1


class AttentiveStatistics(nn.Module):
    """Attentive statistics pooling whose network has ReLU and BatchNorm before its tanh.

    (B, C, T) -> (B, K), fp32. The deviation of the context is the biased one.
    """

    EPS = 1e-12  # least variance, as in SpeechBrain

    def __init__(
        self,
        channels: int,
        *,
        attention_channels: int,
        global_context: bool,
    ) -> None:
        super().__init__()
        self.global_context = global_context
        # With context, the network sees the frame, the mean and the deviation.
        in_channels = 3 * channels if global_context else channels
        self.tdnn = time_delay(in_channels, attention_channels)
        score_conv = nn.Conv1d(attention_channels, channels, kernel_size=1)
        self.conv = named_sequential(conv=score_conv)

    def forward(self, x_BCT: Tensor) -> Tensor:
        # Layer by layer, so that the convolution gets the context once per utterance. `tdnn` as a
        # whole would need it repeated for every frame.
        layer, relu, norm = self.tdnn
        conv: Any = layer.get_submodule("conv")
        if self.global_context:
            # As in the published code, the attention reads the biased deviation.
            mean_BC1, var_BC1 = moments(x_BCT, correction=0)
            std_BC1 = var_BC1.clamp_min(self.EPS).sqrt()
            context_BK1 = torch.cat([mean_BC1, std_BC1], dim=1)
            context_BK = context_BK1.squeeze(-1)
            hidden = convolve_with_context(conv, x_BCT, context_BK)
        else:
            hidden = conv(x_BCT)
        hidden = norm(relu(hidden))
        scores_BCT = self.conv(hidden.tanh())
        mean_and_std = attentive_mean_std(x_BCT, scores_BCT, eps=self.EPS)
        return torch.cat(mean_and_std, dim=1)


class ECAPATDNNWeSpeaker(nn.Module):
    """ECAPA-TDNN of WeSpeaker (`channels` 512 or 1024; with `global_context` its GLOB variants).

    `emb_bn` adds a BatchNorm to the embedding, as in its self-supervised recipes.
    """

    min_frames = 2  # for the deviation

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 192,
        channels: int = 512,
        scale: int = 8,
        squeezed_channels: int = 128,
        stats_channels: int = 1536,
        pooling: PoolingName = "astp",
        pool_eps: float = 1e-7,
        global_context: bool = False,
        emb_bn: bool = False,
    ) -> None:
        super().__init__()
        refuse_scale(channels, scale)
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim

        self.layer1 = zero_padded(feat_dim, channels, kernel=5)
        block = partial(
            wespeaker_block,
            channels,
            scale=scale,
            squeezed_channels=squeezed_channels,
        )
        self.layer2 = block(dilation=DILATIONS[0])
        self.layer3 = block(dilation=DILATIONS[1])
        self.layer4 = block(dilation=DILATIONS[2])
        # Multi-layer feature aggregation reads the outputs of all three blocks.
        wide = len(DILATIONS) * channels
        self.conv = nn.Conv1d(wide, stats_channels, kernel_size=1)

        # Only an attention has a network that can read the context.
        if global_context and pooling != "astp":
            raise ValueError(
                f"pooling: {pooling!r} takes no global context; use 'astp'"
            )
        self.pool: Pooling
        if global_context:
            self.pool = ASTP(stats_channels, eps=pool_eps, global_context=True)
        else:
            self.pool = POOLINGS[pooling](stats_channels, eps=pool_eps)
        stats_dim = self.pool.out_dim
        self.bn = nn.BatchNorm1d(stats_dim)
        self.linear = nn.Linear(stats_dim, embed_dim)
        self.bn2 = nn.BatchNorm1d(embed_dim) if emb_bn else nn.Identity()

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        # As in the paper, the output of the first layer is not aggregated.
        out1_BCT = self.layer1(feats_BTF.transpose(1, 2))
        out2_BCT = self.layer2(out1_BCT)
        out3_BCT = self.layer3(out2_BCT)
        out4_BCT = self.layer4(out3_BCT)
        block_outputs = [out2_BCT, out3_BCT, out4_BCT]
        x_BCT = torch.cat(block_outputs, dim=1)
        x_BCT = self.conv(x_BCT)
        x_BCT = F.relu(x_BCT, inplace=True)

        stats_BK = self.pool(x_BCT)
        stats_BK = self.bn(stats_BK)
        emb_BD = self.linear(stats_BK)
        return self.bn2(emb_BD)


def zero_padded(
    in_channels: int, out_channels: int, *, kernel: int = 1
) -> nn.Sequential:
    """Return a convolution over time, padded with zeros, ReLU and BatchNorm."""
    conv = nn.Conv1d(
        in_channels,
        out_channels,
        kernel,
        padding=kernel // 2,
    )
    return named_sequential(
        conv=conv,
        relu=nn.ReLU(inplace=True),
        bn=nn.BatchNorm1d(out_channels),
    )


def wespeaker_block(
    channels: int,
    *,
    dilation: int,
    scale: int,
    squeezed_channels: int,
) -> Residual:
    """Return a residual block as `residual_block` does, from WeSpeaker's layers."""
    layers = nn.Sequential(
        zero_padded(channels, channels),
        WeSpeakerSplit(channels, dilation=dilation, scale=scale),
        zero_padded(channels, channels),
        WeSpeakerExcitation(channels, squeezed_channels),
    )
    return Residual(OrderedDict(se_res2block=layers))


class WeSpeakerSplit(nn.Module):
    """Channels in `scale` groups: the last is passed on, each other is convolved in turn."""

    def __init__(self, channels: int, *, dilation: int, scale: int) -> None:
        super().__init__()
        width = channels // scale
        # Two lists, because the published names have the convolutions apart from the BatchNorms.
        self.convs = nn.ModuleList()
        self.bns = nn.ModuleList()
        for _ in range(scale - 1):
            conv = nn.Conv1d(
                width,
                width,
                kernel_size=3,
                dilation=dilation,
                padding=dilation,
            )
            self.convs.append(conv)
            self.bns.append(nn.BatchNorm1d(width))

    def forward(self, x_BCT: Tensor) -> Tensor:
        num_groups = len(self.convs) + 1
        *groups, last_BGT = x_BCT.chunk(num_groups, dim=1)
        outputs: list[Tensor] = []
        for index, (conv, norm) in enumerate(zip(self.convs, self.bns)):
            x_BGT = groups[index]
            # Each convolution but the first also reads the output of the one before it.
            if index > 0:
                x_BGT = x_BGT + outputs[-1]
            y_BGT = F.relu(conv(x_BGT), inplace=True)
            outputs.append(norm(y_BGT))
        return torch.cat([*outputs, last_BGT], dim=1)


class WeSpeakerExcitation(nn.Module):
    """Squeeze and excitation, with linear layers where `SqueezeExcitation` has convolutions."""

    def __init__(self, channels: int, squeezed_channels: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(channels, squeezed_channels)
        self.linear2 = nn.Linear(squeezed_channels, channels)

    def forward(self, x_BCT: Tensor) -> Tensor:
        mean_BC = x_BCT.mean(-1)
        hidden_BH = F.relu(self.linear1(mean_BC))
        weight_BC = self.linear2(hidden_BH).sigmoid()
        return x_BCT * weight_BC.unsqueeze(-1)


def refuse_scale(channels: int, scale: int) -> None:
    """Raise ValueError unless the channels split evenly into at least two groups."""
    # With a single group there would be nothing to convolve.
    if scale < 2 or channels % scale:
        raise ValueError(
            f"ECAPA-TDNN: {channels} channels cannot be split into {scale} equal groups"
            " (scale); use a multiple of scale, and a scale of at least 2"
        )
