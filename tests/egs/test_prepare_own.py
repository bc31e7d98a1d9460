"""One folder per speaker: conversion, the test set, corpora too small to train on."""

import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from voices import RATE, make_wave

from speakerlab.data import audio
from speakerlab.data.tables import NOT_USED, read_rejected, read_table
from tests.egs.corpora import write_m4a
from tests.egs.messy_corpus import LEFTOVERS, bad_recordings, write_as_people_have_it


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


def names_of(data: Path) -> dict[str, str]:
    """Utterance -> speaker of both sets."""
    speaker_of = {}
    for path in sorted(data.glob("t*/utt2spk")):
        speaker_of |= read_table(path)
    return speaker_of


def test_what_systems_and_editors_leave_is_no_recording(prepare, tmp_path):
    corpus = tmp_path / "in"
    write_corpus(corpus, 2)
    for number, name in enumerate(LEFTOVERS):
        for place in (corpus / name, corpus / "who 1" / name / "deeper"):
            place.mkdir(parents=True)
            audio.write(place / "1.wav", make_wave(9, number, 0.5), RATE)
    for name in ("._0.wav", ".hidden.wav", "0 (conflicted copy 2024-01-01).wav"):
        (corpus / "who 0" / name).write_bytes(b"\0\5\x16\7")
    (corpus / ".stray.wav").touch()
    for name in ("notes.txt", "0.TXT", "README"):
        (corpus / name).touch()
    out = prepare("own", corpus, tmp_path / "data")
    speaker_of = names_of(tmp_path / "data")
    assert set(speaker_of.values()) == {"who_0", "who_1"}
    assert len(speaker_of) == 4
    assert not (tmp_path / "data/train/rejected.tsv").exists()
    assert f"{corpus}: skipped {2 * len(LEFTOVERS) + 4} files and folders" in out
    assert f"{corpus}: skipped 3 files with other endings, 2 .txt, 1 without" in out


def test_equal_names_of_one_folder_keep_their_endings(prepare, tmp_path):
    corpus = tmp_path / "in"
    write_corpus(corpus, 1)
    for number, name in enumerate(("rec 1.wav", "rec 1.flac", "b/rec 1.wav")):
        path = corpus / "anna" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        audio.write(path, make_wave(5, number, 0.5), RATE)
    # Only by the blank do these names differ: one of them must be renamed.
    audio.write(corpus / "anna/c d.wav", make_wave(5, 8, 0.5), RATE)
    audio.write(corpus / "anna/c_d.wav", make_wave(5, 9, 0.5), RATE)
    prepare("own", corpus, tmp_path / "data")
    names = [name for name in names_of(tmp_path / "data") if "anna" in name]
    assert sorted(names) == [
        "anna/b/rec_1",
        "anna/c_d",
        "anna/rec_1.flac",
        "anna/rec_1.wav",
    ]
    ((_, reason),) = read_rejected(tmp_path / "data/train").values()
    assert reason.startswith(f"{corpus}/anna/c_d.wav: ")


@pytest.mark.parametrize(
    "names",
    [
        ("Ju\u0308rgen", "J\u00fcrgen"),
        ("Ann", "\uff21\uff4e\uff4e"),
        ("Ann", "Ann\u200b"),
    ],
)
def test_a_name_in_two_spellings_of_unicode_is_one_speaker(prepare, tmp_path, names):
    corpus = tmp_path / "in"
    write_corpus(corpus, 1)
    for number, name in enumerate(names):
        (corpus / name).mkdir()
        audio.write(corpus / name / f"{number}.wav", make_wave(7, number, 0.5), RATE)
    prepare("own", corpus, tmp_path / "data")
    first_name = unicodedata.normalize("NFC", names[0])
    assert set(names_of(tmp_path / "data").values()) == {"who_0", first_name}
    ((_, reason),) = read_rejected(tmp_path / "data/train").values()
    assert "rename one of the folders" in reason
    for name in names:
        assert ascii(name) in reason


