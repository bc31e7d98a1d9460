"""A packed batch is the same batch in one buffer."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from speakerlab.core.batch import ALIGNMENT, Batch, Draws


def tensors_of(batch: Batch) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


@pytest.fixture
def batch() -> Batch:
    """Five rows; sizes that are no multiples of anything, and empty tensors."""
    numbers = torch.arange(5)
    values = {"snr_db": torch.rand(3), "cells": torch.randint(9, (3, 7, 2))}
    draws = {
        "speed": [Draws(numbers[:2], {}, 1), Draws(numbers[2:3], {}, 2)],
        "noise": [Draws(numbers[:3], values)],
    }
    wave_BS = torch.randint(-9, 9, (5, 333), dtype=torch.int16)
    return Batch(
        wave_BS, torch.empty(0, 0, 0), numbers, numbers + 7, numbers + 9, draws
    )


def test_a_packed_batch_is_the_same_in_one_buffer(batch):
    packed = batch.pack()
    assert packed.draws["speed"][1].group == 2
    for packed_tensor, other in zip(tensors_of(packed), tensors_of(batch), strict=True):
        assert packed_tensor.dtype == other.dtype
        assert torch.equal(packed_tensor, other)
        assert packed_tensor.is_contiguous()
        assert (
            packed_tensor.storage_offset() * packed_tensor.element_size() % ALIGNMENT
            == 0
        )
    assert (
        len({tensor.untyped_storage().data_ptr() for tensor in tensors_of(packed)}) == 1
    )


@pytest.mark.parametrize("is_packed", [True, False])
def test_it_moves_as_one(batch, is_packed):
    moved = (batch.pack() if is_packed else batch).to(torch.device("meta"))
    for packed_tensor, other in zip(tensors_of(moved), tensors_of(batch), strict=True):
        assert packed_tensor.is_meta
        assert (packed_tensor.dtype, packed_tensor.shape) == (
            other.dtype,
            other.shape,
        )
    assert len({tensor.untyped_storage()._cdata for tensor in tensors_of(moved)}) == 1
    assert batch.to(torch.device("cpu")) is batch
