"""A bad step leaves BatchNorm as it was and is counted; too many in a row end the run."""

import pytest
import torch
from torch import nn

from speakerlab.training.guard import MAX_BAD_STEPS, Guard, NumericError


def test_a_refused_step_restores_batchnorm():
    layer = nn.BatchNorm1d(2)
    layer(torch.randn(8, 2))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    guard = Guard(nn.Sequential(layer))
    guard.before_step()
    layer(torch.full((8, 2), float("inf")))
    assert layer.running_mean is not None and not layer.running_mean.isfinite().all()
    assert not guard.accepts(float("nan"), step=5)
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert guard.skipped == 1


def test_a_good_step_ends_a_row_of_bad_ones():
    guard = Guard(nn.Linear(1, 1))
    for _ in range(MAX_BAD_STEPS - 1):
        assert not guard.accepts(float("inf"), step=0)
    assert guard.accepts(1.0, step=0)
    assert not guard.accepts(float("nan"), step=0)
    assert guard.skipped == MAX_BAD_STEPS


def test_twenty_in_a_row_end_the_run():
    guard = Guard(nn.Linear(1, 1))
    with pytest.raises(NumericError, match=r"step 7: 20 steps in a row had no finite gradient"):
        for _ in range(20):
            guard.accepts(float("nan"), step=7)
