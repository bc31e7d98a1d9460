"""Training and validation data, classes by label, and noise on the device or the host."""

from pathlib import Path

import numpy as np
import pytest
from refusals import refused, refuses

from speakerlab.config import build
from speakerlab.data import audio
from speakerlab.data.labels import class_names
from speakerlab.data.loader import collate
from speakerlab.data.tables import write_data_dir, write_table
from speakerlab.experiments import setup as setup_training
from speakerlab.experiments.consistency import record_classes
from speakerlab.experiments.corpus import (
    num_valid_speakers,
    read_corpus,
    row_labels,
    row_names,
)
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.distributed import start_ranks

BARE = ("augment.noise_prob=0", "augment.room_prob=0")


@pytest.mark.parametrize(
    ("num_speakers", "wanted"),
    # the larger of 10 and 1 %, at most a fifth, and none where that is a single speaker
    [(5994, 60), (500, 10), (50, 10), (49, 9), (10, 2), (9, 0), (2, 0)],
)
def test_default_number_of_validation_speakers(make_config, num_speakers, wanted):
    assert num_valid_speakers(make_config(), num_speakers) == wanted
    assert num_valid_speakers(make_config("data.valid_speakers=0"), num_speakers) == 0
    with refuses("data.valid_speakers", 1, 2):
        num_valid_speakers(make_config("data.valid_speakers=1"), num_speakers)


def test_validation_speakers_are_out_of_training(make_config, make_data_dir):
    folder: Path = make_data_dir(speakers=range(6))
    config = make_config(f"data.dir={folder.parent}", "data.valid_speakers=2", *BARE)
    corpus = read_corpus(config)
    train, valid = set(corpus.train.speakers), set(corpus.valid.speakers)
    assert (len(train), len(valid)) == (4, 2) and not train & valid
    assert len(corpus.rooms) == len(corpus.noise) == 0


@pytest.fixture
def noisy(make_config, make_data_dir):
    """noisy("runtime.bank_gb=1", ...) -> configuration with noise of every kind and two rooms."""
    folder: Path = make_data_dir(speakers=range(6))
    root, rng = folder.parent, np.random.default_rng(0)
    for name, kinds in (("noise", BY_KIND), ("rirs", ("room0", "room1"))):
        wavs = {kind: root / "wav" / f"{kind}.wav" for kind in kinds}
        for index, path in enumerate(wavs.values()):
            wave_S = rng.standard_normal(5000 + 7000 * index) * 500 * (index + 1)
            audio.write(path, wave_S.astype(np.int16), 16000)
        write_data_dir(root / name, wavs=wavs)
    write_table(root / "noise" / "utt2kind", {name: name[:-1] for name in BY_KIND})
    return lambda *more: make_config(f"data.dir={root}", "data.valid_speakers=2", *more)


BY_KIND = ("music0", "noise0", "noise1", "speech0", "speech1", "speech2")
ROOMS_ONLY = "runtime.bank_gb=0.0001"  # 107 kB: two rooms of 12,080 samples in float32 take 97 kB


def build_all(config, *, positions: int):
    """Return (corpus, crops, the waves that training would see)."""
    corpus = read_corpus(config)
    names = class_names(corpus.train.speakers, config.augment.speeds)
    augment = build.build_augment(config, **corpus.banks)
    ranks, plan = start_ranks(timeout_minutes=1), BatchPlan(1, 1, 1, "")
    source = setup_training.TrainBatches(config, corpus, names, augment, ranks, plan)
    crops = source.crops_of(attempt=0)
    drawn = [crops[0, position, position % len(corpus.train)] for position in range(positions)]
    return corpus, drawn, augment(collate(drawn))


def test_noise_cut_on_the_host_equals_noise_on_the_device(noisy):
    settings = ("augment.noise_prob=0.9", "augment.codec_prob=0", "data.crop_seconds=0.5")
    device, here, wave_BS = build_all(noisy(*settings), positions=64)
    host, _, other_BS = build_all(noisy(*settings, ROOMS_ONLY), positions=64)
    assert device.noise_on_device and not host.noise_on_device
    assert [(one.id, one.kind) for one in host.noise] == [(name, name[:-1]) for name in BY_KIND]
    num_voices = [
        len(crop.draws["noise"].values["noise"]) if "noise" in crop.draws else 0 for crop in here
    ]
    assert sum(count > 1 for count in num_voices) > 10 and 1 in num_voices
    # Babble crosses as 16 bits of its own full scale: half a step of 2^-15, at 13 dB below speech.
    assert (wave_BS - other_BS).abs().max() < 1e-5
    alone = [row for row, count in enumerate(num_voices) if count < 2]
    assert (wave_BS - other_BS)[alone].abs().max() < 1e-7


def test_kinds_of_noise_without_recordings_are_reported(noisy, caplog):
    caplog.set_level("INFO")
    config = noisy()
    read_corpus(config)
    assert "kind_odds" not in caplog.text
    table = Path(config.data.dir) / "noise/utt2kind"
    write_table(table, dict.fromkeys(BY_KIND, "noise"))
    for level in ("WARNING", "INFO"):  # without a table every recording is noise
        caplog.clear()
        read_corpus(noisy("augment.kind_odds.music=0"))
        (line,) = [record for record in caplog.records if "kind_odds" in record.msg]
        assert line.levelname == level
        assert refused(line.getMessage(), "augment.kind_odds", table.parent, "kind_odds.speech=0")
        assert "music" not in line.getMessage()
        table.unlink(missing_ok=True)


