"""Training and validation data, classes by label, and noise on the device or the host."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusals import refused, refuses

from speakerlab.config import build
from speakerlab.data import audio
from speakerlab.data.loader import collate
from speakerlab.data.tables import write_data_dir, write_table
from speakerlab.experiments.consistency import record_classes
from speakerlab.experiments.corpus import (
    bank_sizes,
    num_valid_speakers,
    read_corpus,
    row_labels,
    row_names,
)
from speakerlab.experiments.planning import plan_device
from speakerlab.experiments.train_batches import TrainBatches
from speakerlab.losses.head import class_names
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
    train = set(corpus.train.speakers)
    valid = set(corpus.valid.speakers)
    assert len(train) == 4
    assert len(valid) == 2
    assert not train & valid
    assert len(corpus.rooms) == 0
    assert len(corpus.noise) == 0


@pytest.fixture
def noisy(make_config, make_data_dir):
    """noisy("runtime.bank_gb=1", ...) -> configuration with noise of every kind and two rooms."""
    folder: Path = make_data_dir(speakers=range(6))
    root = folder.parent
    rng = np.random.default_rng(0)
    for name, kinds in [("noise", BY_KIND), ("rirs", ("room0", "room1"))]:
        wavs = {}
        for index, kind in enumerate(kinds):
            path = root / "wav" / f"{kind}.wav"
            wave_S = rng.standard_normal(5000 + 7000 * index)
            wave_S = wave_S * 500 * (index + 1)
            audio.write(path, wave_S.astype(np.int16), 16000)
            wavs[kind] = path
        write_data_dir(root / name, wavs=wavs)

    # the kind is the id without its number
    kind_by_id = {name: name[:-1] for name in BY_KIND}
    write_table(root / "noise" / "utt2kind", kind_by_id)
    return lambda *options: make_config(
        f"data.dir={root}", "data.valid_speakers=2", *options
    )


BY_KIND = (
    "music0",
    "noise0",
    "noise1",
    "speech0",
    "speech1",
    "speech2",
)
# 107 kB: two rooms of 12,080 samples in float32 take 97 kB
ROOMS_ONLY = "runtime.bank_gb=0.0001"


def build_all(config, *, positions: int):
    """Return (corpus, crops, the waves that training would see)."""
    corpus = read_corpus(config)
    names = class_names(corpus.train.speakers, config.augment.speeds)
    ranks = start_ranks(timeout_minutes=1)
    plan, noise_on_device, _ = plan_device(
        config,
        ranks,
        num_classes=len(names),
        precision="fp32",
        banks=bank_sizes(config, corpus),
    )
    corpus = replace(corpus, noise_on_device=noise_on_device)
    augment = build.build_augment(config, **corpus.banks)
    source = TrainBatches(config, corpus, names, augment, ranks, plan)
    crops = source.crops_of(attempt=0)
    drawn = [
        crops[0, position, position % len(corpus.train)]
        for position in range(positions)
    ]
    return corpus, drawn, augment(collate(drawn))


def test_noise_cut_on_the_host_equals_noise_on_the_device(noisy):
    settings = (
        "augment.noise_prob=0.9",
        "augment.codec_prob=0",
        "data.crop_seconds=0.5",
        "runtime.micro_batch=2",
    )
    on_device = noisy(*settings)
    device, crops, wave_BS = build_all(on_device, positions=64)
    on_host = noisy(*settings, ROOMS_ONLY)
    host, _, other_BS = build_all(on_host, positions=64)
    assert device.noise_on_device
    assert not host.noise_on_device
    kinds = [(recording.id, recording.kind) for recording in host.noise]
    assert kinds == [(name, name[:-1]) for name in BY_KIND]

    num_voices = []
    for crop in crops:
        count = 0
        if "noise" in crop.draws:
            count = len(crop.draws["noise"].values["noise"])
        num_voices.append(count)
    is_babble = [count > 1 for count in num_voices]
    assert sum(is_babble) > 10
    assert 1 in num_voices

    # Babble crosses as 16 bits of its own full scale: half a step of 2^-15, at 13 dB below speech.
    error_BS = (wave_BS - other_BS).abs()
    assert error_BS.max() < 1e-5
    alone = [row for row, babble in enumerate(is_babble) if not babble]
    assert error_BS[alone].max() < 1e-7


def test_kinds_of_noise_without_recordings_are_reported(noisy, caplog):
    caplog.set_level("INFO")
    config = noisy()
    read_corpus(config)
    assert "kind_odds" not in caplog.text
    table = Path(config.data.dir) / "noise/utt2kind"
    write_table(table, dict.fromkeys(BY_KIND, "noise"))
    # without a table every recording is noise
    for level in ("WARNING", "INFO"):
        caplog.clear()
        read_corpus(noisy("augment.kind_odds.music=0"))
        records = [record for record in caplog.records if "kind_odds" in record.msg]
        (line,) = records
        assert line.levelname == level
        assert refused(
            line.getMessage(), "augment.kind_odds", table.parent, "kind_odds.speech=0"
        )
        assert "music" not in line.getMessage()
        table.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("place", "key", "num_rooms", "num_noises"),
    [
        ("noise", "noise_prob", 2, 0),
        ("rirs", "room_prob", 0, 6),
    ],
)
def test_augmentation_without_recordings_is_refused(
    noisy, place, key, num_rooms, num_noises
):
    settings = (f"data.{place}=nowhere", f"augment.{key}=0.3")
    with refuses(
        f"augment.{key}", 0.3, "nowhere", f"--{place} none", error=FileNotFoundError
    ):
        read_corpus(noisy(*settings))
    with refuses(f"augment.{key}", f"data.{place} is null", error=FileNotFoundError):
        read_corpus(noisy(f"data.{place}=null"))
    corpus = read_corpus(noisy(f"data.{place}=nowhere", f"augment.{key}=0"))
    assert len(corpus.rooms) == num_rooms
    assert len(corpus.noise) == num_noises


def test_the_sizes_of_rooms_and_noise_are_those_of_their_banks(noisy):
    config = noisy("data.crop_seconds=0.5")
    corpus = read_corpus(config)
    augment = build.build_augment(config, **corpus.banks)
    buffers = dict(augment.named_buffers())
    sizes = bank_sizes(config, corpus)
    assert sizes.rooms == buffers["augmentations.room.room_KL"].nbytes > 0
    assert sizes.noise == buffers["augmentations.noise.bank"].nbytes > 0

    config = noisy(*BARE)
    corpus = read_corpus(config)
    assert bank_sizes(config, corpus) == (0, 0)


@pytest.mark.parametrize(
    ("task", "table", "noun"),
    [
        ("verification", "utt2spk", "speakers"),
        ("identification", "utt2accent", "classes"),
    ],
)
def test_a_missing_table_of_labels_is_an_error(
    make_config, make_data_dir, task, table, noun
):
    folder: Path = make_data_dir(speakers=range(2))
    (folder / "utt2spk").unlink()
    config = make_config(
        f"data.dir={folder.parent}", f"task={task}", f"data.labels={table}"
    )
    path = folder / table
    with refuses(str(path), noun, error=FileNotFoundError):
        read_corpus(config)


@pytest.fixture
def languages(make_config, make_data_dir):
    """languages("task=...", ...) -> configuration; speakers 0 to 5 speak German, 6 to 9 Thai."""
    folder = make_data_dir(speakers=range(10), seconds=[0.5, 0.6, 0.7])
    table = {}
    for speaker in range(10):
        language = "de" if speaker < 6 else "th"
        for number in range(3):
            table[f"spk{speaker}-{number}"] = language
    write_table(folder / "utt2lang", table)
    base = [f"data.dir={folder.parent}", "task=identification", *BARE]
    return lambda *options: make_config(*base, *options)


def speakers(manifest) -> set[str]:
    return {utterance.partition("-")[0] for utterance in manifest.ids}


def test_whole_speakers_of_every_class_are_held_out(languages, caplog):
    caplog.set_level("INFO")
    corpus = read_corpus(languages("data.labels=utt2lang", "data.valid_speakers=0"))
    assert len(corpus.train) == 30
    assert len(corpus.valid) == 0

    caplog.clear()
    corpus = read_corpus(languages("data.labels=utt2lang"))
    train = corpus.train
    valid = corpus.valid
    assert train.speakers == ("de", "th")
    assert valid.speakers == ("de", "th")
    assert not speakers(train) & speakers(valid)

    # a fifth of ten speakers: two, one of each language
    numbers = [int(name[3:]) for name in speakers(valid)]
    first, second = sorted(numbers)
    assert first < 6
    assert second >= 6
    assert len(train) == 24
    assert len(valid) == 6
    for row, utterance in enumerate(valid.ids):
        language = "de" if int(utterance[3]) < 6 else "th"
        label = valid.speaker_N[row]
        assert valid.speakers[label] == language

    assert caplog.messages == [
        "2 classes from utt2lang; validation holds out 2 of 10 speakers, 6 utterances"
        " of 2 classes"
    ]


def test_speeds_add_no_classes(languages, tmp_path):
    config = languages("data.labels=utt2lang", "augment.speeds=[1.0, 0.9, 1.1]")
    corpus = read_corpus(config)
    names = row_names(config, corpus)
    assert names == ["de", "th"]
    labels = row_labels(config, corpus, names)
    assert labels.tolist() == [[0, 1]] * 3
    labels = row_labels(config, corpus, ["th", "xx", "de"])
    assert labels.tolist() == [[2, 0]] * 3

    ranks = start_ranks(timeout_minutes=1)
    recorded = record_classes(config, corpus, None, tmp_path, ranks)
    assert recorded == ["de", "th"]
    assert (tmp_path / "speakers.txt").read_text() == "de\nth\n"

    # a checkpoint was written, so the classes must stay
    (tmp_path / "checkpoints/step_000000010").mkdir(parents=True)
    table = Path(config.data.dir, config.data.train[0], "utt2lang")
    text = table.read_text()
    table.write_text(text.replace("th", "tha"))
    changed = read_corpus(config)
    with refuses(f"{tmp_path}/speakers.txt", f"but {table} changed, e.g. th;"):
        record_classes(config, changed, None, tmp_path, ranks)


def test_speeds_that_make_no_speakers_have_the_labels_of_their_speaker(
    make_config, make_data_dir
):
    folder: Path = make_data_dir(speakers=range(3))
    same = [[0, 1, 2]] * 3
    new = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for value, rows in [("off", same), ("on", new), ("auto", new)]:
        config = make_config(
            f"data.dir={folder.parent}", f"augment.speed_classes={value}", *BARE
        )
        corpus = read_corpus(config)
        names = row_names(config, corpus)
        labels = row_labels(config, corpus, names)
        assert labels.tolist() == rows
        assert len(names) == max(rows[-1]) + 1

        # a head with an additional class, in another order
        longer = ["x", *reversed(names)]
        labels = row_labels(config, corpus, longer)
        names_by_label = np.array(longer)[labels]
        expected = np.array(names)[rows]
        assert np.array_equal(names_by_label, expected)
        with pytest.raises(KeyError, match=names[-1]):
            row_labels(config, corpus, names[:-1])


def test_utterances_are_held_out_where_speakers_are_the_classes(languages, caplog):
    caplog.set_level("INFO")
    corpus = read_corpus(languages("data.valid_speakers=4"))
    train = corpus.train
    valid = corpus.valid
    expected = tuple(f"spk{s}" for s in range(10))
    assert train.speakers == expected
    assert valid.speakers == expected
    # one of each speaker at least
    assert len(valid) == 10
    assert speakers(train) == speakers(valid)
    shared = set(train.ids) & set(valid.ids)
    assert not shared
    line = "10 classes from utt2spk; validation holds out 10 of 30 utterances"
    assert line in caplog.text


def test_without_speakers_utterances_are_held_out(languages, caplog):
    caplog.set_level("INFO")
    config = languages("data.labels=utt2lang", "data.valid_speakers=6")
    train = Path(config.data.dir) / "train"
    (train / "utt2spk").unlink()
    corpus = read_corpus(config)
    line = "validation holds out 6 of 30 utterances, 6 utterances of 2 classes"
    assert line in caplog.text
    assert corpus.valid.speakers == ("de", "th")
