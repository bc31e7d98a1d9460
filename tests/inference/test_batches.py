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
    generator = torch.Generator().manual_seed(1)
    wave_BS = 0.1 * torch.randn(4, RATE, generator=generator)
    with torch.no_grad():
        embedder(wave_BS)
    return embedder.eval()


@pytest.fixture
def recording(tmp_path: Path) -> Manifest:
    """2 s of noise."""
    rng = np.random.default_rng(0)
    wave_S = rng.normal(0, 3000, 2 * RATE)
    path = tmp_path / "rec.wav"
    audio.write(path, wave_S.astype(np.int16), RATE)
    return manifest_of(path)


def test_shares_add_up_to_the_whole_bit_for_bit(embedder, recording):
    pieces = []
    for num_samples in (4000, 4000, 300, 8001, 9000, 16000, 720):
        pieces.append(Piece(recording, 0, 0, num_samples))
    whole_ND = embed_pieces(embedder, pieces, device=CPU)
    shares = []
    for index in range(3):
        share_ND = embed_pieces(embedder, pieces, device=CPU, share=(index, 3))
        shares.append(share_ND)
        # The rows of other shares are zero.
        is_zero_N = (share_ND == 0).all(axis=1)
        assert is_zero_N.any()
    assert np.array_equal(sum(shares), whole_ND)


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    difference = np.abs(a - b)
    largest = np.abs(b).max()
    return float(difference.max() / largest)


def read_pieces(pieces: list[Piece]) -> torch.Tensor:
    """wave_BS of pieces of equal length, read at once."""
    waves = []
    for piece in pieces:
        path = piece.manifest.paths[0]
        waves.append(audio.read(path, piece.start, piece.num_samples))
    wave_BS = torch.from_numpy(np.stack(waves))
    return wave_BS.float() / 32768


def one_by_one(embedder, pieces) -> np.ndarray:
    """Each piece read and embedded by hand."""
    rows = []
    for piece in pieces:
        wave_BS = read_pieces([piece])
        with torch.inference_mode():
            (emb_D,) = embedder(wave_BS)
        rows.append(emb_D.numpy())
    return np.stack(rows)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_equals_its_rows_in_order(embedder, recording, num_workers):
    # Repeated (300, 719), sharing frames (4000, 4079), whole, cut in windows (beyond 8000).
    lengths = [
        4000,
        300,
        8000,
        4079,
        720,
        4000,
        8001,
        300,
        879,
        719,
        20000,
        7999,
        8001,
        8040,
    ]
    pieces = []
    for index, length in enumerate(lengths):
        pieces.append(Piece(recording, 0, 37 * index, length))
    batches = list(group_pieces(embedder, pieces))
    # {4000, 4000, 4079}, {300, 300}, {7999, 8000}, {720, 879}, {8001, 8001} share a batch
    assert len(batches) == 8
    wanted_ND = one_by_one(embedder, pieces)
    done = embed_batches(
        embedder,
        pieces,
        batches,
        device=CPU,
        num_workers=num_workers,
    )
    for (rows, emb_BD), batch in zip(done, batches, strict=True):
        assert rows == batch
        assert emb_BD.dtype == np.float32
        for row, emb_D in zip(rows, emb_BD):
            assert relative_error(emb_D, wanted_ND[row]) < 1e-5, lengths[row]

    # The pieces do differ.
    first_D, *others = wanted_ND
    for other_D in others:
        assert relative_error(first_D, other_D) > 1e-2


def test_no_pieces(embedder):
    emb_ND = embed_pieces(embedder, [], device=CPU)
    assert emb_ND.shape == (0, 16)


def test_a_batch_has_at_most_64_seconds(embedder, recording):
    pieces = [Piece(recording, 0, 10 * i, 8000) for i in range(200)]
    batches = group_pieces(embedder, pieces)
    sizes = [len(rows) for rows in batches]
    assert sizes == [128, 72]


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
    pieces: list[Piece] = []
    for start in (0, 2000):
        pieces.append(Noted(recording, 0, start, 30000, sizes=sizes))
    emb_ND = embed_pieces(embedder, pieces, device=CPU)
    assert sizes == 8 * [7500]
    wave_BS = read_pieces(pieces)
    with torch.inference_mode():
        whole_ND = embedder(wave_BS).numpy()
    assert np.array_equal(emb_ND, whole_ND)


def test_batches_at_a_time_change_no_bit(embedder, recording):
    pieces = []
    for index in range(20):
        num_samples = 4000 + 160 * (index % 7)
        pieces.append(Piece(recording, 0, 50 * index, num_samples))
    pieces.append(Piece(recording, 0, 0, 20000))
    batches = list(group_pieces(embedder, pieces))
    one_at_a_time = embed_batches(
        embedder,
        pieces,
        batches,
        device=CPU,
        num_threads=1,
    )
    three_at_a_time = embed_batches(
        embedder,
        pieces,
        batches,
        device=CPU,
        num_threads=3,
    )
    expected = list(one_at_a_time)
    results = list(three_at_a_time)
    assert [rows for rows, _ in expected] == batches
    assert [rows for rows, _ in results] == batches
    for (_, emb_BD), (_, expected_BD) in zip(results, expected):
        assert np.array_equal(emb_BD, expected_BD)
