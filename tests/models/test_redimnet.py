"""ReDimNet: changing shape and back, the weighted sums, the blocks, and which mel bins fit.

Letters: B batch, T frames, C channels, F frequency bins, K = C x F, D embedding.
"""

import pytest
import torch
from refusals import refuses
from torch import nn
from torch.nn import functional

from speakerlab.models.redimnet import (
    SIZES,
    Backbone,
    ReDimNet,
    context_width,
    to_map,
    to_sequence,
    weighted_sum,
)
from speakerlab.models.redimnet_blocks import (
    NUM_HEADS,
    Attention,
    ChannelNorm,
    FrequencyWeights,
    TimeContext,
)

PUBLISHED_BINS = {"b0": 60, **{f"b{i}": 72 for i in range(1, 7)}}


def test_a_sequence_has_the_channels_of_a_bin_beside_each_other():
    x_BCFT = torch.tensor([[1.0, 2, 3], [10, 20, 30]]).view(1, 2, 3, 1)  # of two channels
    x_BKT = to_sequence(x_BCFT)
    assert x_BKT.flatten().tolist() == [1, 10, 2, 20, 3, 30]
    assert torch.equal(to_map(x_BKT, 2), x_BCFT)
    assert to_map(x_BKT, 3)[0, :, :, 0].tolist() == [[1, 20], [10, 3], [2, 30]]


def test_inputs_are_summed_with_weights_that_sum_to_one():
    """As a softmax over a stack of all inputs would, for each row of K."""
    outputs = [torch.randn(2, 12, 7) for _ in range(3)]
    weights = torch.randn(1, 3, 12, 1)
    expected = (torch.stack(outputs, 1) * weights.softmax(1)).sum(1)
    torch.testing.assert_close(weighted_sum(outputs, weights), expected)
    at_first = Backbone(SIZES["b1"], num_bins=24).inputs_weights["2"][:, :, :12]
    torch.testing.assert_close(weighted_sum(outputs, at_first), torch.stack(outputs).mean(0))


@pytest.mark.parametrize("shape", [(2, 6, 9), (2, 6, 5, 9)])
@torch.no_grad()
def test_channel_norm_is_layer_norm_over_channels(shape):
    norm = ChannelNorm(6)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(shape) * 5 + 3
    expected = functional.layer_norm(x.movedim(1, -1), (6,), norm.weight, norm.bias, 1e-6)
    torch.testing.assert_close(norm(x), expected.movedim(-1, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_channel_norm_of_large_values_is_computed_in_fp32(dtype):
    x_BCT = torch.tensor([1000.0, -1000.0]).view(1, 2, 1).repeat(1, 4, 5).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_BCT = ChannelNorm(8)(x_BCT)
    assert y_BCT.dtype == dtype
    torch.testing.assert_close(y_BCT, x_BCT / 1000)


@torch.no_grad()
def test_attention_is_the_formula():
    attention = Attention(2 * NUM_HEADS)
    x_BTC = torch.randn(3, 11, 2 * NUM_HEADS)
    heads = []
    for i in range(NUM_HEADS):
        query, key, value = (
            project(x_BTC)[..., 2 * i : 2 * i + 2]
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        heads.append((query @ key.mT / 2**0.5).softmax(-1) @ value)
    expected = attention.out_proj(torch.cat(heads, -1))
    torch.testing.assert_close(attention(x_BTC), expected, atol=1e-6, rtol=1e-5)


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


@pytest.mark.parametrize("size", SIZES)
def test_published_bins_give_the_published_widths(size):
    """No rounding to whole heads: K / reduction is the width of each time context, exactly."""
    num_rows = SIZES[size].channels * PUBLISHED_BINS[size]
    reductions = [stage.reduction for stage in SIZES[size].stages if stage.reduction]
    assert [context_width(num_rows, r) * r for r in reductions] == [num_rows] * len(reductions)


@pytest.mark.parametrize(("size", "multiple"), [("b0", 4), ("b1", 24), ("b2", 8), ("b6", 12)])
def test_bins_that_the_strides_do_not_divide_are_refused(size, multiple):
    with torch.device("meta"):
        assert ReDimNet(size=size, feat_dim=2 * multiple).feat_dim == 2 * multiple
        for feat_dim in (multiple + multiple // 2, 0):
            with refuses("ReDimNet", feat_dim, f"multiple of {multiple}"):
                ReDimNet(size=size, feat_dim=feat_dim)
