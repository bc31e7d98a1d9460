"""Embeddings of pieces: a batch equals its rows, in order; validation leaves no trace."""

from pathlib import Path

import numpy as np
import pytest
import torch

from speakerlab import build
from speakerlab.data import audio
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pieces import Piece
from speakerlab.extraction import Validation, embed_pieces, utterance_pieces
from speakerlab.training.distributed import start_ranks

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
def recording(tmp_path: Path) -> Path:
    """2 s of noise."""
    wave_S = np.random.default_rng(0).normal(0, 3000, 2 * RATE).astype(np.int16)
    audio.write(tmp_path / "rec.wav", wave_S, RATE)
    return tmp_path / "rec.wav"


def test_shares_add_up_to_the_whole_bit_for_bit(embedder, recording):
    pieces = [Piece(str(recording), 0, n) for n in (4000, 4000, 300, 8001, 9000, 16000, 720)]
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
        wave_S = audio.read(piece.path, piece.start, piece.num_samples)
        with torch.inference_mode():
            rows.append(embedder(torch.from_numpy(wave_S)[None].float() / 32768)[0].numpy())
    return np.stack(rows)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_equals_its_rows_in_order(embedder, recording, num_workers):
    # repeated (300, 719), sharing frames (4000, 4079), whole, cut in windows (beyond 8000)
    lengths = [4000, 300, 8000, 4079, 720, 4000, 8001, 300, 879, 719, 20000, 7999, 8001, 8040]
    pieces = [Piece(str(recording), 37 * i, length) for i, length in enumerate(lengths)]
    done = []
    emb_ND = embed_pieces(
        embedder, pieces, device=CPU, num_workers=num_workers, progress=done.append
    )
    assert emb_ND.dtype == np.float32
    assert emb_ND.shape == (14, 16)
    wanted_ND = one_by_one(embedder, pieces)
    for row in range(14):
        assert relative_error(emb_ND[row], wanted_ND[row]) < 1e-5, lengths[row]
    for other in range(1, 14):  # they do differ
        assert relative_error(emb_ND[0], wanted_ND[other]) > 1e-2
    assert done[-1] == 14
    assert done == sorted(done)
    # {4000, 4000, 4079}, {300, 300}, {7999, 8000}, {720, 879}, {8001, 8001} share a batch
    assert len(done) == 8


def test_no_pieces(embedder):
    assert embed_pieces(embedder, [], device=CPU).shape == (0, 16)


def test_large_groups_are_cut(embedder, recording):
    """64 s of audio at a time: 128 pieces of half a second."""
    pieces = [Piece(str(recording), 10 * i, 8000) for i in range(200)]
    done = []
    emb_ND = embed_pieces(embedder, pieces, device=CPU, progress=done.append)
    assert done == [128, 200]
    assert relative_error(emb_ND, one_by_one(embedder, pieces)) < 1e-5


def test_every_utterance_whole(make_data_dir):
    manifest = read_manifest([make_data_dir(speakers=[0, 1])], sample_rate=RATE)
    pieces = utterance_pieces(manifest)
    assert [piece.row for piece in pieces] == list(range(len(manifest)))
    assert [piece.num_samples for piece in pieces] == manifest.num_samples_N.tolist()
    assert {piece.start for piece in pieces} == {0}
    assert {type(piece.num_samples) for piece in pieces} == {int}  # no numpy: hashed, sent, printed


def test_validation_pairs_all_and_halves_lone_utterances(make_data_dir):
    folders = [
        make_data_dir("many", speakers=[0, 1], seconds=[0.5] * 12),
        make_data_dir("lone", speakers=[2, 3], seconds=[1.0]),
    ]
    validation = Validation(read_manifest(folders, sample_rate=RATE))
    assert validation.speaker_N == [0] * 10 + [1] * 10 + [2] * 2 + [3] * 2
    assert validation.num_halved == 2
    lone = validation.pieces[20:]
    assert [(p.manifest.ids[p.row], p.start, p.num_samples) for p in lone] == [
        ("spk2-0", 0, 8000),
        ("spk2-0", 8000, 8000),
        ("spk3-0", 0, 8000),
        ("spk3-0", 8000, 8000),
    ]
    for piece, speaker in zip(validation.pieces, validation.speaker_N):
        assert piece.manifest.ids[piece.row].startswith(f"spk{speaker}-")
    assert len(set(validation.pieces)) == 24


@pytest.mark.parametrize("training", [True, False])
def test_validation_gives_an_eer_and_leaves_no_trace(embedder, make_data_dir, training):
    manifest = read_manifest([make_data_dir(seconds=[0.5, 0.6])], sample_rate=RATE)
    embedder.train(training)
    before = {name: tensor.clone() for name, tensor in embedder.state_dict().items()}
    result = Validation(manifest).run(embedder, start_ranks(timeout_minutes=1))
    assert list(result) == ["eer"]
    assert 0 <= result["eer"] <= 1
    assert Validation(manifest).run(embedder, start_ranks(timeout_minutes=1)) == result
    assert embedder.training is training
    assert all(module.training is training for module in embedder.modules())
    for name, tensor in embedder.state_dict().items():
        assert torch.equal(tensor, before[name]), name
