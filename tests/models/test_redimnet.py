"""ReDimNet: the weighted sums, the time context, precision, and the accepted mel bins.

Letters: B batch, T frames, C channels, F frequency bins, K = C x F, D embedding.
"""

import pytest
import torch
from refusals import refuses
from torch import nn

from speakerlab.models.redimnet import (
    SIZES,
    Backbone,
    ChannelNorm,
    FrequencyWeights,
    ReDimNet,
    TimeContext,
    weighted_sum,
)


def test_inputs_are_summed_with_weights_that_sum_to_one():
    """Equal to a softmax over a stack of all inputs, for each row of K."""
    outputs = [torch.randn(2, 12, 7) for _ in range(3)]
    weights = torch.randn(1, 3, 12, 1)
    expected = (torch.stack(outputs, 1) * weights.softmax(1)).sum(1)
    torch.testing.assert_close(weighted_sum(outputs, weights), expected)
    at_first = Backbone(SIZES["b1"], num_bins=24).inputs_weights["2"][:, :, :12]
    torch.testing.assert_close(weighted_sum(outputs, at_first), torch.stack(outputs).mean(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_channel_norm_of_large_values_is_computed_in_fp32(dtype):
    x_BCT = torch.tensor([1000.0, -1000.0]).view(1, 2, 1).repeat(1, 4, 5).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_BCT = ChannelNorm(8)(x_BCT)
    assert y_BCT.dtype == dtype
    torch.testing.assert_close(y_BCT, x_BCT / 1000)


@torch.no_grad()
def test_time_context_reaches_every_frame():
    """By attention, when the convolutions reach 3 + 9 + 15 + 29 = 56 frames."""
    context = TimeContext(6, 8).eval()
    x_BCT = torch.randn(1, 6, 130)
    moved_BCT = x_BCT.clone()
    moved_BCT[..., 0] += 1.0
    changed_T = (context(moved_BCT) - context(x_BCT)).abs().amax((0, 1))
    assert (changed_T > 0).all()
    nn.init.zeros_(context.get_parameter("tcm.4.attention.out_proj.weight"))
    changed_T = (context(moved_BCT) - context(x_BCT)).abs().amax((0, 1))
    assert (changed_T[:57] > 0).all() and not changed_T[57:].any()


@torch.no_grad()
def test_frequency_weights_scale_whole_bins():
    weights = FrequencyWeights(3, hidden=4)
    x_BCFT = torch.rand(2, 5, 3, 7) + 1
    ratio_BCFT = weights(x_BCFT) / x_BCFT
    mean_BF = x_BCFT.mean(3).mean(1)
    expected_BF = weights.exitation(weights.squeeze(mean_BF).relu()).sigmoid()
    torch.testing.assert_close(ratio_BCFT, expected_BF[:, None, :, None].expand(2, 5, 3, 7))


@pytest.mark.parametrize(("size", "multiple"), [("b0", 4), ("b1", 24), ("b2", 8), ("b6", 12)])
def test_bins_that_the_strides_do_not_divide_are_refused(size, multiple):
    with torch.device("meta"):
        assert ReDimNet(size=size, feat_dim=2 * multiple).feat_dim == 2 * multiple
        for feat_dim in (multiple + multiple // 2, 0):
            with refuses("ReDimNet", feat_dim, f"multiple of {multiple}"):
                ReDimNet(size=size, feat_dim=feat_dim)
