"""Extraction on tensors without data: the host reads embeddings while the GPU computes the next.

Letters: B rows, S samples.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import fake_gpu
from fake_gpu import GPU
from fake_kernels import Fault

from speakerlab.config import build
from speakerlab.data.manifest import Piece
from speakerlab.inference import batches
from speakerlab.inference.batches import embed_batches, group_pieces


class Loader:
    """A `DataLoader` of waves without data, in page-locked memory."""

    def __init__(self, _pieces, *, batch_sampler, pin_memory, **_):
        assert pin_memory
        self.batches = batch_sampler

    def __iter__(self):
        for spans in self.batches:
            yield torch.empty(len(spans), spans[0][2], dtype=torch.int16).pin_memory()


@pytest.fixture
def extract(make_config, monkeypatch):
    """extract() -> each batch's rows and the forward passes queued by then; their rows."""
    reason = fake_gpu.why_not()
    if reason is not None:
        pytest.skip(reason)
    nowhere: Any = None
    lengths = [35200, 9600, *[8000] * 600, *[8040] * 40]  # the first has three windows
    pieces = [Piece(nowhere, 0, 0, length) for length in lengths]
    embedder = build.build_embedder(make_config("model.max_seconds=1"))

    def run():
        found, sizes = list[tuple[int, int]](), list[int]()
        with fake_gpu.fake_gpu() as gpu:
            fake_gpu.to_gpu(embedder)
            embedder.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
            embedder.register_forward_pre_hook(lambda *_: gpu.begin_step())
            monkeypatch.setattr(batches, "DataLoader", Loader)
            monkeypatch.setattr(nn.Module, "to", lambda module, _: module)
            monkeypatch.setattr(Tensor, "numpy", lambda tensor: np.zeros(tensor.shape))
            rows_of = group_pieces(embedder, pieces)
            for rows, _ in embed_batches(embedder, pieces, rows_of, device=GPU):
                found.append((len(rows), len(sizes)))
                if sum(sizes) == len(lengths) + 2:  # nothing can follow the last one
                    gpu.begin_step()
        return found, sizes

    return run


def test_embeddings_are_read_when_the_next_ones_are_being_computed(extract):
    """A forward pass takes batches of one length, of 256 seconds together."""
    found, sizes = extract()
    assert sizes == [3, 1, 512, 128]
    assert found == [(1, 2), (1, 3), *[(128, 4)] * 5]


def test_reading_them_at_once_is_found(extract, monkeypatch):
    def at_once(found):
        for each, ready in found:
            ready.synchronize()
            yield from each

    monkeypatch.setattr(batches, "_one_late", at_once)
    with pytest.raises(Fault, match="host read"):
        extract()
