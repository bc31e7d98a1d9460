"""Corpora of diarization in small: layouts, true turns, regions, microphones, missing audio."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
from refusals import refused

from egs.ami.diar.prepare import FOLDER
from speakerlab.data import audio
from speakerlab.data.tables import read_table
from speakerlab.diarization.regions import Turn, read_rttm, read_uem

LINE = "SPEAKER {} 1 0.400000 0.600000 <NA> <NA> spk00 <NA> <NA>\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_wav(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    audio.write(path, np.arange(32000, dtype=np.int16), 16000)


def write_array(path: Path, *, num_channels: int = 8) -> None:
    """Write two seconds of a microphone array, each channel louder than the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    wave_S1 = rng.normal(size=(32000, 1)) * 500
    wave_SC = wave_S1 * np.arange(1, num_channels + 1)
    soundfile.write(path, wave_SC.astype(np.int16), 16000)


def write_voxconverse(corpus: Path) -> None:
    for part, folder in (("dev", "audio"), ("test", "voxconverse_test_wav")):
        for name in (f"{part}aaaaa", f"{part}bbbbb"):
            write_wav(corpus / f"audio/{part}/{folder}/{name}.wav")
            turns = corpus / f"turns/voxconverse-x/{part}/{name}.rttm"
            write(turns, LINE.format(name))


def write_ami(corpus: Path) -> None:
    setup = corpus / FOLDER
    meetings = {"dev": "ES2011a", "test": "EN2002a", "train": "ES2002a"}
    for split, name in meetings.items():
        write(setup / f"lists/{split}.meetings.txt", f"{name}\n")
        write(setup / f"only_words/rttms/{split}/{name}.rttm", LINE.format(name))
        write(setup / f"uems/{split}/{name}.uem", f"{name} 1 0.000 1.500\n")
        write_wav(corpus / f"amicorpus/{name}/audio/{name}.Mix-Headset.wav")


GRID = """"ooTextFile" "TextGrid" 0 2 <exists> 2
"IntervalTier" "{}spk00" 0 2 3
0 0.4 "" 0.4 1 "好" 1 2 ""
"IntervalTier" "{}spk01" 0 2 1
0 2 ""
"""


def write_alimeeting(corpus: Path) -> None:
    # Eval and Test hold the near field, too; Train_Ali_far lies alone.
    parts = {"Eval": "R8001_M8004", "Test": "R8002_M8002", "Train": "R0003_M0046"}
    for part, name in parts.items():
        folder = corpus / f"{part}_Ali/{part}_Ali_far"
        if part == "Train":
            folder = corpus / "Train_Ali_far"
        grid = GRID.format(f"{name}_F_", "M_")
        write(folder / f"textgrid_dir/{name}.TextGrid", grid)
        write_array(folder / f"audio_dir/{name}_MS801.wav")
        near = corpus / f"{part}_Ali/{part}_Ali_near"
        write(near / f"textgrid_dir/{name}_F_SPK01.TextGrid", GRID.format("a", "b"))
        write_wav(near / f"audio_dir/{name}_F_SPK01.wav")


def write_aishell4(corpus: Path) -> None:
    names = {
        "train_L": "20200707_L_R001S01C01",
        "train_M": "20200616_M_R001S01C01",
        "train_S": "20200702_S_R001S01C01",
        "test": "L_R003S01C02",
    }
    for part, name in names.items():
        write_array(corpus / f"{part}/wav/{name}.flac")
        # The RTTM file is read where there are both.
        turns = corpus / f"{part}/TextGrid/{name}"
        write(turns.with_suffix(".rttm"), LINE.format("another_name"))
        write(turns.with_suffix(".TextGrid"), GRID.format("not_", "read_"))


# Name -> function that writes the corpus, its test recordings, end of the scored region.
CORPORA = {
    "voxconverse": (write_voxconverse, ["testaaaaa", "testbbbbb"], 2.0),
    "ami": (write_ami, ["EN2002a"], 1.5),
    "alimeeting": (write_alimeeting, ["R8002_M8002"], 2.0),
    "aishell4": (write_aishell4, ["L_R003S01C02"], 2.0),
}


@pytest.mark.parametrize("name", CORPORA)
def test_the_original_layout(prepare, tmp_path, name):
    make, recordings, end = CORPORA[name]
    corpus = tmp_path / "corpus"
    test = tmp_path / "data/test"
    make(corpus)
    out = prepare(f"{name}/diar", corpus, tmp_path / "data")
    assert list(read_table(test / "wav.scp")) == recordings
    turns = [Turn(0.4, 1.0, "spk00")]
    assert read_rttm(test / "ref.rttm") == dict.fromkeys(recordings, turns)
    regions = [(0.0, end)]
    assert read_uem(test / "ref.uem") == dict.fromkeys(recordings, regions)
    assert not (tmp_path / "data/train").exists()
    if name == "voxconverse":
        # The counts of the published corpus are reported beside those of this one.
        counts = ("2 recordings and 2 turns", "232 and 19479")
        assert refused(out, "voxconverse test", *counts)