def test_names_that_differ_in_case_are_one_line(prepare, tmp_path):
    corpus = tmp_path / "in"
    write_corpus(corpus, 1)
    for number, name in enumerate(("Ann", "ann")):
        (corpus / name).mkdir()
        audio.write(corpus / name / f"{number}.wav", make_wave(7, number, 0.5), RATE)
    out = prepare("own", corpus, tmp_path / "data")
    assert set(names_of(tmp_path / "data").values()) == {"who_0", "Ann", "ann"}
    assert (
        f"{corpus}: 1 pair of speakers whose names differ only in case, such as" in out
    )


DEEPER = "if the speakers are one level deeper"


@pytest.mark.parametrize(
    ("folders", "is_noted", "repeated"),
    [
        # Sessions with the same speakers; parts of a corpus; a speaker's sessions.
        (
            ["s1/ann", "s1/bob", "s2/ann", "s2/bob", "s3/bob", "s3/cy"],
            True,
            "bob is in 3",
        ),
        (["train/ann", "train/bob", "test/cy", "test/dan"], True, None),
        (["ann/any/depth", "bob/any/depth"], False, None),
        (["ann", "ann/1", "ann/2", "bob", "bob/1", "bob/2"], False, None),
        (["ann/1", "ann/2", "bob", "cy"], False, None),
    ],
)
def test_speakers_that_may_be_one_level_deeper_are_one_line(
    prepare, tmp_path, folders, is_noted, repeated
):
    corpus = tmp_path / "in"
    for number, name in enumerate(folders):
        (corpus / name).mkdir(parents=True, exist_ok=True)
        wave_S = make_wave(number, 0, 0.5)
        audio.write(corpus / name / f"{number}.wav", wave_S, RATE)
    out = prepare("own", corpus, tmp_path / "data")
    assert out.count(DEEPER) == is_noted
    assert ("as speakers are in sessions" in out) == (repeated is not None)
    if repeated is not None:
        assert repeated in out


def test_folders_without_a_recording_are_one_line(prepare, tmp_path):
    corpus = tmp_path / "in"
    write_corpus(corpus, 2)
    assert "hold no recording" not in prepare("own", corpus, tmp_path / "data")
    (corpus / "nobody").mkdir()
    (corpus / "texts/deeper").mkdir(parents=True)
    (corpus / "texts/deeper/a.txt").touch()
    # Another name of a speaker's folder, and what an editor leaves, are no speakers.
    (corpus / "alias").symlink_to(corpus / "who 1")
    (corpus / ".git").mkdir()
    # All of this speaker's recordings are left out.
    (corpus / "quiet").mkdir()
    audio.write(corpus / "quiet/0.wav", np.zeros(RATE, dtype=np.int16), RATE)
    out = prepare("own", corpus, tmp_path / "data")
    assert (
        f"{corpus}: 3 of 5 folders hold no recording that can be used, such as no"
        in (out)
    )


@pytest.mark.parametrize("kind", bad_recordings())
@pytest.mark.parametrize("rate", [RATE, 8000])
def test_recordings_that_teach_nothing_are_left_out(prepare, tmp_path, kind, rate):
    soundfile = pytest.importorskip("soundfile")
    corpus = tmp_path / "in"
    write_corpus(corpus, 2)
    bad = corpus / "who 1/bad.wav"
    # At 8 kHz the file is converted.
    soundfile.write(bad, bad_recordings()[kind], rate)
    out = prepare("own", corpus, tmp_path / "data")
    assert len(names_of(tmp_path / "data")) == 4
    ((name, (path, reason)),) = read_rejected(tmp_path / "data/train").items()
    assert path == str(bad)
    word = {"dither": "silent", "constant": "silent", "empty": "short"}.get(
        kind, kind.split("-")[0]
    )
    if kind == "empty" and rate != RATE:
        # Nothing can be converted.
        assert reason.startswith(f"{bad}: ")
        return
    assert reason.startswith(f"{bad}: is {word}")
    assert name.startswith(NOT_USED)
    assert f"{corpus}: 1 of 5 recordings left out: 1 {word}" in out
    assert str(tmp_path / "data/train/rejected.tsv") in out


