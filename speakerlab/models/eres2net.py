"""ERes2Net and ERes2NetV2: Res2Nets with attentive fusion inside their blocks and between stages.

Chen, Zheng, Wang, Cheng, Chen, Qi: "An Enhanced Res2Net with Local and Global Feature Fusion for
Speaker Verification", Interspeech 2023, arXiv 2305.12838.
Chen, Zheng, Wang, Cheng, Chen, Zhang, Li: "ERes2NetV2: Boosting Short-Duration Speaker
Verification Performance with Computational Efficiency", Interspeech 2024, arXiv 2406.02167.

Letters: B batch, T frames, F mel bins (both divided by up to eight on the way), C channels.
A gradient has the name of its value after `d_`.
"""

from functools import partialmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speakerlab.models.res2net import Res2Net


class AttentiveFusion(nn.Module):
    """Weighs two maps against each other, per place and channel: x * (1 + a) + y * (1 - a).

    `a` = tanh(z) is computed from both maps. Written as 2 * (s * x + (1 - s) * y) with
    s = sigmoid(2 z), it takes fewer passes over the maps, and sigmoid is faster than tanh.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(1, channels // 4)
        self.local_att = nn.Sequential(
            nn.Conv2d(2 * channels, hidden, kernel_size=1),
            nn.BatchNorm2d(hidden),
            # Not in place: autograd would then copy its input.
            nn.SiLU(),
            nn.Conv2d(hidden, channels, kernel_size=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x_BCFT: Tensor, y_BCFT: Tensor) -> Tensor:
        both_B2CFT = torch.cat([x_BCFT, y_BCFT], dim=1)
        z_BCFT = self.local_att(both_B2CFT)
        return _Weighted.apply(z_BCFT, both_B2CFT, x_BCFT, y_BCFT)


class _Weighted(torch.autograd.Function):
    """x * (1 + tanh(z)) + y * (1 - tanh(z)), with the gradients, bit for bit, of torch's lerp.

    For the backward pass, torch's lerp would keep x and y. Here they are read from their
    concatenation, which the first layer of `local_att` keeps anyway.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        z_BCFT: Tensor,
        both_B2CFT: Tensor,
        x_BCFT: Tensor,
        y_BCFT: Tensor,
    ) -> Tensor:
        # tanh(z) = 2 sigmoid(2 z) - 1
        s_BCFT = (2 * z_BCFT).sigmoid_()
        ctx.save_for_backward(s_BCFT, both_B2CFT)
        return torch.lerp(y_BCFT, x_BCFT, s_BCFT) * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_BCFT,) = grads
        s_BCFT, both_B2CFT = ctx.saved_tensors
        x_BCFT, y_BCFT = both_B2CFT.chunk(2, dim=1)
        twice_BCFT = 2 * d_BCFT
        # The result is 2 (y + s (x - y)), so this is its gradient with respect to x, s, z and y.
        d_x_BCFT = twice_BCFT * s_BCFT
        d_s_BCFT = (x_BCFT - y_BCFT).mul_(twice_BCFT)
        d_z_BCFT = torch.ops.aten.sigmoid_backward(d_s_BCFT, s_BCFT)
        d_z_BCFT.mul_(2)
        d_y_BCFT = twice_BCFT.mul_(1 - s_BCFT)
        # `both` was saved only for the values of x and y, which have their own gradients.
        return d_z_BCFT, None, d_x_BCFT, d_y_BCFT


class ERes2Net(Res2Net):
    """ERes2Net. The defaults are those of the published base model.

    The large model has `m_channels` 64; the huge one, also called "aug", has `m_channels` 64,
    `base_width` 24, `scale` 3 and `expansion` 4. WeSpeaker's models have a `pool_eps` of 1e-7.
    Global fusion runs beside the stages: the map fused so far is strided down and merged with the
    output of the next stage.
    """

    num_passed = 0
    fuse = AttentiveFusion

    def add_fusions(self, *stage_channels: int) -> None:
        # Two maps can be fused only if they have one size, so the larger one is strided down first.
        channels1, channels2, channels3, channels4 = stage_channels
        self.layer1_downsample = halve(channels1, channels2)
        self.layer2_downsample = halve(channels2, channels3)
        self.layer3_downsample = halve(channels3, channels4)
        self.fuse_mode12 = AttentiveFusion(channels2)
        self.fuse_mode123 = AttentiveFusion(channels3)
        self.fuse_mode1234 = AttentiveFusion(channels4)

    def maps(self, x_BCFT: Tensor) -> Tensor:
        # The stages read one another's plain outputs; the fused maps run beside them.
        stage1 = self.layer1(x_BCFT)
        stage2 = self.layer2(stage1)
        strided = self.layer1_downsample(stage1)
        fused = self.fuse_mode12(stage2, strided)

        stage3 = self.layer3(stage2)
        strided = self.layer2_downsample(fused)
        fused = self.fuse_mode123(stage3, strided)

        stage4 = self.layer4(stage3)
        strided = self.layer3_downsample(fused)
        return self.fuse_mode1234(stage4, strided)


class ERes2NetV2(Res2Net):
    """ERes2NetV2, with wider stages, of which only the last two are fused.

    The defaults are those of the published w26s2ep2; w24s4ep4 has `base_width` 24, `scale` 4 and
    `expansion` 4.
    """

    num_passed = 0
    fuse = AttentiveFusion

    # The constructor of Res2Net, and so its schema, with other defaults.
    __init__ = partialmethod(Res2Net.__init__, m_channels=64, base_width=26)  # pyright: ignore[reportAssignmentType]

    def add_fusions(self, *stage_channels: int) -> None:
        _, _, channels3, channels4 = stage_channels
        self.layer3_ds = halve(channels3, channels4)
        self.fuse34 = AttentiveFusion(channels4)

    def maps(self, x_BCFT: Tensor) -> Tensor:
        x_BCFT = self.layer1(x_BCFT)
        x_BCFT = self.layer2(x_BCFT)
        stage3 = self.layer3(x_BCFT)
        stage4 = self.layer4(stage3)
        strided = self.layer3_ds(stage3)
        return self.fuse34(stage4, strided)


def halve(in_channels: int, out_channels: int) -> nn.Conv2d:
    """Return a convolution that halves frames and bins, rounding up."""
    return nn.Conv2d(
        in_channels,
        out_channels,
        kernel_size=3,
        stride=2,
        padding=1,
        bias=False,
    )
