"""The poolings by hand, and at the edges: one frame, constants, large values in narrow types.

Letters: B batch, T frames, F mel bins, C channels, K mean and deviation of C.
"""

import math
from functools import partial

import pytest
import torch
from torch import nn

from speakerlab.models import pooling
from speakerlab.models.pooling import (
    ASTP,
    POOLINGS,
    attentive_mean_std,
    convolve_with_context,
    moments,
)

EPS = 1e-7
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_CHANNELS = 16

CASES = [(name, False) for name in POOLINGS]
CASES.append(("astp", True))
every_pooling = pytest.mark.parametrize(("name", "context"), CASES)

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def make(name: str, context: bool) -> nn.Module:
    torch.manual_seed(0)
    options = {"global_context": True} if context else {}
    return POOLINGS[name](NUM_CHANNELS, eps=EPS, **options)


def test_statistics_by_hand():
    """1 2 6: mean 3, squares 4 + 1 + 9 over two; 0 1 2: mean 1, squares 1 + 0 + 1 over two."""
    first_T = [1.0, 2.0, 6.0]
    second_T = [0.0, 1.0, 2.0]
    x_BCT = torch.tensor([[first_T, second_T]])
    pool = POOLINGS["tstp"](2, eps=0.0)
    (stats_K,) = pool(x_BCT).tolist()
    means = [3, 1]
    deviations = [7**0.5, 1]
    assert stats_K == pytest.approx(means + deviations, rel=1e-6)
    assert pool.out_dim == 4


def test_attention_by_hand():
    """Scores of 0 and ln 3 weigh 0 and 1 as a quarter and three: mean 3/4, variance 3/16."""
    pool = ASTP(1, eps=0.0, bottleneck=1)
    for parameter in pool.parameters():
        nn.init.zeros_(parameter)
    nn.init.ones_(pool.linear1.weight)
    # linear2 follows a tanh.
    scale = math.log(3) / math.tanh(1)
    nn.init.constant_(pool.linear2.weight, scale)

    x_BCT = torch.tensor([[[0.0, 1.0]]])
    (stats_K,) = pool(x_BCT)
    mean, deviation = stats_K.tolist()
    variance = deviation**2
    assert mean == pytest.approx(0.75, rel=1e-6)
    assert variance == pytest.approx(0.1875, rel=1e-6)


@every_pooling
@torch.no_grad()
def test_channels_and_bins_are_pooled_as_channels(name, context):
    pool = make(name, context)
    x_BCFT = torch.randn(3, 4, 4, 9)
    stats_BK = pool(x_BCFT)
    assert stats_BK.shape == (3, pool.out_dim)
    x_BCT = x_BCFT.flatten(1, 2)
    assert torch.equal(stats_BK, pool(x_BCT))


@every_pooling
@every_dtype
def test_one_frame_is_exact(name, context, dtype):
    """Its mean is itself, its deviation the least there is, and its gradient finite."""
    pool = make(name, context)
    for scale in (0.0, 1.0, 1000.0):
        x_BCT = scale * torch.rand(2, NUM_CHANNELS, 1)
        x_BCT = x_BCT.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            stats_BK = pool(x_BCT)
        mean, std = stats_BK.chunk(2, dim=1)
        expected_mean = x_BCT.float().squeeze(-1)
        expected_std = torch.full_like(std, EPS).sqrt()
        assert torch.equal(mean, expected_mean)
        assert torch.equal(std, expected_std)

        # The gradient of the mean alone: the deviation is the constant sqrt(EPS).
        stats_BK.sum().backward()
        assert x_BCT.grad is not None
        assert x_BCT.grad.isfinite().all()
        expected_grad = torch.ones_like(x_BCT)
        assert torch.equal(x_BCT.grad, expected_grad)


@every_pooling
@every_dtype
@pytest.mark.parametrize("value", [0.0, 0.1, -1000.0])
def test_constants_have_finite_gradients(name, context, dtype, value):
    pool = make(name, context)
    x_BCT = torch.full((2, NUM_CHANNELS, 47), value, dtype=dtype)
    x_BCT.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        stats_BK = pool(x_BCT)
    mean, std = stats_BK.chunk(2, dim=1)

    # The mean is the value as the type stores it.
    rounded_value = x_BCT.detach().max().item()
    expected_mean = torch.full_like(mean, rounded_value)
    expected_std = torch.full_like(std, EPS).sqrt()
    torch.testing.assert_close(mean, expected_mean, rtol=2e-7, atol=0)
    torch.testing.assert_close(std, expected_std, rtol=1e-4, atol=0)

    stats_BK.sum().backward()
    assert x_BCT.grad is not None
    assert x_BCT.grad.isfinite().all()
    for parameter in pool.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@every_pooling
