"""Validation on held-out speakers or utterances."""

import numpy as np
import pytest
import torch

from speakerlab.config import build
from speakerlab.data.manifest import read_manifest
from speakerlab.experiments import validation as validation_module
from speakerlab.experiments.validation import ClassValidation, PairValidation
from speakerlab.inference.batches import embed_pieces
from speakerlab.training.distributed import start_ranks

RATE = 16000


@pytest.fixture
def embedder(make_config):
    return build.build_embedder(make_config("model.max_seconds=0.5"))


def test_the_only_utterance_of_a_speaker_is_cut(make_data_dir):
    folders = [
        make_data_dir("many", speakers=[0, 1], seconds=[0.5] * 12),
        make_data_dir("short", speakers=[2, 3], seconds=[1.0]),
        make_data_dir("middle", speakers=[4, 5], seconds=[7.5]),
        make_data_dir("long", speakers=[6, 7], seconds=[12.5]),
    ]
    validation = PairValidation(read_manifest(folders, sample_rate=RATE))

    # speaker, number of pieces, samples of a piece
    cut_speakers = [
        (2, 2, 8000),
        (3, 2, 8000),
        (4, 3, 40000),
        (5, 3, 40000),
        (6, 4, 50000),
        (7, 4, 50000),
    ]
    labels = []
    pieces = []
    for speaker, num_pieces, size in cut_speakers:
        for number in range(num_pieces):
            labels.append(speaker)
            pieces.append((f"spk{speaker}-0", number * size, size))
    # twelve utterances of a speaker give ten pieces at most
    assert validation.label_N == [0] * 10 + [1] * 10 + labels
    assert validation.num_cut == 6

    whole = validation.pieces[:20]
    for piece in whole:
        assert piece.start == 0
        assert piece.num_samples == 8000
    actual = []
    for piece in validation.pieces[20:]:
        utterance = piece.manifest.ids[piece.row]
        actual.append((utterance, piece.start, piece.num_samples))
    assert actual == pieces
    assert len(set(validation.pieces)) == 38


def test_a_calibration_names_the_recordings_that_were_cut(make_data_dir):
    folder = make_data_dir(speakers=[0, 1], seconds=[9.0])
    manifest = read_manifest([folder], sample_rate=RATE)
    rng = np.random.default_rng(0)
    emb_ND = rng.normal(size=(8, 8)).astype(np.float32)
    learned = PairValidation(manifest).calibrate(emb_ND, source="x")
    assert learned.num_target == 2 * 6
    assert learned.num_nontarget == 4 * 4
    assert learned.source == (
        "x: 2 speakers, 2 recordings, 2 of the speakers with pieces of one recording"
    )


@pytest.mark.parametrize("training", [True, False])
def test_validation_returns_an_eer_and_does_not_change_the_model(
    embedder, make_data_dir, training
):
    folder = make_data_dir(seconds=[0.5, 0.6])
    manifest = read_manifest([folder], sample_rate=RATE)
    ranks = start_ranks(timeout_minutes=1)
    embedder.train(training)
    before = {}
    for name, tensor in embedder.state_dict().items():
        before[name] = tensor.clone()

    result = PairValidation(manifest).run(embedder, ranks)
    assert result is not None
    assert list(result) == ["eer"]
    assert 0 <= result["eer"] <= 1
    again = PairValidation(manifest).run(embedder, ranks)
    assert again == result

    for module in embedder.modules():
        assert module.training is training
    for name, tensor in embedder.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_head_decides_between_classes(embedder, make_config, make_data_dir):
    """One row of the head points to all embeddings and wins; the others point away."""
    folder = make_data_dir(speakers=[0, 1, 2], seconds=[0.5, 0.6])
    manifest = read_manifest([folder], sample_rate=RATE)
    head = build.build_head(make_config(), embed_dim=16, num_classes=4)
    # in another order than in the manifest
    classes = ["other", "spk2", "spk1", "spk0"]
    validation = ClassValidation(manifest, head=head, classes=classes)
    assert validation.label_N == [3, 3, 2, 2, 1, 1]

    ranks = start_ranks(timeout_minutes=1)
    emb_ND = embed_pieces(
        embedder,
        validation.pieces,
        device=ranks.device,
    )
    mean_D = torch.from_numpy(emb_ND).mean(dim=0)
    opposite_CD = -mean_D.expand(4, 16)
    for decided, error in [(0, 1.0), (1, 4 / 6), (3, 4 / 6)]:
        with torch.no_grad():
            head.weight_CD.copy_(opposite_CD)
            head.weight_CD[decided] = mean_D
        result = validation.run(embedder, ranks)
        assert result == {"error": error}


def test_at_most_500_utterances_of_a_class_are_used(
    make_config, make_data_dir, monkeypatch
):
    monkeypatch.setattr(validation_module, "MAX_UTTERANCES_PER_VALID_CLASS", 2)
    folder = make_data_dir(speakers=[0, 1], seconds=[0.5] * 3)
    manifest = read_manifest([folder], sample_rate=RATE)
    head = build.build_head(make_config(), embed_dim=16, num_classes=2)
    validation = ClassValidation(
        manifest,
        head=head,
        classes=["spk0", "spk1"],
    )
    assert validation.label_N == [0, 0, 1, 1]
