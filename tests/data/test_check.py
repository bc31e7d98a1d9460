"""Each fault of a data directory has its line, and nothing is written where there is one."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import soundfile
from refusals import refused

from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import read_table, write_data_dir, write_table

RATE = 16000


def refusal(*folders: Path, **settings) -> list[str]:
    """The lines of a refusal without the verdict, after checking that nothing was written."""
    with pytest.raises(ValueError) as refused:
        check_data_dirs(folders, **settings)
    *lines, verdict = str(refused.value).splitlines()
    assert verdict == f"{', '.join(map(str, folders))}: refused, no utt2dur was written"
    for folder in folders:
        assert not (folder / "utt2dur").exists()
        assert not (folder / "rejected.tsv").exists()
    return lines


def change(folder: Path, table: str, rows: Mapping[str, str]) -> None:
    """Replace or add rows of a table."""
    write_table(folder / table, {**read_table(folder / table), **rows})


@pytest.fixture
def folder(make_data_dir) -> Path:
    """Two speakers, two utterances each, of 0.5 and 0.75 s; not checked."""
    return make_data_dir(speakers=[0, 1], seconds=[0.5, 0.75], check=False)


@pytest.mark.parametrize("decode", [False, True])
def test_good_directory_gets_exact_durations_and_one_line(folder: Path, decode):
    assert check_data_dirs([folder], decode=decode) == [
        f"{folder}: 2 speakers, 4 utterances, 0.00 h"
    ]
    assert (folder / "utt2dur").read_text().splitlines() == [
        "spk0-0 0.500000",
        "spk0-1 0.750000",
        "spk1-0 0.500000",
        "spk1-1 0.750000",
    ]
    assert not (folder / "rejected.tsv").exists()


@pytest.mark.parametrize("num_samples", [1, 12345, 16001, 4 * RATE * 3600 + 7])
def test_any_duration_gives_back_its_samples(num_samples):
    assert round(float(f"{num_samples / RATE:.6f}") * RATE) == num_samples


def test_no_wav_scp_and_an_empty_one(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="wav.scp: no such file; run stage 1 first"):
        check_data_dirs([tmp_path])
    (tmp_path / "wav.scp").touch()
    assert refusal(tmp_path) == [f"{tmp_path}/wav.scp: has no recordings; run stage 1 again"]


def test_duplicate_ids(folder: Path):
    for name in ("wav.scp", "utt2spk"):
        first = (folder / name).read_text().splitlines(keepends=True)[0]
        with (folder / name).open("a") as file:
            file.write(first)
    assert refusal(folder) == [
        f"{folder}/wav.scp:5: duplicate id, got spk0-0; keep one line",
        f"{folder}/utt2spk:5: duplicate id, got spk0-0; keep one line",
    ]


def test_missing_unreadable_and_empty_audio(folder: Path, tmp_path: Path):
    paths = read_table(folder / "wav.scp")
    Path(paths["spk0-0"]).unlink()
    Path(paths["spk0-1"]).write_text("no audio")
    audio.write(paths["spk1-0"], np.zeros(0, dtype=np.int16), RATE)
    assert refusal(folder) == [
        f"{paths['spk0-0']}: no such file; correct wav.scp or restore it",
        f"{paths['spk0-1']}: is not readable audio, got 'Format not recognised.'; convert it to "
        "16-bit wav or flac",
        f"{paths['spk1-0']}: is empty, got 0 samples; record it again or drop it",
    ]


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_cut_audio_is_found_by_decoding(make_data_dir, suffix):
    folder = make_data_dir(speakers=[0, 1], suffix=suffix, check=False)
    path = read_table(folder / "wav.scp")["spk1-1"]
    os.truncate(path, Path(path).stat().st_size // 2)
    (line,) = refusal(folder, decode=True)
    assert line.startswith(f"{path}: ")
    assert line.endswith("; copy it again")
    check_data_dirs([folder])  # headers alone do not tell


def test_another_sample_rate_comes_with_the_command(folder: Path):
    path = read_table(folder / "wav.scp")["spk1-0"]
    soundfile.write(path, np.zeros(8000), 8000)
    assert refusal(folder, allow_rejected=0.24) == [
        f"{path}: must have 16000 Hz, got 8000; convert it: ffmpeg -i {path} -ar 16000 OUT.wav "
        "(or set frontend.sample_rate)"
    ]


@pytest.mark.parametrize(
    ("table", "rows", "values"),
    [
        (
            "wav.scp",
            {"spk0-0": "sph2pipe -f wav /corpus/a.sph |"},
            ["spk0-0", "`sph2pipe -f wav /corpus/a.sph > spk0-0.wav`"],
        ),
        ("utt2spk", {"spk1-0": "spk0", "spk1-1": "spk0"}, ["2 speakers", "spk0"]),
        ("utt2spk", {"ghost": "spk1"}, ["ghost"]),
        ("wav.scp", {"ghost": "/no/such.wav"}, ["ghost"]),
    ],
)
def test_tables_that_do_not_fit_are_refused(folder: Path, table, rows, values):
    change(folder, table, rows)
    lines = refusal(folder, allow_rejected=0.5)
    assert any(
        refused(line, f"{folder}/{t}", *values) for line in lines for t in (table, "utt2spk")
    )
    assert len(lines) == 1


def test_a_speaker_in_training_and_test(make_data_dir):
    pair = [("spk1-0", "spk2-0", False), ("spk1-0", "spk1-1", True)]
    train = make_data_dir("train", speakers=[0, 1], check=False)
    test = make_data_dir("test", speakers=[1, 2], trials=pair, check=False)
    assert refusal(train, test) == [
        f"{train} and {test}: a speaker is in training and test, got spk1; take it out of one of "
        "them"
    ]
    check_data_dirs([test])
    check_data_dirs([train, make_data_dir("dev", speakers=[1, 2])])  # two training sets may


def test_trials_that_name_nobody_or_are_none(make_data_dir):
    trials = [("spk0-0", "spk9-9", False), ("spk0-0", "spk0-1", True), ("spk8-8", "spk9-9", True)]
    folder = make_data_dir("test", speakers=[0, 1], trials=trials, check=False)
    with (folder / "trials").open("a") as file:
        file.write("spk0-0 spk0-1 1\n")
    assert refusal(folder) == [
        f"{folder}/trials:4: is not 'enrol test target|nontarget', got 'spk0-0 spk0-1 1'; correct "
        "it",
        f"{folder}/trials:1: names an unknown utterance, got spk9-9; add it to wav.scp or drop the "
        "trial",
        f"{folder}/trials:3: names an unknown utterance, got spk8-8; add it to wav.scp or drop the "
        "trial",
    ]


def write_segments(tmp_path: Path, segments: dict[str, tuple[str, float, float]]) -> Path:
    """A data directory over one recording, `rec`, of 2 s."""
    audio.write(tmp_path / "rec.wav", np.ones(2 * RATE, dtype=np.int16), RATE)
    speakers = {utterance: f"of-{utterance}" for utterance in segments}
    wavs = {"rec": tmp_path / "rec.wav"}
    write_data_dir(tmp_path / "d", wavs=wavs, speakers=speakers, segments=segments)
    return tmp_path / "d"


def test_segments_outside_their_recording(tmp_path: Path):
    folder = write_segments(
        tmp_path,
        {
            "a": ("rec", 0.0, 2.02),
            "b": ("rec", 1.0, 1.0),
            "c": ("rec", -0.5, 1.0),
            "d": ("other", 0.0, 1.0),
            "e": ("rec", 2.001, 2.005),
            "ok": ("rec", 0.5, 1.5),
        },
    )
    where = f"{folder}/segments:"
    assert refusal(folder) == [
        f"{where} b must have 0 <= start < end, got 1.0 1.0; correct it",
        f"{where} c must have 0 <= start < end, got -0.5 1.0; correct it",
        f"{where} a ends after its recording, got 2.02 of 2.00 s; correct it",
        f"{where} e ends after its recording, got 2.005 of 2.00 s; correct it",
        f"{where} d names a recording not in wav.scp, got other; correct one of them",
    ]


def test_a_segment_shorter_than_a_frame(tmp_path: Path):
    folder = write_segments(tmp_path, {"ok": ("rec", 0.5, 1.5), "tick": ("rec", 0.5, 0.51)})
    line = f"{folder}/segments: tick is shorter than a frame, got 0.01 s; drop it"
    assert refusal(folder) == [line]


def test_an_utterance_in_training_and_test(make_data_dir):
    train = make_data_dir("train", speakers=[0, 1], check=False)
    test = make_data_dir("test", speakers=[2, 3], trials=[("spk2-0", "spk2-1", True)], check=False)
    for table in ("wav.scp", "utt2spk"):
        (test / table).write_text((test / table).read_text().replace("spk3-0", "spk1-0"))
    line = f"{train} and {test}: an utterance is in training and test, got spk1-0"
    assert refusal(train, test)[0].startswith(line)


def test_segments_may_end_a_rounding_late(tmp_path: Path):
    folder = write_segments(tmp_path, {"a": ("rec", 0.0, 2.009), "b": ("rec", 1.25, 2.0)})
    check_data_dirs([folder])
    assert read_table(folder / "utt2dur") == {"a": "2.000000", "b": "0.750000"}


def test_segments_that_are_none(tmp_path: Path):
    folder = write_segments(tmp_path, {"a": ("rec", 0.0, 1.0), "b": ("rec", 1.0, 2.0)})
    change(folder, "segments", {"b": "rec 1.0"})
    assert refused(refusal(folder)[0], f"{folder}/segments", "b", "'rec 1.0'")


def test_five_of_a_kind_then_the_count(make_data_dir):
    folder = make_data_dir(speakers=range(4), seconds=[0.5, 0.5], check=False)
    for path in read_table(folder / "wav.scp").values():
        Path(path).unlink()
    change(folder, "utt2spk", {"ghost": "spk1"})
    lines = refusal(folder)
    assert sum("no such file" in line for line in lines) == 5
    assert lines[-1] == "... and 3 more broken recordings"
    assert sum("got ghost" in line for line in lines) == 1
    assert len(lines) == 7


def test_rejections_below_the_share_are_listed_and_left_out(folder: Path):
    path = read_table(folder / "wav.scp")["spk1-0"]
    Path(path).unlink()
    refusal(folder, allow_rejected=0.24)
    assert check_data_dirs([folder], allow_rejected=0.25) == [
        f"{folder}: 2 speakers, 3 utterances, 0.00 h; 1 left out, see {folder}/rejected.tsv"
    ]
    assert (folder / "rejected.tsv").read_text() == (
        f"spk1-0\t{path}\t{path}: no such file; correct wav.scp or restore it\n"
    )
    manifest = read_manifest([folder], sample_rate=RATE)
    assert sorted(manifest.ids) == ["spk0-0", "spk0-1", "spk1-1"]

    audio.write(path, np.ones(RATE, dtype=np.int16), RATE)  # restored: no longer rejected
    check_data_dirs([folder], allow_rejected=0.25)
    assert not (folder / "rejected.tsv").exists()
    assert len(read_manifest([folder], sample_rate=RATE)) == 4


def test_what_a_trial_names_cannot_be_rejected(make_data_dir):
    trials = [("spk0-0", "spk1-0", False), ("spk0-0", "spk0-1", True)]
    folder = make_data_dir("test", speakers=[0, 1], trials=trials, check=False)
    with (folder / "trials").open("a") as file:
        file.write("bad line\n")
    path = read_table(folder / "wav.scp")["spk0-1"]
    Path(path).unlink()
    assert refusal(folder, allow_rejected=0.5) == [
        f"{folder}/trials: names an utterance whose audio is broken, got spk0-1; {path}: no such "
        "file; correct wav.scp or restore it",
        f"{folder}/trials:3: is not 'enrol test target|nontarget', got 'bad line'; correct it",
    ]


def test_stereo_is_a_note(folder: Path):
    paths = read_table(folder / "wav.scp")
    for utterance in ("spk0-0", "spk1-1"):
        soundfile.write(paths[utterance], np.zeros((RATE, 2)), RATE)
    assert check_data_dirs([folder])[0] == (
        f"{folder}: 2 recordings have several channels, got spk0-0 and others; the first channel "
        "is read"
    )


def test_noise_needs_no_speakers(folder: Path):
    (folder / "utt2spk").unlink()
    assert check_data_dirs([folder]) == [f"{folder}: 4 utterances, 0.00 h"]


def test_processes_find_the_same(make_data_dir):
    speakers = range(167)
    folder = make_data_dir(speakers=speakers, seconds=[0.01, 0.02, 0.03], check=False)
    paths = read_table(folder / "wav.scp")  # 501 files: enough for a pool
    Path(paths["spk100-1"]).unlink()
    alone = refusal(folder)
    assert refusal(folder, num_workers=2) == alone
    assert len(alone) == 1