@pytest.mark.parametrize(("place", "key"), [("noise", "noise_prob"), ("rirs", "room_prob")])
def test_augmentation_without_recordings_is_refused(noisy, place, key):
    settings = (f"data.{place}=nowhere", f"augment.{key}=0.3")
    with refuses(f"augment.{key}", 0.3, "nowhere", f"--{place} none", error=FileNotFoundError):
        read_corpus(noisy(*settings))
    with refuses(f"augment.{key}", f"data.{place} is null", error=FileNotFoundError):
        read_corpus(noisy(f"data.{place}=null"))
    corpus = read_corpus(noisy(f"data.{place}=nowhere", f"augment.{key}=0"))
    assert [len(corpus.rooms), len(corpus.noise)] == ([2, 0] if place == "noise" else [0, 6])


def test_rooms_beyond_the_limit_are_an_error(noisy):
    with refuses("runtime.bank_gb", "rooms", 8e-05):
        read_corpus(noisy("runtime.bank_gb=0.00008"))


@pytest.mark.parametrize(
    ("task", "table", "noun"),
    [("verification", "utt2spk", "speakers"), ("identification", "utt2accent", "classes")],
)
def test_a_missing_table_of_labels_is_an_error(make_config, make_data_dir, task, table, noun):
    folder: Path = make_data_dir(speakers=range(2))
    (folder / "utt2spk").unlink()
    config = make_config(f"data.dir={folder.parent}", f"task={task}", f"data.labels={table}")
    with refuses(str(folder / table), noun, error=FileNotFoundError):
        read_corpus(config)


@pytest.fixture
def languages(make_config, make_data_dir):
    """languages("task=...", ...) -> configuration; speakers 0 to 5 speak German, 6 to 9 Thai."""
    folder = make_data_dir(speakers=range(10), seconds=[0.5, 0.6, 0.7])
    table = {f"spk{s}-{k}": "de" if s < 6 else "th" for s in range(10) for k in range(3)}
    write_table(folder / "utt2lang", table)
    base = [f"data.dir={folder.parent}", "task=identification", *BARE]
    return lambda *more: make_config(*base, *more)


def speakers(manifest) -> set[str]:
    return {utterance.partition("-")[0] for utterance in manifest.ids}


def test_whole_speakers_of_every_class_are_held_out(languages, caplog):
    caplog.set_level("INFO")
    corpus = read_corpus(languages("data.labels=utt2lang", "data.valid_speakers=0"))
    assert (len(corpus.train), len(corpus.valid)) == (30, 0)
    caplog.clear()
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


def test_speeds_add_no_classes(languages, tmp_path):
    config = languages("data.labels=utt2lang", "augment.speeds=[1.0, 0.9, 1.1]")
    corpus = read_corpus(config)
    names = row_names(config, corpus)
    assert names == ["de", "th"]
    assert row_labels(config, corpus, names).tolist() == [[0, 1]] * 3
    assert row_labels(config, corpus, ["th", "xx", "de"]).tolist() == [[2, 0]] * 3
    ranks = start_ranks(timeout_minutes=1)
    assert record_classes(config, corpus, None, tmp_path, ranks) == ["de", "th"]
    assert (tmp_path / "speakers.txt").read_text() == "de\nth\n"
    (tmp_path / "checkpoints/step_000000010").mkdir(parents=True)
    table = Path(config.data.dir, config.data.train[0], "utt2lang")
    table.write_text(table.read_text().replace("th", "tha"))
    with refuses(f"{tmp_path}/speakers.txt", f"but {table} changed, e.g. th;"):
        record_classes(config, read_corpus(config), None, tmp_path, ranks)


def test_speeds_that_make_no_speakers_have_the_labels_of_their_speaker(make_config, make_data_dir):
    folder: Path = make_data_dir(speakers=range(3))
    new = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for value, rows in (("off", [[0, 1, 2]] * 3), ("on", new), ("auto", new)):
        config = make_config(f"data.dir={folder.parent}", f"augment.speed_classes={value}", *BARE)
        corpus = read_corpus(config)
        names = row_names(config, corpus)
        assert row_labels(config, corpus, names).tolist() == rows
        longer = ["x", *reversed(names)]  # a head that has more, in another order
        named = np.array(longer)[row_labels(config, corpus, longer)]
        assert np.array_equal(named, np.array(names)[rows])
        with pytest.raises(KeyError, match=names[-1]):
            row_labels(config, corpus, names[:-1])
        assert len(names) == max(rows[-1]) + 1


def test_utterances_are_held_out_where_speakers_are_the_classes(languages, caplog):
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
    corpus = read_corpus(config)
    assert "validation holds out 6 of 30 utterances, 6 utterances of 2 classes" in caplog.text
    assert corpus.valid.speakers == ("de", "th")
