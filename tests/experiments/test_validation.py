"""What validation takes of held-out speakers, and that it leaves no trace in the model."""

import pytest
import torch

from speakerlab.config import build
from speakerlab.data.manifest import read_manifest
from speakerlab.experiments import validation as validation_module
from speakerlab.experiments.validation import ClassValidation, Validation
from speakerlab.training.distributed import start_ranks

RATE = 16000


@pytest.fixture
def embedder(make_config):
    return build.build_embedder(make_config("model.max_seconds=0.5"))


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
    assert result is not None
    assert list(result) == ["eer"]
    assert 0 <= result["eer"] <= 1
    assert Validation(manifest).run(embedder, start_ranks(timeout_minutes=1)) == result
    assert embedder.training is training
    assert all(module.training is training for module in embedder.modules())
    for name, tensor in embedder.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_classes_are_judged_by_the_heads_logits(embedder, make_config, make_data_dir):
    """The row of the head that points to all embeddings decides; the others point away."""
    folder = make_data_dir(speakers=[0, 1, 2], seconds=[0.5, 0.6])
    manifest = read_manifest([folder], sample_rate=RATE)
    head = build.build_head(make_config(), embed_dim=16, num_classes=4)
    classes = ["other", "spk2", "spk1", "spk0"]  # as the head has them, not as the manifest
    validation = ClassValidation(manifest, head=head, classes=classes)
    assert validation.label_N == [3, 3, 2, 2, 1, 1]
    ranks = start_ranks(timeout_minutes=1)
    validation.run(embedder, ranks)
    assert validation.emb_ND is not None
    mean_D = torch.from_numpy(validation.emb_ND).mean(dim=0)
    for decided, error in ((0, 1.0), (1, 4 / 6), (3, 4 / 6)):
        with torch.no_grad():
            head.weight_CD.copy_(-mean_D.expand(4, 16))
            head.weight_CD[decided] = mean_D
        assert validation.run(embedder, ranks) == {"error": error}


def test_of_a_class_at_most_500_utterances_are_judged(make_config, make_data_dir, monkeypatch):
    monkeypatch.setattr(validation_module, "MAX_UTTERANCES_PER_VALID_CLASS", 2)
    manifest = read_manifest([make_data_dir(speakers=[0, 1], seconds=[0.5] * 3)], sample_rate=RATE)
    head = build.build_head(make_config(), embed_dim=16, num_classes=2)
    assert ClassValidation(manifest, head=head, classes=["spk0", "spk1"]).label_N == [0, 0, 1, 1]