def test_copies_are_left_out(prepare, tmp_path):
    corpus = tmp_path / "in"
    data = tmp_path / "data"
    write_corpus(corpus, 3)
    # The samples are equal, not the bytes of the files.
    samples_S = audio.read(corpus / "who 0/any/depth/0.wav")
    audio.write(corpus / "who 0/z.flac", samples_S, RATE)
    shutil.copy(corpus / "who 1/any/depth/0.wav", corpus / "who 2/zz.wav")
    out = prepare("own", corpus, data)
    assert sorted(names_of(data)) == [
        "who_0/any/depth/0",
        "who_0/any/depth/1",
        "who_1/any/depth/1",
        "who_2/any/depth/0",
        "who_2/any/depth/1",
    ]
    reason_of = {}
    for path, reason in read_rejected(data / "train").values():
        reason_of[Path(path).relative_to(corpus).as_posix()] = reason
    assert set(reason_of) == {"who 0/z.flac", "who 1/any/depth/0.wav", "who 2/zz.wav"}
    assert "who_0/any/depth/0" in reason_of["who 0/z.flac"]
    for name in ("who 1/any/depth/0.wav", "who 2/zz.wav"):
        assert "who_1, who_2" in reason_of[name]
    assert "3 of 8 recordings left out: 1 copied, 2 copied across speakers" in out


def test_a_corpus_of_copies_only_is_kept_with_a_line(prepare, tmp_path):
    corpus = tmp_path / "in"
    wave_S = make_wave(0, 0, 0.5)
    for name in ("a/1", "a/2", "b/1", "b/2"):
        path = corpus / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        audio.write(path, wave_S, RATE)
    out = prepare("own", corpus, tmp_path / "data")
    assert len(names_of(tmp_path / "data")) == 4
    assert f"{corpus}: every recording is a copy" in out


