"""One folder per speaker: conversion, the test set, corpora too small to train on."""

import shutil

import numpy as np
import pytest
from refusals import refused
from voices import RATE, make_wave

from speakerlab.data import audio
from speakerlab.data.tables import read_table
from tests.egs.corpora import write_m4a


def write_corpus(folder, num_speakers: int, num_recordings: int = 2, seconds: float = 0.5):
    for speaker in range(num_speakers):
        for take in range(num_recordings):
            path = folder / f"who {speaker}" / "any" / "depth" / f"{take}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            audio.write(path, make_wave(speaker, take, seconds), RATE)


def test_a_fifth_of_the_speakers_is_the_test_set(prepare, tmp_path):
    write_corpus(tmp_path / "in", 30, 3)
    prepare("own", tmp_path / "in", tmp_path / "data")
    train, test = (read_table(tmp_path / "data" / name / "utt2spk") for name in ("train", "test"))
    assert len(set(test.values())) == 6 and len(set(train.values())) == 24
    assert not set(test.values()) & set(train.values())
    assert read_table(tmp_path / "data/train/wav.scp").keys() == train.keys()
    lines = [line.split() for line in (tmp_path / "data/test/trials").read_text().splitlines()]
    assert sum(label == "target" for *_, label in lines) == 6 * 3
    assert len(lines) == 6 * 3 + 15 * 9
    assert "who_0/any/depth/1" in train.keys() | test.keys()
    kept = read_table(tmp_path / "data/test/utt2spk")
    prepare("own", tmp_path / "in", tmp_path / "data")
    assert read_table(tmp_path / "data/test/utt2spk") == kept


@pytest.mark.parametrize(("speakers", "recordings"), [(19, 2), (25, 1)])
def test_a_small_corpus_is_for_calibration(prepare, tmp_path, speakers, recordings):
    write_corpus(tmp_path / "in", speakers, recordings)
    data = tmp_path / "data"
    (data / "test").mkdir(parents=True)  # of an earlier corpus
    out = prepare("own", tmp_path / "in", data)
    several = speakers if recordings > 1 else 0
    line = f"{several} of {speakers} speakers have 2 recordings or more, training needs 20"
    assert line in (data / "calibration_only").read_text() and line in out
    assert len(read_table(data / "train/utt2spk")) == speakers * recordings
    assert not (data / "test").exists()
    shutil.rmtree(tmp_path / "in")
    write_corpus(tmp_path / "in", 20, 2)
    prepare("own", tmp_path / "in", data)
    assert not (data / "calibration_only").exists() and (data / "test/trials").exists()


def test_other_rates_and_formats_are_converted_once(prepare, tmp_path):
    write_corpus(tmp_path / "in", 2)
    soundfile = pytest.importorskip("soundfile")
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(44100) / 44100)
    soundfile.write(tmp_path / "in/who 0/a.mp3", np.stack([tone, 0 * tone], 1), 44100)
    soundfile.write(tmp_path / "in/who 1/b.ogg", tone[:22050], 44100)
    soundfile.write(tmp_path / "in/who 1/c.wav", tone, 44100)
    write_m4a(tmp_path / "in/who 0/d.m4a", (16000 * tone).astype(np.int16), rate=44100)
    prepare("own", tmp_path / "in", tmp_path / "data")
    wavs = read_table(tmp_path / "data/train/wav.scp")
    made = {"who_0/a": 1.0, "who_1/b": 0.5, "who_1/c": 1.0, "who_0/d": 1.0}
    for name, seconds in made.items():
        assert wavs[name] == str(tmp_path / "data" / "wav" / f"{name}.flac")
        info = audio.read_info(wavs[name])
        assert (info.sample_rate, info.num_channels) == (16000, 1)
        assert info.seconds == pytest.approx(seconds, abs=0.08)
        wave_S = audio.read(wavs[name]) / 32768
        spectrum = np.abs(np.fft.rfft(wave_S))
        assert spectrum.argmax() / info.seconds == pytest.approx(440, abs=3)
    assert wavs["who_0/any/depth/0"] == str(tmp_path / "in/who 0/any/depth/0.wav")
    before = (tmp_path / "data/wav/who_0/a.flac").stat().st_ctime_ns
    prepare("own", tmp_path / "in", tmp_path / "data")
    assert (tmp_path / "data/wav/who_0/a.flac").stat().st_ctime_ns == before


def test_recordings_without_a_speaker_are_refused(recipe, prepare, tmp_path, capsys):
    write_corpus(tmp_path / "in", 2)
    audio.write(tmp_path / "in" / "stray.wav", make_wave(0, 0, 0.5), RATE)
    error = prepare("own", tmp_path / "in", tmp_path / "data", code=1)
    assert refused(error, tmp_path / "in/stray.wav")
    (tmp_path / "empty").mkdir()
    error = prepare("own", tmp_path / "empty", tmp_path / "data", code=1)
    assert refused(error, tmp_path / "empty", "no recordings")
    assert recipe("own").main(["--download"]) == 1
    assert refused(capsys.readouterr().err, "--corpus")
