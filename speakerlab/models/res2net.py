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

# Builds, for a number of channels, a module that joins the running output of a block with its next
# group.
Fuse = Callable[[int], nn.Module]
CEILING = 20.0  # of the activations, with which the published models were trained


class Res2Net(ResidualModel):
    """Res2Net. The defaults are those of 3D-Speaker.

    WeSpeaker's Res2Net34_Base has a `pool_eps` of 1e-7, its Res2Net34_Large also `m_channels` 64.
    """

    # In each block, so many of the last groups of channels are passed on without a convolution.
    num_passed = 1
    # Joins the groups in the last two stages; None: they are added, as in the first two.
    fuse: Fuse | None = None

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
        # Else the first stage would have groups without channels, or no group to convolve.
        too_narrow = m_channels * base_width < 64
        if too_narrow or scale <= self.num_passed:
            raise ValueError(
                f"{type(self).__name__}: m_channels {m_channels} * base_width"
                f" {base_width} must be at least 64, the scale {scale} at least"
                f" {self.num_passed + 1}; increase them"
            )

        def make(in_channels: int, channels: int, *, stride: int) -> Res2Block:
            # Channels double from stage to stage, so this is the third or fourth stage.
            is_deep = channels >= 4 * m_channels
            return Res2Block(
                in_channels,
                channels * expansion,
                width=channels * base_width // 64,
                scale=scale,
                stride=stride,
                num_passed=self.num_passed,
                fuse=self.fuse if is_deep else None,
            )

        in_dim = self.add_stages(
            make,
            m_channels,
            blocks,
            expansion=expansion,
        )
        pool = POOLINGS[pooling](in_dim, eps=pool_eps)
        self.add_embedding_layers(pool)


class Res2Block(nn.Module):
    """Bottleneck block with 3x3 convolutions, each of which also reads the output of the last.

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
        # Once for both 1x1 convolutions that read the input: `conv1` and the shortcut.
        self.subsample = subsample(stride)
        num_convs = scale - num_passed
        inner_channels = width * scale
        self.conv1 = nn.Conv2d(in_channels, inner_channels, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner_channels)

        self.convs = nn.ModuleList()
        self.bns = nn.ModuleList()
        for _ in range(num_convs):
            conv = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
            self.convs.append(conv)
            self.bns.append(nn.BatchNorm2d(width))

        # Between two groups that follow one another.
        fusions: list[nn.Module] = []
        if fuse is not None:
            for _ in range(num_convs - 1):
                fusions.append(fuse(width))
        self.fuse_models = nn.ModuleList(fusions)

        self.conv3 = nn.Conv2d(inner_channels, out_channels, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        # A block that strides also changes the channels, so the shortcut projects there.
        self.shortcut = shortcut(in_channels, out_channels)

    def forward(self, x_BCFT: Tensor) -> Tensor:
        x_BCFT = self.subsample(x_BCFT)
        y_BCFT = self.bn1(self.conv1(x_BCFT))
        groups = clipped_groups(y_BCFT, self.width)
        outputs: list[Tensor] = []
        for index, (conv, norm) in enumerate(zip(self.convs, self.bns)):
            x_BGFT = groups[index]
            if index > 0:
                # The output of the group before goes through its ReLU and joins this group.
                previous_BGFT = clipped_relu(outputs[-1])
                outputs[-1] = previous_BGFT
                x_BGFT = self._join(index, previous_BGFT, x_BGFT)
            y_BGFT = norm(conv(x_BGFT))
            outputs.append(y_BGFT)

        # The last output is the only one that has not gone through its ReLU.
        *clipped, last_BGFT = outputs
        num_convs = len(self.convs)
        passed = groups[num_convs:]
        joined_BCFT = join_clipped(clipped, last_BGFT, passed)
        y_BCFT = self.bn3(self.conv3(joined_BCFT))
        y_BCFT += self.shortcut(x_BCFT)
        return clipped_relu(y_BCFT)

    def _join(self, index: int, output_BGFT: Tensor, group_BGFT: Tensor) -> Tensor:
        """Fuse or add the last output and the group at `index`."""
        if self.fuse_models:
            fuse = self.fuse_models[index - 1]
            return fuse(output_BGFT, group_BGFT)
        return torch.add(output_BGFT, group_BGFT)


def clipped_relu(x: Tensor) -> Tensor:
    """Apply ReLU with a ceiling, in place."""
    if torch.is_grad_enabled():
        return _Clipped.apply(x)
    return F.hardtanh_(x, 0.0, CEILING)


def join_clipped(
    before: Sequence[Tensor],
    x: Tensor,
    after: Sequence[Tensor],
) -> Tensor:
    """Join maps by channels; apply ReLU with a ceiling to x, but not to the others."""
    if torch.is_grad_enabled():
        place = len(before)
        return _Joined.apply(place, *before, x, *after)
    clipped = clipped_relu(x)
    maps = [*before, clipped, *after]
    return torch.cat(maps, dim=1)


def clipped_groups(x: Tensor, width: int) -> Sequence[Tensor]:
    """Apply ReLU with a ceiling; return groups of `width` channels."""
    return _ClippedGroups.apply(x, width)


class _Clipped(torch.autograd.Function):
    """ReLU with a ceiling, in place; its gradient, bit for bit the same, needs only the result.

    The next layer keeps the result anyway; torch's hardtanh keeps a copy of its input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mark_dirty(x)
        F.hardtanh_(x, 0.0, CEILING)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_y,) = grads
        (y,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(d_y, y, 0.0, CEILING)


class _ClippedGroups(torch.autograd.Function):
    """ReLU with a ceiling that writes each group of channels into separate memory.

    A convolution would copy a slice of channels, in the forward and again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        outputs: list[Tensor] = []
        for group in x.split(width, dim=1):
            clipped = F.hardtanh(group, 0.0, CEILING)
            outputs.append(clipped)
        ctx.save_for_backward(*outputs)
        ctx.layout = (x.shape, x.stride())
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        shape, strides = ctx.layout
        d_x = grads[0].new_empty_strided(shape, strides)
        width = grads[0].shape[1]
        # The groups are views, so filling them fills the whole gradient.
        d_groups = d_x.split(width, dim=1)
        for d_y, y, d_group in zip(grads, ctx.saved_tensors, d_groups):
            torch.ops.aten.hardtanh_backward(
                d_y,
                y,
                0.0,
                CEILING,
                grad_input=d_group,
            )
        return d_x, None


class _Joined(torch.autograd.Function):
    """Maps joined by channels, one of them after ReLU with a ceiling.

    The gradient of each map has its own memory: adding a slice of 16 channels to another gradient
    takes a CPU seven times as long.
    """

    @staticmethod
    def forward(ctx: Any, place: int, *maps: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        widths = [x.shape[1] for x in maps]
        ctx.place = place
        ctx.widths = widths
        joined = torch.cat(maps, dim=1)
        # The parts are views: the ReLU in place changes the joined map.
        parts = joined.split(widths, dim=1)
        F.hardtanh_(parts[place], 0.0, CEILING)
        ctx.save_for_backward(joined)
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (joined,) = ctx.saved_tensors
        (d_joined,) = grads
        parts = joined.split(ctx.widths, dim=1)
        d_parts = d_joined.split(ctx.widths, dim=1)
        d_maps: list[Tensor] = []
        for index, d_y in enumerate(d_parts):
            if index == ctx.place:
                y = parts[index]
                d_map = torch.ops.aten.hardtanh_backward(d_y, y, 0.0, CEILING)
            else:
                d_map = d_y.clone()
            d_maps.append(d_map)
        return None, *d_maps
