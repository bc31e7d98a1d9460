"""A training on two corpora with shares: the same for any ranks and workers, exact on resume."""

from pathlib import Path

import pytest
from tiny import cut, losses, rows, weights
from voices import write_voices

from speakerlab.experiments.curves import read_curves

MIXTURE = (
    "data.train=[{dir: a/train, share: 0.75},"
    " {dir: b/train, speeds: [1.0], noise_prob: 0.1}]"
)


@pytest.fixture(scope="module")
def mixed_data(tmp_path_factory) -> Path:
    """Two corpora whose ids are the same; the second has another voice for each."""
    root = tmp_path_factory.mktemp("mixture")
    write_voices(root / "a/train", speakers=range(6), seconds=(1.5, 1.6))
    write_voices(root / "b/train", speakers=range(4), seconds=(1.2, 2.5, 0.9))
    return root


@pytest.fixture(scope="module")
def train_mixture(train, mixed_data):
    def train_to(exp, *overrides, **options):
        return train(
            exp,
            f"data.dir={mixed_data}",
            MIXTURE,
            "augment.room_prob=0",
            "augment.noise_prob=0.2",
            f"data.noise={mixed_data}/a/train",
            "training.global_batch=12",
            "training.bn_batch=2",
            "training.epoch_hours=0.025",
            "data.valid_speakers=4",
            "training.valid_every_epochs=2",
            *overrides,
            **options,
        )

    return train_to


@pytest.fixture(scope="module")
def on_one_rank(train_mixture, tmp_path_factory) -> Path:
    exp = tmp_path_factory.mktemp("one") / "exp"
    train_mixture(exp)
    return exp


def test_it_resumes_bit_identically_with_any_number_of_workers(
    on_one_rank, train_mixture, tmp_path
):
    resumed = cut(on_one_rank, tmp_path / "resumed")
    done = train_mixture(resumed, "runtime.num_workers=2")
    assert "resuming from step" in done.stderr
    assert weights(resumed) == weights(on_one_rank)
    assert losses(resumed) == losses(on_one_rank)


def test_ids_carry_their_corpus_and_each_corpus_has_an_eer(on_one_rank):
    names = (on_one_rank / "speakers.txt").read_text().split()
    # spk0 to spk3 are in both corpora, spk4 and spk5 in the first only.
    assert not {"spk0", "spk1", "spk2", "spk3"} & set(names)
    speeds_of_b = {name.partition("#")[2] for name in names if name.startswith("b/")}
    assert speeds_of_b == {""}
    assert any(name.startswith("a/") and name.endswith("#0.9") for name in names)
    valid = rows(on_one_rank, "valid")[-1]
    assert {"eer", "eer/a/train"} <= valid.keys()
    # The report draws these.
    assert "validation EER in %, a/train" in read_curves(on_one_rank / "metrics.jsonl")
    assert "share: 0.75" in (on_one_rank / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_learn_what_one_does_and_resume_bit_identically(
    on_one_rank, train_mixture, tmp_path, ranks
):
    exp = tmp_path / "exp"
    train_mixture(exp, ranks=ranks)
    first, *_ = losses(on_one_rank).values()
    first_of_ranks, *_ = losses(exp).values()
    assert first_of_ranks == pytest.approx(first, rel=1e-3)
    resumed = cut(exp, tmp_path / "resumed")
    train_mixture(resumed, ranks=ranks)
    assert weights(resumed) == weights(exp)
    assert losses(resumed) == losses(exp)


def test_it_is_scored_like_any_other(on_one_rank, mixed_data, run, tmp_path):
    (tmp_path / "trials").write_text("spk4-0 spk4-1 target\nspk4-0 spk5-0 nontarget\n")
    data = mixed_data / "a/train"
    trials = data / "trials"
    trials.write_text((tmp_path / "trials").read_text())
    run("-m", "speakerlab", "extract", "--exp", on_one_rank, "--data", data)
    run("-m", "speakerlab", "score", "--exp", on_one_rank, "--trials", trials)
    assert (on_one_rank / "results.json").exists()


def test_other_shares_are_another_training(on_one_rank, train_mixture, tmp_path):
    copy = cut(on_one_rank, tmp_path / "copy")
    done = train_mixture(copy, "data.train=[a/train, b/train]", code=1)
    assert "data.train" in done.stderr
