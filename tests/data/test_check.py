"""Every fault of a data directory has its line; with a fault nothing is written."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import soundfile
from refusals import refused, refuses
from voices import make_wave

from speakerlab.data import audio, decoders
from speakerlab.data.check import check_data_dirs
from speakerlab.data.levels import PADDED, SILENT
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import (
    NOT_USED,
    list_conditions,
    read_enroll,
    read_rejected,
    read_table,
    write_data_dir,
    write_rejected,
    write_table,
)

RATE = 16000


def refusal(*folders: Path, **settings) -> list[str]:
    """The lines of a refusal without the verdict, after checking that nothing was written."""
    with pytest.raises(ValueError) as refused:
        check_data_dirs(folders, **settings)
    *lines, verdict = str(refused.value).splitlines()
    # Of a set that exceeds the limit, see `test_a_set_over_the_limit_is_named`.
    lines = [line for line in lines if "--allow-rejected" not in line]
    names = ", ".join(map(str, folders))
    assert verdict == f"{names}: refused, no utt2dur was written"
    for folder in folders:
        assert not (folder / "utt2dur").exists()
        assert not (folder / "rejected.tsv").exists()
    return lines


def change(folder: Path, table: str, rows: Mapping[str, str]) -> None:
    """Replace or add rows of a table."""
    content = read_table(folder / table)
    write_table(folder / table, content | rows)


@pytest.fixture
def folder(make_data_dir) -> Path:
    """Two speakers, two utterances each, of 0.5 and 0.75 s; not checked."""
    return make_data_dir(
        speakers=[0, 1],
        seconds=[0.5, 0.75],
        check=False,
    )


@pytest.mark.parametrize("decode", [False, True])
def test_good_directory_gets_exact_durations_and_one_line(folder: Path, decode):
    assert check_data_dirs([folder], decode=decode) == [
        f"{folder}: 2 speakers, 4 utterances, 0.00 h"
    ]
    lines = (folder / "utt2dur").read_text().splitlines()
    assert lines == [
        "spk0-0 0.500000",
        "spk0-1 0.750000",
        "spk1-0 0.500000",
        "spk1-1 0.750000",
    ]
    assert not (folder / "rejected.tsv").exists()


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
@pytest.mark.parametrize("decode", [False, True])
def test_cut_audio_is_found(make_data_dir, suffix, decode):
    folder = make_data_dir(speakers=[0, 1], suffix=suffix, check=False)
    path = Path(read_table(folder / "wav.scp")["spk1-1"])
    half_size = path.stat().st_size // 2
    os.truncate(path, half_size)
    (line,) = refusal(folder, decode=decode)
    assert line.startswith(f"{path}: ")
    assert line.endswith("; copy it again")


def test_damage_within_a_recording_is_found_by_decoding(make_data_dir):
    folder = make_data_dir(speakers=[0, 1], suffix=".flac", check=False)
    path = Path(read_table(folder / "wav.scp")["spk1-1"])
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(200)
    path.write_bytes(content)
    check_data_dirs([folder])
    (folder / "utt2dur").unlink()
    (line,) = refusal(folder, decode=True)
    assert line.startswith(f"{path}: cannot be decoded")


@pytest.mark.parametrize(
    ("table", "rows", "where", "values"),
    [
        (
            "wav.scp",
            "spk0-0 sph2pipe /a.sph |",
            "wav.scp",
            ["spk0-0", "`sph2pipe /a.sph > spk0-0"],
        ),
        ("wav.scp", "ghost /no/such.wav", "utt2spk", ["ghost"]),
        ("wav.scp", "spk0-1 /a.wav\nspk0-1 /b.wav", "wav.scp:3", ["spk0-1"]),
        ("utt2spk", "spk1-0 spk0\nspk1-1 spk0", "utt2spk", ["2 speakers", "spk0"]),
        ("utt2spk", "ghost spk1", "utt2spk", ["ghost"]),
        ("utt2spk", "spk0-0 a\nspk0-0 b", "utt2spk:2", ["spk0-0"]),
        ("trials", "spk0-0 spk0-1 yes", "trials:1", ["'spk0-0 spk0-1 yes'"]),
        ("trials", "spk0-0 spk9-9 target", "trials:1", ["spk9-9"]),
        (
            "trials",
            "spk0-0 spk0-1 target\nspk8-8 spk0-1 target",
            "trials:2",
            ["spk8-8"],
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(folder: Path, table, rows, where, values):
    path = folder / table
    remaining = read_table(path) if path.exists() else {}
    lines = rows.splitlines()
    for row in rows.splitlines():
        key = row.split()[0]
        remaining.pop(key, None)
    for key, value in remaining.items():
        lines.append(f"{key} {value}")
    path.write_text("\n".join(sorted(lines)) + "\n")

    message = "\n".join(refusal(folder, allow_rejected=0.5))
    assert refused(message, f"{folder}/{where}", *values)


def test_speakers_before_utterances_are_one_line(folder: Path):
    path = folder / "utt2spk"
    rows = [line.split() for line in path.read_text().splitlines()]
    path.write_text("".join(f"{speaker} {name}\n" for name, speaker in rows))
    (line,) = refusal(folder)
    assert refused(line, f"{folder}/utt2spk", "wrong order", "'utterance speaker'")

    # Speakers may have the names of their utterances.
    path.write_text("".join(f"{name} {name}\n" for name, _ in rows))
    check_data_dirs([folder])
    (folder / "utt2dur").unlink()

    path.write_text("".join(f"other-{name} {speaker}\n" for name, speaker in rows))
    message = "\n".join(refusal(folder))
    assert "has no speaker" in message
    assert "wrong order" not in message


def test_a_line_that_cannot_be_read_is_reported_once(folder: Path):
    path = folder / "utt2spk"
    first, second, *others = path.read_bytes().splitlines(keepends=True)
    name, _ = second.split()
    lines = [first.rstrip() + b" more\n", name + b" Jos\xe9\n", *others]
    path.write_bytes(b"".join(lines))
    message = "\n".join(refusal(folder))
    assert "utt2spk:1: must have 2 columns" in message
    assert "utt2spk:2: is not UTF-8" in message
    assert "has no speaker" not in message

    # A line that is missing is another fault.
    path.write_bytes(b"".join([*lines[:2], *others[1:]]))
    assert "has no speaker" in "\n".join(refusal(folder))


def test_an_empty_directory_and_an_empty_table_are_refused(tmp_path: Path):
    with refuses(f"{tmp_path}/wav.scp", error=FileNotFoundError):
        check_data_dirs([tmp_path])
    (tmp_path / "wav.scp").touch()
    (line,) = refusal(tmp_path)
    assert refused(line, f"{tmp_path}/wav.scp", "no recordings")


def test_audio_that_is_missing_unreadable_empty_or_of_another_rate_is_refused(
    folder: Path,
):
    paths = read_table(folder / "wav.scp")
    Path(paths["spk0-0"]).unlink()
    Path(paths["spk0-1"]).write_text("no audio")
    no_samples = np.zeros(0, dtype=np.int16)
    audio.write(paths["spk1-0"], no_samples, RATE)
    soundfile.write(paths["spk1-1"], np.zeros(8000), 8000)
    values = [
        "no such file",
        "not readable",
        "0 samples",
        "8000; convert it: ffmpeg -i {} -ar",
    ]
    lines = refusal(folder)
    assert len(lines) == 4
    rows = zip(lines, paths.values(), values)
    for line, path, value in rows:
        assert refused(line, path, value.format(path))


def test_a_speaker_or_an_utterance_in_training_and_test_is_refused(make_data_dir):
    train = make_data_dir("train", speakers=[0, 1], check=False)
    test = make_data_dir(
        "test",
        speakers=[1, 2],
        trials=[
            ("spk1-0", "spk2-0", False),
            ("spk1-0", "spk1-1", True),
        ],
        check=False,
    )
    (line,) = refusal(train, test)
    assert refused(line, f"{train} and {test}", "spk1")
    check_data_dirs([test])

    # two training sets may share a speaker
    dev = make_data_dir("dev", speakers=[1, 2])
    check_data_dirs([train, dev])
    (train / "utt2dur").unlink()

    other = make_data_dir(
        "other",
        speakers=[2, 3],
        trials=[("spk2-0", "spk2-1", True)],
        check=False,
    )
    for table in ("wav.scp", "utt2spk"):
        text = (other / table).read_text()
        text = text.replace("spk3-0", "spk1-0")
        (other / table).write_text(text)
    line = refusal(train, other)[0]
    assert refused(line, f"{train} and {other}", "spk1-0")


def write_segments(
    tmp_path: Path,
    segments: dict[str, tuple[str, float, float]],
) -> Path:
    """A data directory over one recording, `rec`, of 2 s."""
    recording = tmp_path / "rec.wav"
    wave_S = np.ones(2 * RATE, dtype=np.int16)
    audio.write(recording, wave_S, RATE)
    speakers = {utterance: f"of-{utterance}" for utterance in segments}
    write_data_dir(
        tmp_path / "d",
        wavs={"rec": recording},
        speakers=speakers,
        segments=segments,
    )
    return tmp_path / "d"


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ("rec 0.0 2.02", ["2.02 of 2.00 s"]),
        ("rec 1.0 1.0", ["1.0 1.0"]),
        ("rec -0.5 1.0", ["-0.5 1.0"]),
        ("other 0.0 1.0", ["other"]),
        ("rec 2.001 2.005", ["2.005 of 2.00 s"]),
        ("rec 0.5 0.51", ["0.01 s"]),
        ("rec 1.0", ["rec 1.0'"]),
    ],
)
def test_segments_outside_their_recording_or_too_short_are_refused(
    tmp_path: Path, row, values
):
    segments = {
        "ok": ("rec", 0.5, 1.5),
        "x": ("rec", 0.0, 1.0),
    }
    folder = write_segments(tmp_path, segments)
    change(folder, "segments", {"x": row})
    line = refusal(folder)[0]
    assert refused(line, f"{folder}/segments", "x", *values)


def test_one_speaker_that_is_left_is_refused(folder: Path):
    for name in ("spk1-0", "spk1-1"):
        Path(read_table(folder / "wav.scp")[name]).unlink()
    (line,) = refusal(folder, allow_rejected=0.5)
    assert refused(line, str(folder), "at least 2 speakers", "spk0")


def test_segments_may_end_a_rounding_late(tmp_path: Path):
    segments = {
        "a": ("rec", 0.0, 2.009),
        "b": ("rec", 1.25, 2.0),
    }
    folder = write_segments(tmp_path, segments)
    check_data_dirs([folder])
    durations = read_table(folder / "utt2dur")
    assert durations == {"a": "2.000000", "b": "0.750000"}


def test_rejections_below_the_share_are_listed_and_left_out(folder: Path):
    path = read_table(folder / "wav.scp")["spk1-0"]
    Path(path).unlink()
    refusal(folder, allow_rejected=0.24)
    assert check_data_dirs([folder], allow_rejected=0.25) == [
        f"{folder}: 2 speakers, 3 utterances, 0.00 h; 1 left out, see"
        f" {folder}/rejected.tsv"
    ]
    expected = f"spk1-0\t{path}\t{path}: no such file; correct the path or restore it\n"
    assert (folder / "rejected.tsv").read_text() == expected
    manifest = read_manifest([folder], sample_rate=RATE)
    assert sorted(manifest.ids) == ["spk0-0", "spk0-1", "spk1-1"]

    # restored: no longer rejected
    audio.write(path, np.ones(RATE, dtype=np.int16), RATE)
    check_data_dirs([folder], allow_rejected=0.25)
    assert not (folder / "rejected.tsv").exists()
    manifest = read_manifest([folder], sample_rate=RATE)
    assert len(manifest) == 4


def test_what_a_trial_names_cannot_be_rejected(make_data_dir):
    trials = [
        ("spk0-0", "spk1-0", False),
        ("spk0-0", "spk0-1", True),
    ]
    folder = make_data_dir(
        "test",
        speakers=[0, 1],
        trials=trials,
        check=False,
    )
    with (folder / "trials").open("a") as file:
        file.write("bad line\n")
    path = read_table(folder / "wav.scp")["spk0-1"]
    Path(path).unlink()
    first, second = refusal(folder, allow_rejected=0.5)
    assert refused(first, f"{folder}/trials:3", "'bad line'")
    assert refused(second, f"{folder}/trials", "spk0-1", path)


@pytest.mark.parametrize(
    "text",
    [
        "spk0-0 spk0-1 Target\nspk0-0 {last} NonTarget\n",
        "1 spk0-0 spk0-1\n0 spk0-0 {last}\n",
        "spk0-0 spk0-1 1\nspk0-0 {last} 0\n",
        "enrol,test,label\nspk0-0,spk0-1,True\nspk0-0,{last},false\n",
    ],
)
def test_trials_are_checked_in_every_format_that_is_scored(folder: Path, text):
    (folder / "trials").write_text(text.format(last="ghost"))
    (line,) = refusal(folder)
    number = len(text.splitlines())
    assert refused(line, f"{folder}/trials:{number}", "ghost")
    # A pair that scoring would refuse, after the training.
    (folder / "trials").write_text(text.format(last="spk0-1"))
    repeat, contradiction = refusal(folder)
    where = f"{folder}/trials:{number}"
    assert refused(repeat, where, f"repeats line {number - 1}")
    assert refused(contradiction, where, "spk0-1 of spk0")
    (folder / "trials").write_text(text.format(last="spk1-0"))
    check_data_dirs([folder])


def test_labels_that_contradict_the_speakers_are_refused(make_data_dir):
    trials = []
    for take in range(3):
        trials += [
            ("spk0-0", f"spk1-{take}", False),
            ("spk0-0", f"spk2-{take}", False),
        ]
    trials.append(("spk0-0", "spk0-1", True))
    folder = make_data_dir(
        "test",
        speakers=[0, 1, 2],
        seconds=[0.5, 0.5, 0.5],
        trials=trials,
        check=False,
    )
    right = (folder / "trials").read_text()
    check_data_dirs([folder])
    for name in ("utt2dur", ".checked"):
        (folder / name).unlink(missing_ok=True)

    # All labels are inverted.
    inverted = right.replace(" nontarget", " same").replace(" target", " nontarget")
    (folder / "trials").write_text(inverted.replace(" same", " target"))
    *lines, rest = refusal(folder)
    assert len(lines) == 5
    for number, line in enumerate(lines, 1):
        assert refused(line, f"{folder}/trials:{number}", "spk0-0 is of spk0")
    assert rest == "... and 2 more trials that contradict the speakers"

    # One utterance is of another speaker.
    (folder / "trials").write_text(right)
    change(folder, "utt2spk", {"spk2-0": "spk0"})
    (line,) = refusal(folder)
    assert refused(line, f"{folder}/trials", "nontarget", "spk2-0 of spk0")

    # Without speakers, nothing is compared, and the summary says so.
    (folder / "utt2spk").unlink()
    (summary,) = check_data_dirs([folder])
    assert "no utt2spk, so no speakers" in summary


def test_pairs_in_both_orders_and_of_one_utterance_are_notes(make_data_dir):
    folder = make_data_dir("test", speakers=[0, 1], seconds=[0.5, 0.5], check=False)
    (folder / "trials").write_text(
        "spk0-0 spk1-0 nontarget\n"
        "spk0-0 spk0-1 target\n"
        "spk1-1 spk1-1 target\n"
        "spk0-1 spk0-0 target\n"
        "spk1-0 spk0-0 nontarget\n"
        "spk0-1 spk0-1 target\n"
    )
    same, mirror, _ = check_data_dirs([folder])
    assert refused(same, f"{folder}/trials:3", "2 trials", "spk1-1")
    assert refused(mirror, f"{folder}/trials:4", "2 trials", "spk0-1 spk0-0 of line 2")

    # A model is no utterance, even under the same name.
    (folder / "enroll.map").write_text("spk0-0 spk0-1\nspk1-1 spk1-0\n")
    (folder / "trials").write_text(
        "spk0-0 spk0-0 target\nspk0-0 spk1-1 nontarget\nspk1-1 spk0-0 nontarget\n"
    )
    assert len(check_data_dirs([folder])) == 1


def test_speakers_that_look_alike_are_refused_or_noted(make_data_dir):
    def make(name: str, speakers: list[int], spellings: dict[str, str]) -> Path:
        folder = make_data_dir(name, speakers=speakers, check=False)
        change(folder, "utt2spk", spellings)
        return folder

    wide = make("wide", [0, 1], {"spk0-0": "\uff11", "spk1-0": "1"})
    with refuses(f"{wide}/utt2spk", "'1'", ascii("\uff11")):
        check_data_dirs([wide])
    alone = make("alone", [0, 1], {"spk0-0": "\uff11"})
    digit = make("digit", [2, 3], {"spk2-0": "1"})
    with refuses(f"{alone} and {digit}", "'1'", ascii("\uff11")):
        check_data_dirs([alone, digit])

    upper = make("upper", [4, 5], {"spk4-0": "Ann"})
    lower = make("lower", [6, 7], {"spk6-0": "ann"})
    assert len(check_data_dirs([upper])) == 1
    note, *_ = check_data_dirs([upper, lower])
    assert refused(note, f"{upper} and {lower}", "1 pair", "ann and Ann")
    change(upper, "utt2spk", {"spk5-0": "aNN"})
    note, *_ = check_data_dirs([upper])
    assert refused(note, str(upper), "1 pair", "aNN and Ann")


def test_stereo_is_a_note(folder: Path):
    paths = read_table(folder / "wav.scp")
    wave_SC = np.zeros((RATE, 2))
    for utterance in ("spk0-0", "spk1-1"):
        soundfile.write(paths[utterance], wave_SC, RATE)
    note = check_data_dirs([folder])[0]
    assert note == (
        f"{folder}: 2 recordings with several channels: spk0-0 and others; the first"
        " channel is read"
    )


def write_silence_noise_and_clipping(folder: Path) -> None:
    """Replace recordings of a data directory: spk0 is silent, then noise, spk1 is clipped."""
    paths = read_table(folder / "wav.scp")
    rng = np.random.default_rng(0)
    noise_S = rng.normal(0, 3000, 2 * RATE).astype(np.int16)
    loud_S = 10.0 * make_wave(1, 0, 1.0)
    clipped_S = np.clip(loud_S, -32768, 32767).astype(np.int16)
    audio.write(paths["spk0-0"], 0 * noise_S, RATE)
    audio.write(paths["spk0-1"], noise_S, RATE)
    audio.write(paths["spk1-0"], clipped_S, RATE)


def test_levels_that_no_speech_has_are_notes_of_decoding(folder: Path):
    write_silence_noise_and_clipping(folder)
    notes = check_data_dirs([folder], decode=True)
    assert notes[:-1] == [
        f"{folder}: 1 of 4 recordings are silent (spk0-0); listen to them",
        f"{folder}: 1 of 4 recordings are noise or tones (spk0-1); listen to them",
        f"{folder}: 1 of 4 recordings are clipped (spk1-0); listen to them",
    ]
    # They are used all the same.
    assert len(read_table(folder / "utt2dur")) == 4
    assert read_rejected(folder) == {}
    # Headers say nothing about levels, and noise may have any.
    assert len(check_data_dirs([folder])) == 1
    (folder / "utt2spk").unlink()
    assert len(check_data_dirs([folder], decode=True)) == 1


def test_the_first_part_of_a_long_recording_is_measured(folder: Path, monkeypatch):
    path = Path(read_table(folder / "wav.scp")["spk0-0"])
    wave_S = make_wave(0, 0, 2.0)
    wave_S[:RATE] = 0
    audio.write(path, wave_S, RATE)
    assert audio.read_info(path, decode=True).level_fault == PADDED
    monkeypatch.setattr(decoders, "BLOCK_SAMPLES", RATE)
    monkeypatch.setattr(audio, "MAX_MEASURED_SAMPLES", RATE)
    info = audio.read_info(path, decode=True)
    assert info.level_fault == SILENT
    assert info.num_samples == 2 * RATE


def test_processes_find_the_same(make_data_dir):
    speakers = range(167)
    # 501 files: enough for a pool
    folder = make_data_dir(
        speakers=speakers,
        seconds=[0.01, 0.02, 0.03],
        check=False,
    )
    paths = read_table(folder / "wav.scp")
    Path(paths["spk100-1"]).unlink()
    alone = refusal(folder)
    assert refusal(folder, num_workers=2) == alone
    assert len(alone) == 1


TRIALS = [
    ("m", "spk1-0", False),
    ("spk0-0", "spk0-1", True),
]


@pytest.fixture
def conditioned(make_data_dir) -> Path:
    """Two speakers, two utterances each, a model of two, and a condition of each kind."""
    made = make_data_dir(
        "test",
        speakers=[0, 1],
        seconds=[0.5, 0.75],
        trials=TRIALS,
        check=False,
    )
    write_data_dir(
        made,
        wavs=read_table(made / "wav.scp"),
        speakers=read_table(made / "utt2spk"),
        trials={"trials": TRIALS},
        columns={
            "utt2dialect": {"spk0-0": "Standard  Mandarin", "spk0-1": " "},
            "spk2gender": {"spk0": "m", "spk1": "f"},
        },
        enroll={"m": ["spk0-0", "spk0-1"]},
    )
    return made


def test_what_is_written_is_read_and_passes(conditioned):
    assert (conditioned / "utt2dialect").read_text() == "spk0-0 Standard_Mandarin\n"
    models = read_enroll(conditioned / "enroll.map")
    assert models == {"m": ["spk0-0", "spk0-1"]}
    assert read_enroll(conditioned / "none") == {}
    check_data_dirs([conditioned])
    (conditioned / "utt2info.csv").write_text("a table of another kind")
    (conditioned / "spk2utt").write_text("spk0 spk0-0 spk0-1\n")
    assert list_conditions(conditioned) == ["spk2gender", "utt2dialect"]
    check_data_dirs([conditioned])


def test_broken_audio_of_a_model_in_a_trial_is_refused(conditioned):
    (conditioned / "trials").write_text("m spk1-0 nontarget\n")
    paths = read_table(conditioned / "wav.scp")
    path = Path(paths["spk0-1"])
    path.unlink()
    with refuses(f"{conditioned}/trials", "spk0-1", path):
        check_data_dirs([conditioned], allow_rejected=0.5)


@pytest.mark.parametrize(
    ("table", "text", "where", "value"),
    [
        ("spk2gender", "spk0 m\nspk0-0 m\n", "spk2gender", "spk0-0"),
        ("utt2dialect", "spk9-9 Wu\n", "utt2dialect", "spk9-9"),
        ("utt2dialect", "spk0-0 Wu Dialect\n", "utt2dialect", "Wu Dialect'"),
        ("enroll.map", "m spk0-0 spk7-7\n", "enroll.map", "spk7-7"),
        ("enroll.map", "m spk0-0\nn spk1-0 spk1-0\n", "enroll.map", "spk1-0 spk1-0"),
        ("enroll.map", "m spk0-0\nn spk0-1 spk1-0\n", "enroll.map", "spk0, spk1"),
        (
            "trials",
            "spk0-0 spk0-1 target\nm spk1-0 target\n",
            "trials:2",
            "m is of spk0",
        ),
        ("trials", "m spk1-0 nontarget\nspk1-0 m nontarget\n", "trials:2", "m;"),
        ("trials", "x spk0-0 target\n", "trials:1", "x;"),
    ],
)
def test_conditions_models_and_trials_with_unknown_ids_are_refused(
    conditioned, table, text, where, value
):
    (conditioned / table).write_text(text)
    with refuses(f"{conditioned}/{where}", value):
        check_data_dirs([conditioned])


def test_a_set_over_the_limit_is_named(folder: Path):
    (folder.parent / "wav/spk0-0.wav").unlink()
    (folder.parent / "wav/spk1-1.wav").unlink()
    with refuses(folder, "2 of 4", "50.0%", "1 more", "--allow-rejected 0.3"):
        check_data_dirs([folder], allow_rejected=0.3)
    check_data_dirs([folder], allow_rejected=0.5)


def test_files_left_out_on_purpose_do_not_count(make_data_dir):
    folder = make_data_dir(speakers=[0, 1], seconds=[0.5, 0.75], check=False)
    rows = {f"{NOT_USED}{row}": (f"/{row}.wav", "is silent") for row in range(9)}
    write_rejected(folder, rows)
    check_data_dirs([folder])
    assert read_rejected(folder) == rows


def test_copies_of_editors_are_no_trial_lists(make_data_dir):
    folder = make_data_dir(speakers=[0, 1], seconds=[0.5, 0.75], check=False)
    for name in ("trials~", "trials.bak", "._trials", "trials (conflicted copy)"):
        (folder / name).write_text("old")
    check_data_dirs([folder])
    (folder / "trials").mkdir()
    with refuses(folder / "trials", "folder"):
        check_data_dirs([folder])
