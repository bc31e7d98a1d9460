"""Embeddings of pieces: a batch equals its rows, in order."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from voices import manifest_of

from speakerlab.config import build
from speakerlab.data import audio
from speakerlab.data.manifest import Manifest, Piece
from speakerlab.inference.batches import embed_batches, embed_pieces, group_pieces

RATE = 16000
CPU = torch.device("cpu")


@pytest.fixture
def embedder(make_config):
    """Small, with windows of half a second at most, its BatchNorms having seen data."""
    embedder = build.build_embedder(make_config("model.max_seconds=0.5"))
    with torch.no_grad():
        embedder(0.1 * torch.randn(4, RATE, generator=torch.Generator().manual_seed(1)))
    return embedder.eval()


@pytest.fixture
def recording(tmp_path: Path) -> Manifest:
    """2 s of noise."""
    wave_S = np.random.default_rng(0).normal(0, 3000, 2 * RATE).astype(np.int16)
    audio.write(tmp_path / "rec.wav", wave_S, RATE)
    return manifest_of(tmp_path / "rec.wav")


def test_shares_add_up_to_the_whole_bit_for_bit(embedder, recording):
    pieces = [Piece(recording, 0, 0, n) for n in (4000, 4000, 300, 8001, 9000, 16000, 720)]
    whole = embed_pieces(embedder, pieces, device=CPU)
    shares = [embed_pieces(embedder, pieces, device=CPU, share=(i, 3)) for i in range(3)]
    assert np.array_equal(sum(shares), whole)
    assert all((abs(share).max(axis=1) == 0).any() for share in shares)


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def one_by_one(embedder, pieces) -> np.ndarray:
    """Each piece read and embedded by hand."""
    rows = []
    for piece in pieces:
        wave_S = audio.read(piece.manifest.paths[0], piece.start, piece.num_samples)
        with torch.inference_mode():
            rows.append(embedder(torch.from_numpy(wave_S)[None].float() / 32768)[0].numpy())
    return np.stack(rows)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_equals_its_rows_in_order(embedder, recording, num_workers):
    # repeated (300, 719), sharing frames (4000, 4079), whole, cut in windows (beyond 8000)
    lengths = [4000, 300, 8000, 4079, 720, 4000, 8001, 300, 879, 719, 20000, 7999, 8001, 8040]
    pieces = [Piece(recording, 0, 37 * i, length) for i, length in enumerate(lengths)]
    batches = list(group_pieces(embedder, pieces))
    # {4000, 4000, 4079}, {300, 300}, {7999, 8000}, {720, 879}, {8001, 8001} share a batch
    assert len(batches) == 8
    wanted_ND = one_by_one(embedder, pieces)
    done = embed_batches(embedder, pieces, batches, device=CPU, num_workers=num_workers)
    for (rows, emb_BD), batch in zip(done, batches, strict=True):
        assert rows == batch and emb_BD.dtype == np.float32
        for row, emb_D in zip(rows, emb_BD):
            assert relative_error(emb_D, wanted_ND[row]) < 1e-5, lengths[row]
    for other in range(1, 14):  # they do differ
        assert relative_error(wanted_ND[0], wanted_ND[other]) > 1e-2


def test_no_pieces(embedder):
    assert embed_pieces(embedder, [], device=CPU).shape == (0, 16)


def test_a_batch_has_at_most_64_seconds(embedder, recording):
    pieces = [Piece(recording, 0, 10 * i, 8000) for i in range(200)]
    assert [len(rows) for rows in group_pieces(embedder, pieces)] == [128, 72]


@dataclass(frozen=True)
class Noted(Piece):
    """Notes how much is read at a time."""

    sizes: list[int] = field(default_factory=list)

    def read(self) -> np.ndarray:
        self.sizes.append(self.num_samples)
        return super().read()


def test_long_pieces_are_read_window_by_window(embedder, recording):
    """Two of 30,000 samples: four windows of 7,500 each, of the 8,000 that are allowed."""
    sizes: list[int] = []
    pieces = [Noted(recording, 0, start, 30000, sizes=sizes) for start in (0, 2000)]
    emb_ND = embed_pieces(embedder, pieces, device=CPU)
    assert sizes == [7500] * 8
    waves = [audio.read(p.manifest.paths[0], p.start, p.num_samples) for p in pieces]
    with torch.inference_mode():
        whole_ND = embedder(torch.from_numpy(np.stack(waves)).float() / 32768).numpy()
    assert np.array_equal(emb_ND, whole_ND)


def test_batches_at_a_time_change_no_bit(embedder, recording):
    pieces = [Piece(recording, 0, 50 * i, 4000 + 160 * (i % 7)) for i in range(20)]
    pieces += [Piece(recording, 0, 0, 20000)]
    batches = list(group_pieces(embedder, pieces))
    one, several = (
        list(embed_batches(embedder, pieces, batches, device=CPU, num_threads=threads))
        for threads in (1, 3)
    )
    assert [rows for rows, _ in one] == [rows for rows, _ in several] == batches
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(one, several))
