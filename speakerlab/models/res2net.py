"""Res2Net: residual blocks whose 3x3 convolution is split into groups that feed each other.

Gao, Cheng, Zhao, Zhang, Yang, Torr: "Res2Net: A New Multi-scale Backbone Architecture", TPAMI 2021,
arXiv 1904.01169, for speakers in Zhou, Zhao, Wu: "ResNeXt and Res2Net Structures for Speaker
Verification", SLT 2021, arXiv 2007.02480. eres2net.py builds on this file.

Letters: B batch, T frames, F mel bins (both divided by up to eight on the way), C channels,
D embedding. A gradient has the name of its value after `d_`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from speakerlab.models.pooling import POOLINGS, PoolingName, shortcut, subsample
from speakerlab.models.resnet import ResidualModel

# Builds, for a number of channels, what joins the running output of a block with its next group.
Fuse = Callable[[int], nn.Module]
CEILING = 20.0  # of the activations, with which the published models were trained


class Res2Net(ResidualModel):
    """Res2Net (defaults: 3D-Speaker's; WeSpeaker's Res2Net34_Base and, with `m_channels` 64,
    Res2Net34_Large have a `pool_eps` of 1e-7)."""

    num_passed = 1  # of the `scale` groups of a block, how many are not convolved: the last
    fuse: Fuse | None = None  # joins the groups in the two deeper stages; else they are added

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 192,
        m_channels: int = 32,
        blocks: tuple[int, int, int, int] = (3, 4, 6, 3),
        base_width: int = 32,
        scale: int = 2,
        expansion: int = 2,
        pooling: PoolingName = "tstp",
        pool_eps: float = 1e-8,
        two_emb_layer: bool = False,
    ) -> None:
        super().__init__(feat_dim, embed_dim, two_emb_layer=two_emb_layer)
        if m_channels * base_width < 64 or scale <= self.num_passed:
            raise ValueError(
                f"{type(self).__name__}: m_channels {m_channels} * base_width {base_width} must be "
                f"at least 64, the scale {scale} at least {self.num_passed + 1}; increase them"
            )

        def make(in_channels: int, channels: int, *, stride: int) -> Res2Block:
            return Res2Block(
                in_channels,
                channels * expansion,
                width=channels * base_width // 64,
                scale=scale,
                stride=stride,
                num_passed=self.num_passed,
                fuse=self.fuse if channels >= 4 * m_channels else None,
            )

        in_dim = self.add_stages(make, m_channels, blocks, expansion=expansion)
        self.add_embedding_layers(POOLINGS[pooling](in_dim, eps=pool_eps))


class Res2Block(nn.Module):
    """A bottleneck block whose middle is 3x3 convolutions, each also fed the output of the last.

    The channels are split into `scale` groups of `width`. All but the last `num_passed` join the
    running output, by a sum or by `fuse`, and are convolved.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        width: int,
        scale: int,
        stride: int,
        num_passed: int,
        fuse: Fuse | None,
    ) -> None:
        super().__init__()
        self.width = width
        self.subsample = subsample(stride)  # once for both 1x1 convolutions that read the input
        num_convs = scale - num_passed
        self.conv1 = nn.Conv2d(in_channels, width * scale, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width * scale)
        self.convs = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(num_convs)
        )
        self.bns = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(num_convs))
        fusions = [] if fuse is None else [fuse(width) for _ in range(num_convs - 1)]
        self.fuse_models = nn.ModuleList(fusions)
        self.conv3 = nn.Conv2d(width * scale, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = shortcut(in_channels, out_channels)  # channels change where it strides

    def forward(self, x_BCFT: Tensor) -> Tensor:
        x_BCFT = self.subsample(x_BCFT)
        groups = clipped_groups(self.bn1(self.conv1(x_BCFT)), self.width)
        outputs: list[Tensor] = []
        for i, (conv, norm) in enumerate(zip(self.convs, self.bns)):
            x_BGFT = groups[i]
            if i > 0:
                before_BGFT = outputs[-1] = clipped_relu(outputs[-1])
                join = self.fuse_models[i - 1] if self.fuse_models else torch.add
                x_BGFT = join(before_BGFT, x_BGFT)
            outputs.append(norm(conv(x_BGFT)))
        *outputs, last_BGFT = outputs
        joined_BCFT = join_clipped(outputs, last_BGFT, groups[len(self.convs) :])
        y_BCFT = self.bn3(self.conv3(joined_BCFT))
        return clipped_relu(y_BCFT.add_(self.shortcut(x_BCFT)))


def clipped_relu(x: Tensor) -> Tensor:
    """Apply ReLU with a ceiling, in place."""
    return _Clipped.apply(x) if torch.is_grad_enabled() else F.hardtanh_(x, 0.0, CEILING)


def join_clipped(before: Sequence[Tensor], x: Tensor, after: Sequence[Tensor]) -> Tensor:
    """Join maps by channels; apply ReLU with a ceiling to x, but not to the others."""
    if torch.is_grad_enabled():
        return _Joined.apply(len(before), *before, x, *after)
    return torch.cat([*before, clipped_relu(x), *after], dim=1)


def clipped_groups(x: Tensor, width: int) -> Sequence[Tensor]:
    """Apply ReLU with a ceiling; return groups of `width` channels."""
    return _ClippedGroups.apply(x, width)


class _Clipped(torch.autograd.Function):
    """ReLU with a ceiling, in place; its gradient, bit for bit the same, needs only the result.

    The next layer keeps that anyway; torch's hardtanh keeps a copy of its input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mark_dirty(x)
        ctx.save_for_backward(F.hardtanh_(x, 0.0, CEILING))
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.ops.aten.hardtanh_backward(*grads, *ctx.saved_tensors, 0.0, CEILING)


class _ClippedGroups(torch.autograd.Function):
    """ReLU with a ceiling that writes each group of channels into memory of its own.

    A convolution would copy a slice of channels, in the forward and again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = [F.hardtanh(group, 0.0, CEILING) for group in x.split(width, dim=1)]
        ctx.save_for_backward(*groups)
        ctx.layout = x.shape, x.stride()
        return tuple(groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_x = grads[0].new_empty_strided(*ctx.layout)
        parts = d_x.split(grads[0].shape[1], dim=1)
        for d_y, y, part in zip(grads, ctx.saved_tensors, parts):
            torch.ops.aten.hardtanh_backward(d_y, y, 0.0, CEILING, grad_input=part)
        return d_x, None


class _Joined(torch.autograd.Function):
    """Maps joined by channels, one of them after ReLU with a ceiling.

    The gradient of each has its own memory: adding a slice of 16 channels to another gradient takes
    a CPU seven times as long.
    """

    @staticmethod
    def forward(ctx: Any, place: int, *maps: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.place, ctx.widths = place, [x.shape[1] for x in maps]
        joined = torch.cat(maps, dim=1)
        F.hardtanh_(joined.split(ctx.widths, dim=1)[place], 0.0, CEILING)
        ctx.save_for_backward(joined)
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (joined,), (d_joined,) = ctx.saved_tensors, grads
        slices = zip(d_joined.split(ctx.widths, dim=1), joined.split(ctx.widths, dim=1))
        d_maps = [
            torch.ops.aten.hardtanh_backward(d, y, 0.0, CEILING) if i == ctx.place else d.clone()
            for i, (d, y) in enumerate(slices)
        ]
        return None, *d_maps
