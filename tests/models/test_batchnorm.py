"""Quick batch normalisation against torch's own: values, gradients, running statistics, exceptions.

Letters: B batch, C channels, F mel bins, T frames.
"""

import copy

import pytest
import torch
from torch import nn

from speakerlab.models.batchnorm import BatchNorm2d, moments


def pair(dtype=torch.float64, **kwargs):
    """Ours, and torch's with the same parameters and statistics, none of which is the initial."""
    torch.manual_seed(0)
    ours = BatchNorm2d(5, **kwargs).to(dtype)
    if ours.affine:
        ours.weight.data.uniform_(-1, 2)
        ours.bias.data.normal_()
    if ours.running_mean is not None:
        ours.running_mean.normal_()
        ours.running_var.uniform_(0.5, 2)
    theirs = nn.BatchNorm2d(5, **kwargs).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def difference(ours, theirs, x_BCFT, steps=2):
    """The largest between outputs, gradients and buffers after some steps in training."""
    weight = torch.randn_like(x_BCFT)
    inputs = [x_BCFT.clone().requires_grad_() for _ in range(2)]
    for _ in range(steps):
        outputs = [norm(x) for norm, x in zip((ours, theirs), inputs)]
        for y in outputs:
            (y * weight).sum().backward()
    pairs = [outputs, [x.grad for x in inputs]]
    pairs += zip((p.grad for p in ours.parameters()), (p.grad for p in theirs.parameters()))
    pairs += zip(ours.buffers(), theirs.buffers())
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("momentum", [0.1, 1 - 0.9**0.25])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_is_torchs_in_training(momentum, layout):
    ours, theirs = pair(momentum=momentum)
    x_BCFT = 3 * torch.randn(4, 5, 7, 6, dtype=torch.float64) + 2
    assert difference(ours, theirs, x_BCFT.contiguous(memory_format=layout)) < 1e-12
    assert ours.num_batches_tracked == 2


@pytest.mark.parametrize(
    "kwargs", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}]
)
def test_other_kinds_are_left_to_torch(kwargs):
    ours, theirs = pair(**kwargs)
    assert difference(ours, theirs, torch.randn(4, 5, 7, 6, dtype=torch.float64)) == 0


def test_is_torchs_in_evaluation_and_leaves_the_statistics():
    ours, theirs = pair()
    before = copy.deepcopy(ours.state_dict())
    x_BCFT = torch.randn(4, 5, 7, 6, dtype=torch.float64)
    assert torch.equal(ours.eval()(x_BCFT), theirs.eval()(x_BCFT))
    assert all(torch.equal(before[name], value) for name, value in ours.state_dict().items())


def test_one_value_for_each_channel_is_refused_as_by_torch():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        pair()[0](torch.randn(1, 5, 1, 1, dtype=torch.float64))


def test_a_large_mean_costs_no_digits():
    """The mean of squares less the square of the mean would be off by more than the variance."""
    x_BCFT = torch.randn(8, 3, 20, 50) + 5000
    exact = x_BCFT.double().var((0, 2, 3), correction=0)
    assert (moments(x_BCFT).var_C / exact - 1).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_short_floats_are_fp32(dtype):
    ours, theirs = pair(torch.float32)
    x_BCFT = (300 * torch.randn(4, 5, 7, 6)).to(dtype)  # squares are outside fp16
    y_BCFT = ours(x_BCFT)
    assert y_BCFT.dtype == dtype
    torch.testing.assert_close(y_BCFT.float(), theirs(x_BCFT.float()), atol=0.03, rtol=0.02)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-4, atol=0)


def test_can_be_synchronised():
    """Conversion finds it, and what it becomes is torch's."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(BatchNorm2d(5)))
    assert type(model[0]) is nn.SyncBatchNorm
