"""A student learns on two ranks what it learns on one, and resumes bit-identically."""

import json

import pytest
from safetensors.torch import load_file
from tiny import checkpoints, cut, losses, rows

DISTIL = [
    "task=distil",
    "training.global_batch=4",
    "training.num_epochs=1",
    "training.warmup_epochs=0",
    "training.bn_batch=4",
    "data.valid_speakers=4",
    "augment.speeds=[1.0]",
]


@pytest.fixture(scope="module")
def teacher(trained):
    return f"distil.teachers={json.dumps([str(trained)])}"


def model(exp):
    return (exp / "model/embedder.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "distil",
    [
        ["distil.targets=utterance"],
        ["distil.targets=crop"],
        ["distil.targets=crop", "distil.frame_weight=3"],
        ["distil.targets=utterance", "distil.frame_weight=3"],
    ],
)
def test_two_ranks_learn_what_one_does_and_resume_bit_identically(
    tmp_path, train, teacher, distil
):
    settings = [*DISTIL, teacher, *distil]
    on_one_rank = tmp_path / "one"
    two = tmp_path / "two"
    train(on_one_rank, *settings)
    train(two, *settings, ranks=2)
    for ours, theirs in zip(
        rows(two, "train"), rows(on_one_rank, "train"), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-2), ours["step"]
    assert rows(two, "valid")[-1]["teacher_distance"] == pytest.approx(
        rows(on_one_rank, "valid")[-1]["teacher_distance"], rel=0.1
    )

    assert len(checkpoints(two)) > 1
    assert load_file(two / "model/embedder.safetensors")
    copy = cut(two, tmp_path / "cut")
    done = train(copy, *settings, ranks=2)
    assert "resuming from step" in done.stderr
    assert model(copy) == model(two)
    assert losses(copy) == losses(two)


def test_the_option_names_the_teacher(run, settings, trained, tmp_path):
    exp = tmp_path / "exp"
    command = ["-m", "speakerlab", "train", "--exp", exp, "--teacher", trained]
    run(*command, *settings, *DISTIL)
    card = json.loads((exp / "model/card.json").read_text())
    assert card["teachers"][0]["name"] == str(trained)

    exp = tmp_path / "without"
    command = ["-m", "speakerlab", "train", "--exp", exp]
    done = run(*command, *settings, *DISTIL, code=1)
    assert "distil.teachers: is missing; add --teacher MODEL" in done.stderr
