"""ECAPA-TDNN: time-delay layers with Res2Net splits and squeeze-excitation, attentive pooling.

Desplanques, Thienpondt, Demuynck: "ECAPA-TDNN: Emphasized Channel Attention, Propagation and
Aggregation in TDNN Based Speaker Verification", Interspeech 2020, arXiv 2005.07143.

`ECAPATDNN` is the network of SpeechBrain and 3D-Speaker. `ECAPATDNNWeSpeaker` (Wang et al.:
"Wespeaker: A Research and Production Oriented Speaker Embedding Learning Toolkit", ICASSP 2023,
arXiv 2210.17016) pads with zeros, passes on the last channel group instead of the first, aggregates
to 1536 channels at any width, and has no BatchNorm after the aggregation or in the attention.

Letters: B batch, T frames, F mel bins, C channels, K mean and deviation of C, D embedding.
"""

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from speakerlab.models.pooling import (
    POOLINGS,
    PoolingName,
    attentive_mean_std,
    convolve_with_context,
    moments,
    named,
    refuse_unusable,
)

DILATIONS = (2, 3, 4)  # of the three blocks


class ECAPATDNN(nn.Module):
    """ECAPA-TDNN (default: as 3D-Speaker publishes it; `channels` 512: the paper's smaller one)."""

    min_frames = 5  # up to four frames are reflected at an edge, and the edge itself is not

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
        self.feat_dim, self.embed_dim = feat_dim, embed_dim
        block = partial(residual_block, channels, scale=scale, squeezed_channels=squeezed_channels)
        blocks = [block(dilation=dilation) for dilation in DILATIONS]
        self.blocks = nn.ModuleList([time_delay(feat_dim, channels, kernel=5), *blocks])
        wide = len(blocks) * channels
        self.mfa = time_delay(wide, wide)
        self.asp = AttentiveStatistics(
            wide, attention_channels=attention_channels, global_context=global_context
        )
        self.asp_bn = named(norm=nn.BatchNorm1d(2 * wide))
        self.fc = named(conv=nn.Conv1d(2 * wide, embed_dim, 1))

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        outputs = [feats_BTF.transpose(1, 2)]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        stats_BK = self.asp_bn(self.asp(self.mfa(torch.cat(outputs[2:], dim=1))))
        return self.fc(stats_BK.unsqueeze(-1)).squeeze(-1)


