"""Corpora of a mixture: shares, crops, odds and speeds of each, in any order of reading."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.core.batch import Draw
from speakerlab.data.sampler import EpochOrder
from speakerlab.experiments.corpus import read_corpus, row_labels, row_names
from speakerlab.experiments.mixture import (
    among,
    check_mixture,
    corpus_shares,
    draws_of_corpora,
    seconds_per_crop,
    thinned,
)

NO_BANKS = ("augment.noise_prob=0", "augment.room_prob=0", "data.valid_speakers=0")


@pytest.mark.parametrize(
    ("corpora", "subject", "value"),
    [
        ("[{dir: a, share: 0.5}, {dir: b, share: 0.4}]", "data.train", "0.9"),
        (
            "[{dir: a, share: 0.5}, {dir: b, share: 0.5}, c]",
            "data.train",
            "nothing is left",
        ),
        ("[{dir: a, noise_prob: 0.9}, b]", "data.train[0].noise_prob", "0.4"),
        ("[a, {dir: b, room_prob: 0.5}]", "data.train[1].room_prob", "0.4"),
        ("[a, {dir: b, speeds: [1.0, 1.2]}]", "data.train[1].speeds", "1.2"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    make_config, corpora, subject, value
):
    with refuses(subject, value):
        check_mixture(make_config(f"data.train={corpora}"))


@pytest.mark.parametrize("entry", ["{dir: a, shares: 0.5}", "{share: 0.5}", "{dir: 3}"])
def test_a_misspelled_entry_is_one_error(make_config, entry):
    with pytest.raises(ValueError, match="data.train") as caught:
        make_config(f"data.train=[{entry}]")
    assert len(str(caught.value).splitlines()) <= 2, caught.value


def test_each_corpus_may_have_another_table_of_classes(
    make_config, make_data_dir, tmp_path
):
    for name, table in (("a", "utt2lang"), ("b", "utt2language")):
        folder = make_data_dir(f"{name}/train", speakers=range(4), seconds=[0.5, 0.6])
        lines = (folder / "utt2spk").read_text().splitlines()
        labels = [f"{line.split()[0]} l{i % 2}\n" for i, line in enumerate(lines)]
        (folder / table).write_text("".join(labels))
    settings = (
        f"data.dir={tmp_path}",
        "data.train=[a/train, {dir: b/train, labels: utt2language}]",
        "data.labels=utt2lang",
    )
    config = make_config("task=identification", *settings, *NO_BANKS)
    assert read_corpus(config).train.speakers == ("l0", "l1")
    with refuses("data.labels", "only for identification"):
        make_config("data.train=[{dir: a, labels: utt2lang}]")


def test_a_share_of_a_corpus_without_speech_is_refused(make_config):
    config = make_config("data.train=[{dir: a, share: 0.5}, b]")
    with refuses("data.train", "b has no utterance"):
        corpus_shares(config, [1.0, 0.0])


def test_a_directory_may_stand_in_a_mixture_once(make_config):
    with pytest.raises(ValueError, match="a twice in train"):
        make_config("data.train=[a, {dir: a, share: 0.5}]")


def test_corpora_without_a_share_divide_the_rest_by_their_speech(make_config):
    config = make_config("data.train=[{dir: a, share: 0.5}, {dir: b}, c]")
    shares = corpus_shares(config, [1.0, 3.0, 1.0])
    assert np.allclose(shares, [0.5, 0.375, 0.125])
    assert corpus_shares(make_config("data.train=[a, b]"), [1.0, 2.0]) is None


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_every_epoch_has_the_shares_to_within_one_crop(balance):
    """Ten corpora of very different sizes, each of 20 speakers."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(400, 2000, 10)
    corpus_N = np.repeat(np.arange(10, dtype=np.int16), sizes)
    generator.shuffle(corpus_N)
    num_rows = len(corpus_N)
    speaker_N = corpus_N * 20 + np.arange(num_rows) % 20
    shares = generator.dirichlet(np.ones(10))
    order = EpochOrder(
        generator.integers(8000, 200_000, num_rows),
        crop_samples=48000,
        global_batch=64,
        seed=3,
        speaker_N=speaker_N,
        speaker_balance=balance,
        corpus_N=corpus_N,
        corpus_shares=shares,
    )
    for epoch in range(3):
        rows_P = order.rows(epoch)
        drawn = np.bincount(corpus_N[rows_P], minlength=10)
        assert np.abs(drawn - shares * order.num_crops).max() <= 1.01
        assert order.num_dropped == 0
        if balance:
            # Within a corpus, all speakers equally often.
            per_speaker = np.bincount(speaker_N[rows_P], minlength=200).reshape(10, 20)
            spread = per_speaker.max(1) - per_speaker.min(1)
            assert spread.max() <= 1


def test_a_corpus_has_its_own_crops_odds_and_speeds(
    make_config, make_data_dir, tmp_path
):
    make_data_dir("a", speakers=range(3), seconds=[1.0])
    make_data_dir("b", speakers=range(3, 6), seconds=[1.0])
    config = make_config(
        f"data.dir={tmp_path}",
        "data.train=[a, {dir: b, speeds: [1.0], one_crop_per: utterance}]",
        "training.one_crop_per=0.5",
        *NO_BANKS,
    )
    corpus = read_corpus(config)
    is_b_N = corpus.train.part_N == 1
    seconds_N = seconds_per_crop(config, corpus.train)
    assert (seconds_N[~is_b_N] == 0.5).all()
    assert np.isinf(seconds_N[is_b_N]).all()

    # Speakers who are never heard at another speed have no classes for it.
    names = row_names(config, corpus)
    assert len(names) == 3 * 3 + 3
    assert "spk0#0.9" in names and "spk3#0.9" not in names
    label_KN = row_labels(config, corpus, names)
    assert [names[row] for row in label_KN[0]] == list(corpus.train.speakers)
    assert names[label_KN[1, 2]] == "spk2#0.9"

    draws = draws_of_corpora(
        config, {"speed": lambda rng: Draw({}, int(rng.integers(3)))}
    )
    groups_of_b = {draws[1]["speed"](np.random.default_rng(n)).group for n in range(50)}
    groups_of_a = {draws[0]["speed"](np.random.default_rng(n)).group for n in range(50)}
    assert groups_of_b == {0}
    assert groups_of_a == {0, 1, 2}


def test_a_draw_is_thinned_to_its_share():
    draw = thinned(lambda rng: Draw({}) if rng.random() < 0.5 else None, 0.4)
    rng = np.random.default_rng(0)
    drawn = sum(draw(rng) is not None for _ in range(20_000))
    assert abs(drawn / 20_000 - 0.2) < 0.01
    assert among(lambda rng: None, {0})(rng) is None