@every_dtype
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_large_values_are_pooled_in_fp32(name, context, dtype, narrow):
    """Squares of 1000 are outside fp16, and their differences are lost in bf16."""
    pool = make(name, context)
    plus_and_minus = torch.tensor([1000.0, -1000.0])
    x_BCT = plus_and_minus.repeat(2, NUM_CHANNELS, 50)
    x_BCT = x_BCT.to(dtype).requires_grad_()
    with torch.autocast("cpu", narrow):
        stats_BK = pool(x_BCT)
    assert stats_BK.dtype == torch.float32

    mean, std = stats_BK.chunk(2, dim=1)
    if name == "tstp":
        # 100 frames, and the variance is the sum of squares over 99.
        deviation = 1000 * (100 / 99) ** 0.5
        expected_std = torch.full_like(std, deviation)
        expected_mean = torch.zeros_like(mean)
        torch.testing.assert_close(mean, expected_mean)
        torch.testing.assert_close(std, expected_std)
    else:
        # The mean square of two values is the same for any weights.
        mean_square = mean.square() + std.square()
        expected = torch.full_like(mean, 1e6)
        torch.testing.assert_close(mean_square, expected)
    stats_BK.sum().backward()
    assert x_BCT.grad is not None
    assert x_BCT.grad.isfinite().all()


@every_pooling
@every_dtype
@torch.no_grad()
def test_narrow_types_only_store(name, context, dtype):
    pool = make(name, context)
    x_BCT = 1000 * torch.randn(3, NUM_CHANNELS, 47)
    narrow_BCT = x_BCT.to(dtype)
    stats_BK = pool(narrow_BCT)
    wide_stats_BK = pool(narrow_BCT.float())
    assert torch.equal(stats_BK, wide_stats_BK)


@torch.no_grad()
def test_constants_are_exact_under_uneven_weights():
    """Though the weights sum to one only nearly, which moves the mean of 1000 by 1e-4."""
    torch.manual_seed(0)
    scores_BCT = torch.randn(4, 8, 47)
    x_BCT = torch.full_like(scores_BCT, 1e3)
    mean, std = attentive_mean_std(x_BCT, scores_BCT, eps=1e-12)
    expected_mean = torch.full_like(mean, 1e3)
    variance = torch.full_like(std, 1e-12)
    expected_std = variance.sqrt()
    assert torch.equal(mean, expected_mean)
    assert torch.equal(std, expected_std)


@pytest.mark.parametrize("correction", [0, 1])
def test_gradients_are_the_numerical_ones(correction):
    """Though the frame that all is taken relative to counts as a constant."""
    torch.manual_seed(0)
    x_BCT = torch.randn(2, 3, 5, dtype=torch.float64)
    scores_BCT = torch.randn(2, 3, 5, dtype=torch.float64)
    x_BCT.requires_grad_()
    scores_BCT.requires_grad_()
    attention = partial(attentive_mean_std, eps=1e-12)
    assert torch.autograd.gradcheck(attention, [x_BCT, scores_BCT])
    plain = partial(moments, correction=correction)
    assert torch.autograd.gradcheck(plain, [x_BCT])


def test_pieces_for_the_cache_change_no_bit(monkeypatch):
    """Five utterances at once, in pairs and one at a time: same statistics, same gradients."""
    outputs = []
    utterance = 4 * 12  # values
    for num_values in (5 * utterance, 2 * utterance, 1):
        monkeypatch.setattr(pooling, "CACHED_VALUES", num_values)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(2, 5, 4, 12, generator=generator)
        x_BCT, scores_BCT = inputs.requires_grad_()
        attentive_stats = attentive_mean_std(x_BCT, scores_BCT, eps=EPS)
        plain_stats = moments(x_BCT, correction=1)
        stats = [*attentive_stats, *plain_stats]

        # A loss in which each statistic has another weight.
        losses = [value.sin().sum() for value in stats]
        loss = torch.stack(losses).sum()
        grads = torch.autograd.grad(loss, [x_BCT, scores_BCT])
        results = [*stats, *grads]
        values = [result.flatten() for result in results]
        outputs.append(torch.cat(values))
    at_once, in_pairs, one_at_a_time = outputs
    assert torch.equal(at_once, in_pairs)
    assert torch.equal(at_once, one_at_a_time)


@torch.no_grad()
def test_context_is_convolved_as_if_it_stood_at_every_frame():
    conv = nn.Conv1d(9, 5, 1).double()
    x_BCT = torch.randn(2, 3, 7).double()
    context_BK = torch.randn(2, 6).double()
    context_BKT = context_BK[:, :, None].expand(2, 6, 7)
    joined = torch.cat([x_BCT, context_BKT], dim=1)
    output = convolve_with_context(conv, x_BCT, context_BK)
    torch.testing.assert_close(output, conv(joined))


@torch.no_grad()
def test_two_overflows_do_not_meet():
    """1e5 of the frame and -1e5 of the context, each outside fp16: no NaN comes of them."""
    conv = nn.Conv1d(2, 1, 1)
    weight = torch.tensor([100.0, -100.0])
    conv.weight.copy_(weight[None, :, None])
    x_BCT = torch.full((1, 1, 4), 1e3)
    context_BK = torch.full((1, 1), 1e3)
    with torch.autocast("cpu", torch.float16):
        sums = convolve_with_context(conv, x_BCT, context_BK)
    assert not sums.isnan().any()