def time_delay(
    in_channels: int, out_channels: int, *, kernel: int = 1, dilation: int = 1
) -> nn.Sequential:
    """Return a convolution over time that is padded by reflection, ReLU and BatchNorm."""
    pad = {"pad": Reflection(dilation * (kernel // 2))} if kernel > 1 else {}
    conv = named(**pad, conv=nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation))
    norm = nn.BatchNorm1d(out_channels)
    return named(conv=conv, relu=nn.ReLU(inplace=True), norm=named(norm=norm))


class Reflection(nn.Module):
    """Padding by reflection, at both ends of the time axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x_BCT: Tensor) -> Tensor:
        if x_BCT.requires_grad and not torch.compiler.is_compiling():
            return _Reflect.apply(x_BCT, self.width)  # pyright: ignore[reportReturnType]
        return F.pad(x_BCT, (self.width, self.width), mode="reflect")


class _Reflect(torch.autograd.Function):
    """torch's own backward pass keeps the input, and is not deterministic on a GPU."""

    @staticmethod
    def forward(ctx: Any, x_BCT: Tensor, width: int) -> Tensor:
        ctx.width = width
        return F.pad(x_BCT, (width, width), mode="reflect")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BCT: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        width = ctx.width
        inner_BCT = grad_BCT[..., width:-width].clone()
        inner_BCT[..., 1 : width + 1] += grad_BCT[..., :width].flip(-1)
        inner_BCT[..., -width - 1 : -1] += grad_BCT[..., -width:].flip(-1)
        return inner_BCT, None


class Residual(nn.Sequential):
    """Layers in a row, beside a shortcut."""

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


def residual_block(channels: int, *, dilation: int, scale: int, squeezed_channels: int) -> Residual:
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
        self.blocks = nn.ModuleList(
            time_delay(width, width, kernel=3, dilation=dilation) for _ in range(scale - 1)
        )

    def forward(self, x_BCT: Tensor) -> Tensor:
        first, *others = x_BCT.chunk(len(self.blocks) + 1, dim=1)
        outputs = [first]
        for i, (layer, group) in enumerate(zip(self.blocks, others)):
            outputs.append(layer(group if i == 0 else group + outputs[-1]))
        return torch.cat(outputs, dim=1)


class SqueezeExcitation(nn.Module):
    """Weighs the channels of an utterance by a small network of their means."""

    def __init__(self, channels: int, squeezed_channels: int) -> None:
        super().__init__()
        self.conv1 = named(conv=nn.Conv1d(channels, squeezed_channels, 1))
        self.conv2 = named(conv=nn.Conv1d(squeezed_channels, channels, 1))

    def forward(self, x_BCT: Tensor) -> Tensor:
        hidden_BC1 = F.relu(self.conv1(x_BCT.mean(-1, keepdim=True)))
        return x_BCT * self.conv2(hidden_BC1).sigmoid()


class AttentiveStatistics(nn.Module):
    """Attentive statistics pooling whose network has ReLU and BatchNorm before its tanh.

    (B, C, T) -> (B, K), fp32. The deviation of the context is the biased one.
    """

    EPS = 1e-12

    def __init__(self, channels: int, *, attention_channels: int, global_context: bool) -> None:
        super().__init__()
        self.global_context = global_context
        self.tdnn = time_delay(channels * (3 if global_context else 1), attention_channels)
        self.conv = named(conv=nn.Conv1d(attention_channels, channels, 1))

    def forward(self, x_BCT: Tensor) -> Tensor:
        layer, relu, norm = self.tdnn
        conv: Any = layer.get_submodule("conv")
        if self.global_context:
            mean_BC1, var_BC1 = moments(x_BCT, correction=0)
            context_BK1 = torch.cat([mean_BC1, var_BC1.clamp_min(self.EPS).sqrt()], dim=1)
            hidden = convolve_with_context(conv, x_BCT, context_BK1.squeeze(-1))
        else:
            hidden = conv(x_BCT)
        scores_BCT = self.conv(norm(relu(hidden)).tanh())
        return torch.cat(attentive_mean_std(x_BCT, scores_BCT, eps=self.EPS), dim=1)


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
        self.feat_dim, self.embed_dim = feat_dim, embed_dim
        self.layer1 = zero_padded(feat_dim, channels, kernel=5)
        block = partial(wespeaker_block, channels, scale=scale, squeezed_channels=squeezed_channels)
        self.layer2, self.layer3, self.layer4 = (block(dilation=d) for d in DILATIONS)
        self.conv = nn.Conv1d(len(DILATIONS) * channels, stats_channels, 1)
        if global_context and pooling != "astp":
            raise ValueError(f"pooling: {pooling!r} takes no global context; use 'astp'")
        context = {"global_context": True} if global_context else {}
        self.pool = POOLINGS[pooling](stats_channels, eps=pool_eps, **context)
        self.bn = nn.BatchNorm1d(self.pool.out_dim)
        self.linear = nn.Linear(self.pool.out_dim, embed_dim)
        self.bn2 = nn.BatchNorm1d(embed_dim) if emb_bn else nn.Identity()

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        out1 = self.layer1(feats_BTF.transpose(1, 2))
        out2 = self.layer2(out1)
        out3 = self.layer3(out2)
        out4 = self.layer4(out3)
        x_BCT = F.relu(self.conv(torch.cat([out2, out3, out4], dim=1)), inplace=True)
        return self.bn2(self.linear(self.bn(self.pool(x_BCT))))


def zero_padded(in_channels: int, out_channels: int, *, kernel: int = 1) -> nn.Sequential:
    """Return a convolution over time, padded with zeros, ReLU and BatchNorm."""
    conv = nn.Conv1d(in_channels, out_channels, kernel, padding=kernel // 2)
    return named(conv=conv, relu=nn.ReLU(inplace=True), bn=nn.BatchNorm1d(out_channels))


def wespeaker_block(
    channels: int, *, dilation: int, scale: int, squeezed_channels: int
) -> Residual:
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


class WeSpeakerExcitation(nn.Module):
    def __init__(self, channels: int, squeezed_channels: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(channels, squeezed_channels)
        self.linear2 = nn.Linear(squeezed_channels, channels)

    def forward(self, x_BCT: Tensor) -> Tensor:
        weight_BC = self.linear2(F.relu(self.linear1(x_BCT.mean(-1)))).sigmoid()
        return x_BCT * weight_BC.unsqueeze(-1)


def refuse_scale(channels: int, scale: int) -> None:
    """Raise ValueError unless the channels split evenly into at least two groups."""
    if scale < 2 or channels % scale:
        raise ValueError(
            f"ECAPA-TDNN: {channels} channels cannot be split into {scale} equal groups (scale); "
            "use a multiple of scale, and a scale of at least 2"
        )
