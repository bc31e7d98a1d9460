"""Res2Net: residual blocks whose 3x3 convolution is split into groups that feed each other.

In: feats_BTF, log mel features, fp32. Out: emb_BD.
Gao, Cheng, Zhao, Zhang, Yang, Torr: "Res2Net: A New Multi-scale Backbone Architecture", TPAMI 2021,
arXiv 1904.01169, for speakers in Zhou, Zhao, Wu: "ResNeXt and Res2Net Structures for Speaker
Verification", SLT 2021, arXiv 2007.02480. Names and shapes of the parameters are those of the
checkpoints that 3D-Speaker and WeSpeaker publish. ERes2Net and ERes2NetV2 are built on what is
here.

Letters: B batch, T frames, F mel bins (both divided by up to eight on the way), C channels,
D embedding.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.models.layout import hold_layout, skip_places
from speakerlab.models.pooling import make_pooling, refuse_unusable

# Joins the running output of a block (first) with its next group: built from their channels.
Fuse = Callable[[int], nn.Module]


class Res2Backbone(nn.Module):
    """Stem, four residual stages, pooling and linear layers; the last three stages halve T and F.

    A subclass adds what it fuses the stages with, calls `_add_head` last, and says in `maps` what
    is pooled. Of the `scale` groups in a block the last `num_passed` are not convolved; `fuse`
    joins the groups of the two deeper stages, a sum those of the others. `pooling` and `pool_eps`
    are explained in pooling.py. `two_emb_layer` adds ReLU, BatchNorm and a second linear layer,
    whose output is then the embedding.
    """

    def __init__(
        self,
        *,
        feat_dim: int,
        embed_dim: int,
        m_channels: int,
        blocks: tuple[int, ...],
        base_width: int,
        scale: int,
        expansion: int,
        num_passed: int = 0,
        fuse: Fuse | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if len(blocks) != 4:
            raise ValueError(f"{name}: blocks are counted per stage, got {blocks}; give four")
        if m_channels * base_width < 64:
            raise ValueError(
                f"{name}: a group has m_channels * base_width / 64 channels, got "
                f"{m_channels} * {base_width} / 64; give more of either"
            )
        if scale <= num_passed:
            raise ValueError(
                f"{name}: no group is convolved, got scale {scale}; give at least {num_passed + 1}"
            )
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        self.conv1 = nn.Conv2d(1, m_channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(m_channels)

        self.wide = [m_channels * expansion * 2**i for i in range(4)]  # channels after each stage
        stages: list[nn.Sequential] = []
        for i, depth in enumerate(blocks):
            units = [
                Res2Block(
                    (m_channels if i == 0 else self.wide[i - 1]) if j == 0 else self.wide[i],
                    self.wide[i],
                    width=m_channels * 2**i * base_width // 64,
                    scale=scale,
                    stride=2 if i > 0 and j == 0 else 1,
                    num_passed=num_passed,
                    fuse=fuse if i >= 2 else None,
                )
                for j in range(depth)
            ]
            stages.append(nn.Sequential(*units))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages

    def _add_head(self, *, pooling: str, pool_eps: float, two_emb_layer: bool) -> None:
        last_bins = -(-self.feat_dim // 8)  # each halving rounds up
        self.pool = make_pooling(pooling, self.wide[3] * last_bins, eps=pool_eps)
        self.min_frames = 8 * (self.pool.min_frames - 1) + 1  # and so it does with frames
        self.seg_1 = nn.Linear(self.pool.out_dim, self.embed_dim)
        if two_emb_layer:
            self.seg_bn_1 = nn.BatchNorm1d(self.embed_dim, affine=False)
            self.seg_2 = nn.Linear(self.embed_dim, self.embed_dim)
        self.two_emb_layer = two_emb_layer

    def maps(self, x_BCFT: Tensor) -> Tensor:
        """What is pooled, of what the stem gives."""
        return self.layer4(self.layer3(self.layer2(self.layer1(x_BCFT))))

    def forward(self, feats_BTF: Tensor) -> Tensor:
        """Embeddings (B, D) of features (B, T, F), T at least `min_frames`."""
        refuse_unusable(
            feats_BTF,
            name=type(self).__name__,
            feat_dim=self.feat_dim,
            min_frames=self.min_frames,
        )
        x_BCFT = feats_BTF.transpose(1, 2).contiguous().unsqueeze(1)
        x_BCFT = F.relu(self.bn1(self.conv1(x_BCFT)), inplace=True)
        emb_BD = self.seg_1(self.pool(hold_layout(self.maps(x_BCFT))))
        if self.two_emb_layer:
            emb_BD = self.seg_2(self.seg_bn_1(F.relu(emb_BD)))
        return emb_BD


class Res2Net(Res2Backbone):
    """Res2Net (defaults: 3D-Speaker's; WeSpeaker's Res2Net34_Base and, with `m_channels` 64,
    Res2Net34_Large have a `pool_eps` of 1e-7)."""

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 192,
        m_channels: int = 32,
        blocks: tuple[int, ...] = (3, 4, 6, 3),
        base_width: int = 32,
        scale: int = 2,
        expansion: int = 2,
        pooling: str = "tstp",
        pool_eps: float = 1e-8,
        two_emb_layer: bool = False,
    ) -> None:
        super().__init__(
            feat_dim=feat_dim,
            embed_dim=embed_dim,
            m_channels=m_channels,
            blocks=blocks,
            base_width=base_width,
            scale=scale,
            expansion=expansion,
            num_passed=1,
        )
        self._add_head(pooling=pooling, pool_eps=pool_eps, two_emb_layer=two_emb_layer)


class Res2Block(nn.Module):
    """A bottleneck block whose middle is 3x3 convolutions, each fed the output of the last, too.

    The channels are split into `scale` groups of `width`. All but the last `num_passed` join the
    running output, by a sum or by `fuse`, and are convolved. A `stride` skips places of the input:
    both convolutions that read it are 1x1, and the backward pass of a strided 1x1 convolution is
    slow on a CPU.
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
        self.stride = stride
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
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x_BCFT: Tensor) -> Tensor:
        x_BCFT = skip_places(x_BCFT, bins=self.stride, frames=self.stride)
        groups = clipped_relu(self.bn1(self.conv1(x_BCFT))).split(self.width, dim=1)
        outputs: list[Tensor] = []
        for i, (conv, norm) in enumerate(zip(self.convs, self.bns)):
            into = groups[i] if i == 0 else self._join(i, outputs[-1], groups[i])
            outputs.append(clipped_relu(norm(conv(into))))
        outputs.extend(groups[len(outputs) :])
        y_BCFT = self.bn3(self.conv3(torch.cat(outputs, dim=1)))
        return clipped_relu(y_BCFT.add_(self.shortcut(x_BCFT)))

    def _join(self, i: int, running: Tensor, group: Tensor) -> Tensor:
        return self.fuse_models[i - 1](running, group) if self.fuse_models else running + group


def clipped_relu(x: Tensor) -> Tensor:
    """ReLU with the ceiling of 20 that the published models were trained with; in place."""
    return F.hardtanh(x, 0.0, 20.0, inplace=True)
