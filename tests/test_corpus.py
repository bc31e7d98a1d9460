"""Validation speakers by number, and banks that must fit."""

from pathlib import Path

import numpy as np
import pytest

from speakerlab.corpus import num_valid_speakers, read_bank, read_corpus
from speakerlab.data import audio
from speakerlab.data.tables import write_data_dir


@pytest.mark.parametrize(
    ("num_speakers", "wanted"),
    # the larger of 10 and 1 %, at most a fifth, and none where that is a single speaker
    [(5994, 60), (500, 10), (50, 10), (49, 9), (10, 2), (9, 0), (2, 0)],
)
def test_default_number_of_validation_speakers(make_config, num_speakers, wanted):
    assert num_valid_speakers(make_config(), num_speakers) == wanted


def test_one_validation_speaker_is_refused(make_config):
    with pytest.raises(ValueError, match=r"an EER needs at least 2 speakers, got 1; raise it, or"):
        num_valid_speakers(make_config("data.valid_speakers=1"), 100)
    assert num_valid_speakers(make_config("data.valid_speakers=0"), 100) == 0


def test_validation_speakers_are_out_of_training(make_config, make_data_dir):
    folder: Path = make_data_dir(speakers=range(6))
    config = make_config(f"data.dir={folder.parent}", "data.valid_speakers=2")
    corpus = read_corpus(config)
    train, valid = set(corpus.train.speakers), set(corpus.valid.speakers)
    assert (len(train), len(valid)) == (4, 2) and not train & valid
    assert corpus.rooms == corpus.noises == []


def write_noise(root: Path, sample_rate: int) -> None:
    wave = np.full(sample_rate * 2, 1000, dtype=np.int16)
    audio.write(root / "hum.wav", wave, sample_rate)
    write_data_dir(root / "noise", wavs={"hum": root / "hum.wav"})


def test_a_bank_beyond_its_limit_is_refused(make_config, make_data_dir):
    folder: Path = make_data_dir(speakers=range(6))
    write_noise(folder.parent, 16000)
    config = make_config(f"data.dir={folder.parent}", "data.valid_speakers=2")
    assert [len(noise) for noise in read_corpus(config).noises] == [32000]
    small = make_config(f"data.dir={folder.parent}", "runtime.bank_gb=0.00001")
    with pytest.raises(ValueError, match=r"runtime\.bank_gb: noise and rooms must fit, got 0\.0"):
        read_corpus(small)


def test_noise_of_another_sample_rate_is_refused(tmp_path):
    write_noise(tmp_path, 8000)
    with pytest.raises(ValueError, match=r"hum\.wav: must have 16000 Hz, got 8000; convert it"):
        read_bank(tmp_path, "noise", 16000)


def test_rejected_noise_is_not_read(tmp_path):
    write_noise(tmp_path, 16000)
    assert len(read_bank(tmp_path, "noise", 16000)) == 1
    (tmp_path / "noise" / "rejected.tsv").write_text("hum\thum.wav\tis cut short\n")
    assert read_bank(tmp_path, "noise", 16000) == []


def test_training_without_speakers_is_refused(make_config, make_data_dir):
    folder: Path = make_data_dir(speakers=range(6))
    (folder / "utt2spk").unlink()
    with pytest.raises(FileNotFoundError, match=r"utt2spk: no such file; training needs speakers"):
        read_corpus(make_config(f"data.dir={folder.parent}"))
