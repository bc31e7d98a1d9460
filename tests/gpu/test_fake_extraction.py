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

sys.path.append(str(Path(__file__).parent))

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
            _, _, num_samples = spans[0]
            wave_BS = torch.empty(len(spans), num_samples, dtype=torch.int16)
            yield wave_BS.pin_memory()


@pytest.fixture
def extract(make_config, monkeypatch):
    """Return extract() -> (rows of each batch read, forward passes queued by then); their sizes."""
    reason = fake_gpu.why_not()
    if reason is not None:
        pytest.skip(reason)
    nowhere: Any = None
    # The first has three windows.
    lengths = [35200, 9600] + 600 * [8000] + 40 * [8040]
    pieces = [Piece(nowhere, 0, 0, length) for length in lengths]
    embedder = build.build_embedder(make_config("model.max_seconds=1"))

    def run():
        reads = list[tuple[int, int]]()
        sizes = list[int]()  # rows of each forward pass

        def note_size(_module, args):
            (wave_BS,) = args
            sizes.append(len(wave_BS))

        def zeros_like(tensor):
            return np.zeros(tensor.shape)

        with fake_gpu.fake_gpu() as gpu:
            fake_gpu.to_gpu(embedder)
            embedder.register_forward_pre_hook(note_size)
            embedder.register_forward_pre_hook(lambda *_: gpu.begin_step())
            monkeypatch.setattr(batches, "DataLoader", Loader)
            monkeypatch.setattr(nn.Module, "to", lambda module, _: module)
            monkeypatch.setattr(Tensor, "numpy", zeros_like)
            rows_of = group_pieces(embedder, pieces)
            embedded = embed_batches(embedder, pieces, rows_of, device=GPU)
            for rows, _ in embedded:
                reads.append((len(rows), len(sizes)))
                # Nothing can follow the last one.
                num_windows = len(lengths) + 2
                if sum(sizes) == num_windows:
                    gpu.begin_step()
        return reads, sizes

    return run


def test_embeddings_are_read_when_the_next_ones_are_being_computed(extract):
    """A forward pass takes batches of one length, of 256 seconds together."""
    reads, sizes = extract()
    assert sizes == [3, 1, 512, 128]
    assert reads == [(1, 2), (1, 3)] + 5 * [(128, 4)]


def test_reading_them_at_once_is_found(extract, monkeypatch):
    def at_once(embedded):
        for batch, ready in embedded:
            ready.synchronize()
            yield from batch

    monkeypatch.setattr(batches, "_one_pass_late", at_once)
    with pytest.raises(Fault, match="host read"):
        extract()
