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

every_pooling = pytest.mark.parametrize(
    ("name", "context"), [*((name, False) for name in POOLINGS), ("astp", True)]
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def make(name: str, context: bool, in_dim: int = 16) -> nn.Module:
    torch.manual_seed(0)
    more = {"global_context": True} if context else {}
    return POOLINGS[name](in_dim, eps=EPS, **more)


def test_statistics_by_hand():
    """1 2 6: mean 3, squares 4 + 1 + 9 over two; 0 1 2: mean 1, squares 1 + 0 + 1 over two."""
    x_BCT = torch.tensor([[[1.0, 2.0, 6.0], [0.0, 1.0, 2.0]]])
    pool = POOLINGS["tstp"](2, eps=0.0)
    assert pool(x_BCT)[0].tolist() == pytest.approx([3, 1, 7**0.5, 1], rel=1e-6)
    assert pool.out_dim == 4


def test_attention_by_hand():
    """Scores of 0 and ln 3 weigh 0 and 1 as a quarter and three: mean 3/4, variance 3/16."""
    pool = ASTP(1, eps=0.0, bottleneck=1)
    for parameter in pool.parameters():
        nn.init.zeros_(parameter)
    nn.init.ones_(pool.linear1.weight)
    nn.init.constant_(pool.linear2.weight, math.log(3) / math.tanh(1))
    stats = pool(torch.tensor([[[0.0, 1.0]]]))[0].tolist()
    assert stats == pytest.approx([3 / 4, (3 / 16) ** 0.5], rel=1e-6)


@every_pooling
@torch.no_grad()
def test_channels_and_bins_are_pooled_as_channels(name, context):
    pool = make(name, context)
    x_BCFT = torch.randn(3, 4, 4, 9)
    stats_BK = pool(x_BCFT)
    assert stats_BK.shape == (3, pool.out_dim)
    assert torch.equal(stats_BK, pool(x_BCFT.flatten(1, 2)))


@every_pooling
@every_dtype
def test_one_frame_is_exact(name, context, dtype):
    """Its mean is itself, its deviation the least there is, and its gradient finite."""
    pool = make(name, context)
    for scale in (0.0, 1.0, 1000.0):
        x_BCT = (torch.rand(2, 16, 1) * scale).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mean, std = pool(x_BCT).split(16, dim=1)
        assert torch.equal(mean, x_BCT.float().squeeze(-1))
        assert torch.equal(std, torch.full_like(std, EPS).sqrt())
        (mean.sum() + std.sum()).backward()
        assert x_BCT.grad is not None and x_BCT.grad.isfinite().all()
        assert torch.equal(x_BCT.grad, torch.ones_like(x_BCT))


@every_pooling
@every_dtype
@pytest.mark.parametrize("value", [0.0, 0.1, -1000.0])
def test_constants_have_finite_gradients(name, context, dtype, value):
    pool = make(name, context)
    x_BCT = torch.full((2, 16, 47), value, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean, std = pool(x_BCT).split(16, dim=1)
    expected = x_BCT[0, 0, 0].item()
    torch.testing.assert_close(mean, torch.full_like(mean, expected), rtol=2e-7, atol=0)
    torch.testing.assert_close(std, torch.full_like(std, EPS).sqrt(), rtol=1e-4, atol=0)
    (mean.sum() + std.sum()).backward()
    assert x_BCT.grad is not None and x_BCT.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in pool.parameters())


@every_pooling
@every_dtype
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_large_values_are_pooled_in_fp32(name, context, dtype, narrow):
    """Squares of 1000 are outside fp16, and their differences are lost in bf16."""
    pool = make(name, context)
    x_BCT = torch.tensor([1000.0, -1000.0]).repeat(2, 16, 50).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=narrow):
        stats_BK = pool(x_BCT)
    mean, std = stats_BK.split(16, dim=1)
    assert stats_BK.dtype == torch.float32
    if name == "tstp":
        torch.testing.assert_close(mean, torch.zeros_like(mean))
        torch.testing.assert_close(std, torch.full_like(std, 1000 * (100 / 99) ** 0.5))
    else:  # of two values, whatever the weights
        torch.testing.assert_close(mean.square() + std.square(), torch.full_like(mean, 1e6))
    stats_BK.sum().backward()
    assert x_BCT.grad is not None and x_BCT.grad.isfinite().all()


@every_pooling
@every_dtype
@torch.no_grad()
def test_narrow_types_only_store(name, context, dtype):
    pool = make(name, context)
    x_BCT = (1000 * torch.randn(3, 16, 47)).to(dtype)
    assert torch.equal(pool(x_BCT), pool(x_BCT.float()))


@torch.no_grad()
def test_constants_are_exact_under_uneven_weights():
    """Though the weights sum to one only nearly, which moves the mean of 1000 by 1e-4."""
    torch.manual_seed(0)
    mean, std = attentive_mean_std(torch.full((4, 8, 47), 1e3), torch.randn(4, 8, 47), eps=1e-12)
    assert torch.equal(mean, torch.full((4, 8), 1e3))
    assert torch.equal(std, torch.full((4, 8), 1e-12).sqrt())


@pytest.mark.parametrize("correction", [0, 1])
def test_gradients_are_the_numerical_ones(correction):
    """Though the frame that all is taken relative to counts as a constant."""
    torch.manual_seed(0)
    maps = [torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(partial(attentive_mean_std, eps=1e-12), maps)
    assert torch.autograd.gradcheck(partial(moments, correction=correction), maps[:1])


def test_pieces_for_the_cache_change_no_bit(monkeypatch):
    """Five utterances at once, in pairs and one at a time: same statistics, same gradients."""
    found = []
    for num_values in (5 * 48, 2 * 48, 1):
        monkeypatch.setattr(pooling, "CACHED_VALUES", num_values)
        generator = torch.Generator().manual_seed(0)
        x, scores = torch.randn(2, 5, 4, 12, generator=generator).requires_grad_()
        stats = *attentive_mean_std(x, scores, eps=EPS), *moments(x, correction=1)
        grads = torch.autograd.grad(sum(s.sin().sum() for s in stats), (x, scores))  # pyright: ignore[reportArgumentType]
        found.append(torch.cat([value.flatten() for value in (*stats, *grads)]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@torch.no_grad()
def test_context_is_convolved_as_if_it_stood_at_every_frame():
    conv = nn.Conv1d(9, 5, 1).double()
    x_BCT, context_BK = torch.randn(2, 3, 7).double(), torch.randn(2, 6).double()
    whole = conv(torch.cat([x_BCT, context_BK.unsqueeze(-1).expand(2, 6, 7)], dim=1))
    torch.testing.assert_close(convolve_with_context(conv, x_BCT, context_BK), whole)


@torch.no_grad()
def test_two_overflows_do_not_meet():
    """1e5 of the frame and -1e5 of the context, each outside fp16: no NaN comes of them."""
    conv = nn.Conv1d(2, 1, 1)
    conv.weight.copy_(torch.tensor([[[100.0], [-100.0]]]))
    with torch.autocast("cpu", dtype=torch.float16):
        sums = convolve_with_context(conv, torch.full((1, 1, 4), 1e3), torch.full((1, 1), 1e3))
    assert not sums.isnan().any()
