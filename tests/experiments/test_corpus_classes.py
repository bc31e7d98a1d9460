"""What identification trains and validates on: classes by label, speakers held out whole."""

from pathlib import Path

import pytest

from speakerlab.data.tables import write_table
from speakerlab.experiments.consistency import record_classes
from speakerlab.experiments.corpus import read_corpus, row_labels, row_names
from speakerlab.training.distributed import start_ranks


@pytest.fixture
def languages(make_config, make_data_dir):
    """languages("task=...", ...) -> the corpus: speakers 0 to 5 German, 6 to 9 Thai, 3 each."""
    folder = make_data_dir(speakers=range(10), seconds=[0.5, 0.6, 0.7])
    table = {f"spk{s}-{k}": "de" if s < 6 else "th" for s in range(10) for k in range(3)}
    write_table(folder / "utt2lang", table)
    base = [f"data.dir={folder.parent}", "task=identification", "data.noise=null"]
    return lambda *more: make_config(*base, "data.rirs=null", *more)


def speakers(manifest) -> set[str]:
    return {utterance.partition("-")[0] for utterance in manifest.ids}


def test_whole_speakers_of_every_class_are_held_out(languages, caplog):
    caplog.set_level("INFO")
    corpus = read_corpus(languages("data.labels=utt2lang"))
    train, valid = corpus.train, corpus.valid
    assert train.speakers == valid.speakers == ("de", "th")
    assert not speakers(train) & speakers(valid)
    # a fifth of ten speakers: two, one of each language
    assert sorted(int(name[3:]) < 6 for name in speakers(valid)) == [False, True]
    assert (len(train), len(valid)) == (24, 6)
    for row, utterance in enumerate(valid.ids):
        assert valid.speakers[valid.speaker_N[row]] == ("de" if int(utterance[3]) < 6 else "th")
    assert caplog.messages == [
        "2 classes from utt2lang; validation holds out 2 of 10 speakers, 6 utterances of 2 classes"
    ]


def test_speeds_make_no_classes(languages, tmp_path):
    config = languages("data.labels=utt2lang", "augment.speeds=[1.0, 0.9, 1.1]")
    corpus = read_corpus(config)
    names = row_names(config, corpus)
    assert names == ["de", "th"]
    assert row_labels(config, corpus, names).tolist() == [[0, 1]] * 3
    assert row_labels(config, corpus, ["th", "xx", "de"]).tolist() == [[2, 0]] * 3
    ranks = start_ranks(timeout_minutes=1)
    assert record_classes(config, corpus, None, tmp_path, ranks) == ["de", "th"]
    assert (tmp_path / "speakers.txt").read_text() == "de\nth\n"


def test_of_known_speakers_utterances_are_held_out(languages, caplog):
    caplog.set_level("INFO")
    corpus = read_corpus(languages("data.valid_speakers=4"))
    train, valid = corpus.train, corpus.valid
    assert train.speakers == valid.speakers == tuple(f"spk{s}" for s in range(10))
    assert len(valid) == 10  # one of each speaker at least
    assert speakers(train) == speakers(valid)
    assert not set(train.ids) & set(valid.ids)
    assert "10 classes from utt2spk; validation holds out 10 of 30 utterances" in caplog.text


def test_without_speakers_utterances_are_held_out(languages, caplog):
    caplog.set_level("INFO")
    config = languages("data.labels=utt2lang", "data.valid_speakers=6")
    train = Path(config.data.dir) / "train"
    (train / "utt2spk").unlink()
    (train / "columns.safetensors").unlink(missing_ok=True)
    corpus = read_corpus(config)
    assert "validation holds out 6 of 30 utterances, 6 utterances of 2 classes" in caplog.text
    assert corpus.valid.speakers == ("de", "th")


def test_none_may_be_held_out(languages):
    corpus = read_corpus(languages("data.labels=utt2lang", "data.valid_speakers=0"))
    assert (len(corpus.train), len(corpus.valid)) == (30, 0)


def test_a_directory_without_the_table_is_told(languages):
    with pytest.raises(FileNotFoundError, match="utt2accent: no such file; training needs classes"):
        read_corpus(languages("data.labels=utt2accent"))


def test_verification_has_speakers_for_classes(make_config):
    with pytest.raises(ValueError, match="verification learns from speakers, got utt2lang; set "):
        make_config("data.labels=utt2lang")
    assert make_config("data.labels=utt2lang", "task=identification").data.labels == "utt2lang"
    with pytest.raises(ValueError, match=r"data\.labels"):
        make_config("data.labels=lang", "task=identification")