def test_channels_that_differ_are_one_line(prepare, tmp_path, caplog):
    soundfile = pytest.importorskip("soundfile")
    corpus = tmp_path / "in"
    write_corpus(corpus, 1)
    for rate in (RATE, 44100):
        voices = [make_wave(speaker, rate, 0.5, rate) for speaker in (3, 8)]
        soundfile.write(corpus / f"who 0/{rate}.wav", np.stack(voices, 1), rate)
        louder = np.stack([voices[0] // 2, voices[0]], 1)
        soundfile.write(corpus / f"who 0/same {rate}.wav", louder, rate)
    out = prepare("own", corpus, tmp_path / "data")
    assert f"{corpus}: 2 recordings with channels that differ, such as who_0/1" in out
    assert "channels" not in caplog.text


def test_sound_that_may_be_no_speech_is_one_line(prepare, tmp_path):
    corpus = tmp_path / "in"
    write_corpus(corpus, 1)
    for number in range(2):
        noise_S = np.random.default_rng(number).normal(0, 3000, RATE)
        path = corpus / f"who 0/noise {number}.wav"
        audio.write(path, noise_S.astype(np.int16), RATE)
    out = prepare("own", corpus, tmp_path / "data")
    assert f"{corpus}: 2 recordings may be no speech, such as who_0/noise_0" in out
    assert len(names_of(tmp_path / "data")) == 4


def test_speakers_with_low_rates_alone_are_one_line(prepare, tmp_path):
    corpus = tmp_path / "in"
    write_corpus(corpus, 3)
    low = f"{corpus}: 2 of 5 speakers have only recordings below 16000 Hz, such as call"
    for number, rate in enumerate((8000, 11025)):
        folder = corpus / f"call {number}"
        folder.mkdir()
        audio.write(folder / "a.wav", make_wave(7 + number, 1, 0.5, rate), rate)
    # This speaker has recordings at both rates, so the rate does not tell who it is.
    audio.write(corpus / "who 0/low.wav", make_wave(0, 9, 0.5, 8000), 8000)
    assert low in prepare("own", corpus, tmp_path / "data")
    for number in range(2):
        shutil.rmtree(corpus / f"call {number}")
    one = f"{corpus}: 1 recording below 16000 Hz, such as who_0/low (8000 Hz)"
    assert one in prepare("own", corpus, tmp_path / "one")


@pytest.mark.parametrize("rate", [8000, 44100])
def test_recordings_are_converted_to_the_models_rate(prepare, tmp_path, rate):
    corpus = tmp_path / "in"
    data = tmp_path / "data"
    write_corpus(corpus, 2)
    audio.write(corpus / "who 0/other.wav", make_wave(0, 9, 0.5, rate), rate)
    noise = tmp_path / "noise"
    noise.mkdir()
    audio.write(noise / "a.wav", make_wave(9, 9, 0.5), RATE)
    for wanted in (rate, RATE):  # the second time, converted files have another rate
        output = prepare("own", corpus, data, "--sample-rate", wanted, "--noise", noise)
        assert f"{wanted} Hz, one channel" in output
        # No recording lacks frequencies unless another has them.
        assert ("below" in output) == (wanted > min(rate, RATE))
        for name in ("train", "noise"):
            wavs = read_table(data / name / "wav.scp")
            for path in wavs.values():
                assert audio.read_info(path).sample_rate == wanted
        if wanted == rate:
            other = read_table(data / "train/wav.scp")["who_0/other"]
            assert other == str(corpus / "who 0/other.wav")


@pytest.mark.parametrize("rate", [RATE, 44100])
def test_the_channel_with_sound_is_used(prepare, tmp_path, rate):
    soundfile = pytest.importorskip("soundfile")
    corpus = tmp_path / "in"
    data = tmp_path / "data"
    write_corpus(corpus, 2)
    wave_S = make_wave(1, 5, 0.5, rate)
    stereo = np.stack([0 * wave_S, wave_S], axis=1)
    soundfile.write(corpus / "who 1/left is silent.wav", stereo, rate)
    soundfile.write(corpus / "who 1/right is silent.wav", stereo[:, ::-1], rate)
    soundfile.write(corpus / "who 1/mono.wav", make_wave(1, 6, 0.5, rate), rate)
    out = prepare("own", corpus, data)
    assert "1 recording whose first channel is silent, such as who_1/left_is" in out
    # Both have the same sound: one is a copy.
    wavs = read_table(data / "train/wav.scp")
    if rate == RATE:
        assert "who_1/right_is_silent" not in wavs
        samples_S = audio.read(wavs["who_1/left_is_silent"])
        np.testing.assert_array_equal(samples_S, wave_S)
    assert np.abs(audio.read(wavs["who_1/left_is_silent"])).max() > 1000


def test_a_corpus_as_people_have_it(tmp_path):
    corpus = tmp_path / "my corpus"
    data = tmp_path / "data"
    clean = write_as_people_have_it(corpus)
    script = Path(__file__).parents[2] / "egs/own/prepare.py"
    # In a locale whose encoding is not UTF-8, and without the help of Python.
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, script, "--corpus", corpus, "--data", data],
        env={"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", **locale},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 10, done.stdout
    report = done.stdout
    assert f"{corpus}: skipped {20 * 4 + len(LEFTOVERS)} files and folders" in report
    assert "1 .txt" in report
    assert "4 of 71 recordings left out: 1 clipped, 1 shorter than 0.3 s, 1 silent" in (
        report
    )
    assert "1 copied" in report
    assert "3 .mp3, 1 .m4a, 1 .wav" in report

    speaker_of = names_of(data)
    lossy = {"张_三1/a", "张_三1/tagged", "张_三2/b", "张_三3/c", "张_三4/phone"}
    assert speaker_of.keys() == clean.keys() | lossy
    assert len(set(speaker_of.values())) == 20
    for name, speaker in speaker_of.items():
        assert name.startswith(f"{speaker}/")
    # The samples of the clean copies, and whole recordings of the others.
    wavs = read_table(data / "train/wav.scp") | read_table(data / "test/wav.scp")
    for name, wave_S in clean.items():
        np.testing.assert_array_equal(audio.read(wavs[name]), wave_S)
    for name in lossy:
        assert audio.read_info(wavs[name]).seconds == pytest.approx(1.0, abs=0.1)