@pytest.mark.parametrize("name", CORPORA)
def test_missing_audio_is_named(prepare, tmp_path, name):
    make, (recording, *_), _ = CORPORA[name]
    corpus = tmp_path / "corpus"
    make(corpus)
    (path,) = {
        path
        for ending in (".wav", ".flac")
        for path in corpus.rglob(f"{recording}*{ending}")
        if "near" not in str(path.relative_to(corpus))
    }
    path.unlink()
    text = prepare(f"{name}/diar", corpus, tmp_path / "data", code=1)
    assert refused(text, corpus, recording)


@pytest.mark.parametrize(
    ("name", "recordings"),
    [
        ("ami", ["ES2002a"]),
        ("alimeeting", ["R0003_M0046"]),
        ("aishell4", ["20200616_M_R001S01C01", "20200702_S_R001S01C01"]),
    ],
)
def test_the_training_part_is_prepared_when_asked_for(
    prepare, tmp_path, name, recordings
):
    make, _, _ = CORPORA[name]
    make(tmp_path / "corpus")
    prepare(f"{name}/diar", tmp_path / "corpus", tmp_path / "data", "--train")
    train = tmp_path / "data/train"
    assert list(read_table(train / "wav.scp")) == recordings
    turns = [Turn(0.4, 1.0, "spk00")]
    assert read_rttm(train / "ref.rttm") == dict.fromkeys(recordings, turns)


ARRAYS = [
    ("alimeeting", "R8002_M8002", "Test_Ali/Test_Ali_far/audio_dir/{}_MS801.wav"),
    ("aishell4", "L_R003S01C02", "test/wav/{}.flac"),
]
of_an_array = pytest.mark.parametrize(("name", "recording", "place"), ARRAYS)


@of_an_array
def test_one_microphone_of_the_array_is_taken(
    prepare, tmp_path, name, recording, place
):
    make, _, _ = CORPORA[name]
    make(tmp_path / "corpus")
    source = tmp_path / "corpus" / place.format(recording)
    wave_SC, _ = soundfile.read(source, dtype="int16")
    paths = set()
    for channel in (1, 3):
        options = ("--channel", channel)
        data = tmp_path / "data"
        prepare(f"{name}/diar", tmp_path / "corpus", data, *options)
        path = read_table(data / "test/wav.scp")[recording]
        wave_S, rate = soundfile.read(path, dtype="int16")
        assert rate == 16000
        assert np.array_equal(wave_S, wave_SC[:, channel - 1])
        paths.add(path)
    assert len(paths) == 2


@of_an_array
def test_a_recording_without_the_microphone_is_refused(
    prepare, tmp_path, name, recording, place
):
    make, _, _ = CORPORA[name]
    make(tmp_path / "corpus")
    source = tmp_path / "corpus" / place.format(recording)
    write_array(source, num_channels=2)
    options = ("--channel", 8)
    text = prepare(
        f"{name}/diar", tmp_path / "corpus", tmp_path / "data", *options, code=1
    )
    assert refused(text, source, "8")


def test_a_textgrid_that_cannot_be_read_is_named(prepare, tmp_path):
    write_alimeeting(tmp_path / "corpus")
    (path,) = tmp_path.rglob("R8002_M8002.TextGrid")
    write(path, path.read_text()[:-10])
    corpus = tmp_path / "corpus"
    text = prepare("alimeeting/diar", corpus, tmp_path / "data", code=1)
    assert refused(text, path)


def test_turns_of_a_textgrid_stand_in_for_a_missing_rttm_file(prepare, tmp_path):
    write_aishell4(tmp_path / "corpus")
    (path,) = tmp_path.rglob("test/TextGrid/*.rttm")
    path.unlink()
    out = prepare("aishell4/diar", tmp_path / "corpus", tmp_path / "data")
    assert refused(out, path.stem, "has no .rttm", f"{path.stem}.TextGrid")
    turns = read_rttm(tmp_path / "data/test/ref.rttm")
    assert turns == {path.stem: [Turn(0.4, 1.0, "spk00")]}


def test_an_rttm_file_of_two_recordings_is_refused(prepare, tmp_path):
    write_aishell4(tmp_path / "corpus")
    (path,) = tmp_path.rglob("test/TextGrid/*.rttm")
    write(path, LINE.format("a") + LINE.format("b"))
    corpus = tmp_path / "corpus"
    text = prepare("aishell4/diar", corpus, tmp_path / "data", code=1)
    assert refused(text, path, "2 recordings")


def test_a_meeting_with_two_recordings_is_refused(prepare, tmp_path):
    write_alimeeting(tmp_path / "corpus")
    (path,) = tmp_path.rglob("R8002_M8002_MS801.wav")
    write_array(path.with_name("R8002_M8002_MS802.wav"))
    corpus = tmp_path / "corpus"
    text = prepare("alimeeting/diar", corpus, tmp_path / "data", code=1)
    assert refused(text, corpus, "2 recordings R8002_M8002_*.wav")
