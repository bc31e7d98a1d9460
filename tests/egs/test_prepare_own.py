"""One folder per speaker: conversion, the test set, corpora too small to train on."""

import shutil

import numpy as np
import pytest
from refusals import refused
from voices import RATE, make_wave

from speakerlab.data import audio
from speakerlab.data.tables import read_table
from tests.egs.corpora import write_m4a


def write_corpus(
    folder, num_speakers: int, num_recordings: int = 2, seconds: float = 0.5
):
    for speaker in range(num_speakers):
        for take in range(num_recordings):
            path = folder / f"who {speaker}/any/depth/{take}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            audio.write(path, make_wave(speaker, take, seconds), RATE)


def test_a_fifth_of_the_speakers_is_the_test_set(prepare, tmp_path):
    data = tmp_path / "data"
    write_corpus(tmp_path / "in", 30, 3)
    prepare("own", tmp_path / "in", data)
    train = read_table(data / "train/utt2spk")
    test = read_table(data / "test/utt2spk")
    train_speakers = set(train.values())
    test_speakers = set(test.values())
    assert len(test_speakers) == 6
    assert len(train_speakers) == 24
    assert not test_speakers & train_speakers
    expected = train.keys()
    assert read_table(data / "train/wav.scp").keys() == expected
    assert "who_0/any/depth/1" in train.keys() | test.keys()

    # All pairs of recordings: 3 of each speaker, and 9 of each two speakers.
    trials = (data / "test/trials").read_text().splitlines()
    targets = [trial for trial in trials if trial.endswith(" target")]
    assert len(targets) == 6 * 3
    assert len(trials) == 6 * 3 + 15 * 9

    prepare("own", tmp_path / "in", data)
    assert read_table(data / "test/utt2spk") == test


@pytest.mark.parametrize(("speakers", "recordings"), [(19, 2), (25, 1)])
def test_a_small_corpus_is_for_calibration(prepare, tmp_path, speakers, recordings):
    corpus = tmp_path / "in"
    data = tmp_path / "data"
    write_corpus(corpus, speakers, recordings)
    (data / "test").mkdir(parents=True)  # of an earlier corpus
    out = prepare("own", corpus, data)
    num_usable = speakers if recordings > 1 else 0
    count = f"{num_usable} of {speakers} speakers have 2 recordings or more"
    line = f"{count}, training needs 20"
    assert line in (data / "calibration_only").read_text()
    assert line in out
    assert len(read_table(data / "train/utt2spk")) == speakers * recordings
    assert not (data / "test").exists()
    shutil.rmtree(corpus)
    write_corpus(corpus, 20, 2)
    prepare("own", corpus, data)
    assert not (data / "calibration_only").exists()
    assert (data / "test/trials").exists()


def test_other_rates_and_formats_are_converted_once(prepare, tmp_path):
    soundfile = pytest.importorskip("soundfile")
    corpus = tmp_path / "in"
    data = tmp_path / "data"
    write_corpus(corpus, 2)
    # One second of 440 Hz; in stereo with a silent channel.
    seconds_S = np.arange(44100) / 44100
    tone_S = 0.5 * np.sin(2 * np.pi * 440 * seconds_S)
    stereo = np.stack([tone_S, 0 * tone_S], 1)
    soundfile.write(corpus / "who 0/a.mp3", stereo, 44100)
    soundfile.write(corpus / "who 1/b.ogg", tone_S[:22050], 44100)
    soundfile.write(corpus / "who 1/c.wav", tone_S, 44100)
    m4a_S = (16000 * tone_S).astype(np.int16)
    write_m4a(corpus / "who 0/d.m4a", m4a_S, rate=44100)

    prepare("own", corpus, data)
    wavs = read_table(data / "train/wav.scp")
    lengths = {"who_0/a": 1.0, "who_1/b": 0.5, "who_1/c": 1.0, "who_0/d": 1.0}
    for name, seconds in lengths.items():
        assert wavs[name] == str(data / f"wav/{name}.flac")
        info = audio.read_info(wavs[name])
        assert info.sample_rate == 16000
        assert info.num_channels == 1
        assert info.seconds == pytest.approx(seconds, abs=0.08)
        wave_S = audio.read(wavs[name]) / 32768
        spectrum = np.abs(np.fft.rfft(wave_S))
        # The bin of the largest value is a frequency in Hz times the length in seconds.
        assert spectrum.argmax() / info.seconds == pytest.approx(440, abs=3)
    assert wavs["who_0/any/depth/0"] == str(corpus / "who 0/any/depth/0.wav")

    converted = data / "wav/who_0/a.flac"
    before = converted.stat().st_ctime_ns
    prepare("own", corpus, data)
    assert converted.stat().st_ctime_ns == before


def test_recordings_without_a_speaker_are_refused(recipe, prepare, tmp_path, capsys):
    corpus = tmp_path / "in"
    write_corpus(corpus, 2)
    audio.write(corpus / "stray.wav", make_wave(0, 0, 0.5), RATE)
    error = prepare("own", corpus, tmp_path / "data", code=1)
    assert refused(error, corpus / "stray.wav")

    empty = tmp_path / "empty"
    empty.mkdir()
    error = prepare("own", empty, tmp_path / "data", code=1)
    assert refused(error, empty, "no recordings")
    assert recipe("own").main(["--download"]) == 1
    assert refused(capsys.readouterr().err, "--corpus")
