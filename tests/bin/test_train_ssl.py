"""A self-supervised training on two ranks learns what one does, and resumes bit-identically."""

import pytest
from safetensors.torch import load_file
from tiny import checkpoints, cut, losses, rows

SSL = [
    *("task=ssl", "training.one_crop_per=utterance", "training.global_batch=4"),
    *(
        "training.num_epochs=1",
        "training.warmup_epochs=0",
        "augment.speed_classes=auto",
    ),
    *("augment.spec.num_freq_masks=0", "augment.spec.num_time_masks=0"),
    *("views={long: 2, short: 2, short_seconds: 0.3}", "training.bn_batch=4"),
    (
        "objective={name: dino, args: {hidden_dim: 16, wide_dim: 16, bottleneck_dim: 8,"
        " num_outputs: 32}}"
    ),
]


def model(exp):
    return (exp / "model/embedder.safetensors").read_bytes()


def test_two_ranks_learn_what_one_does_and_resume_bit_identically(tmp_path, train):
    """With regularizers over both ranks, whose BatchNorms are joined in the backbone and head."""
    on_one_rank = tmp_path / "one"
    two = tmp_path / "two"
    train(on_one_rank, *SSL)
    train(two, *SSL, ranks=2)
    for ours, theirs in zip(
        rows(two, "train"), rows(on_one_rank, "train"), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-2), ours["step"]
        assert ours["effective_rank"] == pytest.approx(
            theirs["effective_rank"], rel=5e-2
        )
    assert len(checkpoints(two)) > 1
    assert load_file(two / "model/embedder.safetensors")
    copy = cut(two, tmp_path / "cut")
    done = train(copy, *SSL, ranks=2)
    assert "resuming from step 2" in done.stderr
    assert model(copy) == model(two)
    assert losses(copy) == losses(two)
