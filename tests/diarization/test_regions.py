"""RTTM, UEM and .lab files: what is read, what is refused, what is written."""

from pathlib import Path

import numpy as np
import pytest
from refusals import refused, refuses

from speakerlab.diarization import regions
from speakerlab.diarization.regions import (
    Turn,
    merge_regions,
    merge_turns,
    read_lab,
    read_rttm,
)

TAIL = "<NA> <NA>"


def write(path: Path, *lines: str) -> Path:
    content = "".join(f"{line}\n" for line in lines)
    path.write_text(content)
    return path


def test_rttm_is_read_by_recording(tmp_path):
    path = write(
        tmp_path / "a.rttm",
        ";; a comment",
        "SPKR-INFO one 1 <NA> <NA> <NA> unknown bob <NA>",
        f"SPEAKER one 1 0.7 0.5 {TAIL} bob {TAIL}",
        f"SPEAKER two A 3 0 {TAIL} ann 0.9",
        "",
        f"SPEAKER one 1 1.2 1 {TAIL} ann {TAIL}",
    )
    turns = read_rttm(path)
    # 0.7 + 0.5 is not 1.2 in binary, but the turns touch
    assert turns == {
        "one": [
            Turn(0.7, 1.2, "bob"),
            Turn(1.2, 2.2, "ann"),
        ],
        "two": [Turn(3, 3, "ann")],
    }


def test_copies_in_a_folder_are_not_read(tmp_path):
    line = f"SPEAKER one 1 0 1 {TAIL} bob {TAIL}"
    write(tmp_path / "a.rttm", line)
    (tmp_path / "._a.rttm").write_bytes(b"\0\5\x16\7")
    write(tmp_path / "a (conflicted copy).rttm", line)
    assert read_rttm(tmp_path) == {"one": [Turn(0, 1, "bob")]}


def test_files_of_windows_are_read(tmp_path):
    path = tmp_path / "a.rttm"
    line = f"SPEAKER one 1 0 1 {TAIL} 张三 {TAIL}\r\n"
    path.write_bytes(line.encode("utf-16"))
    assert read_rttm(path) == {"one": [Turn(0, 1, "张三")]}


def test_an_empty_file_of_a_folder_is_a_recording_without_turns(tmp_path):
    write(tmp_path / "a.rttm", f"SPEAKER one 1 0 1 {TAIL} bob {TAIL}")
    write(tmp_path / "two.rttm")
    turns = read_rttm(tmp_path)
    assert turns == {"one": [Turn(0, 1, "bob")], "two": []}
    assert read_rttm(tmp_path / "two.rttm") == {}
    write(tmp_path / "b.rttm", f"SPEAKER one 1 2 1 {TAIL} bob {TAIL}")
    with refuses(f"{tmp_path / 'b.rttm'}:1", "one", tmp_path / "a.rttm"):
        read_rttm(tmp_path)
    (tmp_path / "none").mkdir()
    with refuses(str(tmp_path / "none"), ".rttm"):
        read_rttm(tmp_path / "none")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (f"SPEAKER a 1 x 1 {TAIL} bob {TAIL}", "x"),
        (f"SPEAKER a 1 nan 1 {TAIL} bob {TAIL}", "nan"),
        (f"SPEAKER a 1 0 inf {TAIL} bob {TAIL}", "inf"),
        (f"SPEAKER a 1 -0.1 1 {TAIL} bob {TAIL}", "-0.1"),
        (f"SPEAKER a 1 0 -1 {TAIL} bob {TAIL}", "-1"),
        (f"SPEAKER a 2 0 1 {TAIL} bob {TAIL}", "channels 1 and 2"),
        ("SPEAKER a 1 0 1", "SPEAKER a 1 0 1"),
        (f"SPEAKER a 1 0 1 {TAIL} bob", "bob"),
        (f"SPEAKER a 1 0 1 {TAIL} bob {TAIL} more", "more"),
        # A name with a blank, and lines that lack a column.
        (f"SPEAKER a 1 0 1 {TAIL} Ann Lee {TAIL}", "Ann Lee"),
        (f"SPEAKER a 1 0 1 {TAIL} Ann Lee <NA>", "Ann Lee"),
        (f"SPEAKER my a 1 0 1 {TAIL} bob <NA>", "my a"),
        ("SPEAKER a 1 0 1 <NA> bob <NA> <NA>", "bob"),
        ("SPEAKER a 1 0 1 <NA> bob 0.9 <NA>", "bob"),
        ("SPEAKER a 1 0 1 bob <NA> <NA> <NA>", "bob"),
        (f"SPEAKER a 0 1 {TAIL} bob {TAIL}", "<NA>"),
        # The second word of a name is a number, which reads like a confidence.
        (f"SPEAKER a 1 0 1 {TAIL} Speaker 2 <NA>", "Speaker 2"),
        (f"SPEAKER a 1 0 1 {TAIL} Speaker 1", "Speaker 1"),
        # The second word of a name, or a time, in the place of a missing channel.
        (f"SPEAKER my call 0 1 {TAIL} bob {TAIL}", "my call"),
        (f"SPEAKER a 0.5 1 2 {TAIL} bob {TAIL}", "0.5"),
        ("NOSCORE a 1 0 1 <NA> <NA> <NA> <NA>", "NOSCORE"),
        ("RIFF\udc80WAVE", "UTF-8"),
        ("\x1b[2J", "\\x1b[2J"),
    ],
)
def test_each_broken_line_of_an_rttm_is_refused(tmp_path, line, value):
    first = f"SPEAKER a 1 0 1 {TAIL} bob {TAIL}\n"
    path = tmp_path / "a.rttm"
    content = first + line + "\n" + first + line + "\n"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError) as caught:
        read_rttm(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert refused(lines[0], f"{path}:2", value)
    assert refused(lines[1], f"{path}:4", value)


@pytest.mark.parametrize("channel", ["0", "1", "A", "<NA>", "ch1"])
def test_usual_channels_and_confidences_are_read(tmp_path, channel):
    for confidence in ("<NA>", "0.9", "1.0", "<na>"):
        line = f"SPEAKER a {channel} 0 1 {TAIL} bob {confidence} <NA>"
        path = write(tmp_path / "a.rttm", line)
        assert read_rttm(path) == {"a": [Turn(0, 1, "bob")]}
    path = write(tmp_path / "a.uem", f"a {channel} 0 1")
    assert regions.read_uem(path) == {"a": [(0, 1)]}


def test_names_that_look_alike_are_refused(tmp_path):
    path = tmp_path / "a.rttm"
    for other in ("bob\u200b", "b\u00adob"):
        speakers = [
            f"SPEAKER a 1 {n} 1 {TAIL} {name} {TAIL}"
            for n, name in enumerate(("bob", other))
        ]
        write(path, *speakers)
        with refuses(f"{path}: a", "speakers", ascii(other)):
            read_rttm(path)
        recordings = [
            f"SPEAKER {name} 1 0 1 {TAIL} a {TAIL}" for name in ("bob", other)
        ]
        write(path, *recordings)
        with refuses(path, "recordings", ascii(other)):
            read_rttm(path)


def test_uem_and_lab_are_read_merged(tmp_path):
    path = write(
        tmp_path / "a.uem", "b 1 5 6", "a 1 2 3", "; no", "a 1 0.5 2.5", "a 1 7 8"
    )
    assert regions.read_uem(path) == {
        "a": [(0.5, 3), (7, 8)],
        "b": [(5, 6)],
    }
    path = write(tmp_path / "a.lab", "1 2 speech", "2 2.5 sp", "0 0.5")
    assert read_lab(path) == [(0, 0.5), (1, 2.5)]


@pytest.mark.parametrize(
    ("read", "line", "value"),
    [
        (regions.read_uem, "a 1 5 5", "5"),
        (regions.read_uem, "a 5 6", "a 5 6"),
        (regions.read_uem, "my a 1 5 6", "my a"),
        (regions.read_uem, "my call 5 6", "my call"),
        (regions.read_lab, "5 4 speech", "4"),
        (regions.read_lab, "5 6 sil", "sil"),
        (regions.read_lab, "5 x speech", "x"),
    ],
)
def test_a_broken_line_of_a_uem_or_lab_is_refused(tmp_path, read, line, value):
    path = write(tmp_path / "a", line)
    with refuses(f"{path}:1", value):
        read(path)


def test_what_is_written_is_read_again(tmp_path):
    rng = np.random.default_rng(0)
    milliseconds = rng.integers(0, 100_000, (50, 2))
    times = np.sort(milliseconds, axis=1) / 1000
    turns = {"a": [], "b": []}
    for number, (start, end) in enumerate(times.tolist()):
        if number < 30:
            turns["a"].append(Turn(start, end, f"s{number % 3}"))
        else:
            turns["b"].append(Turn(start, end, "x"))
    turns["a"].sort()
    turns["b"].sort()
    regions.write_rttm(tmp_path / "a.rttm", turns)
    assert read_rttm(tmp_path / "a.rttm") == turns
    spoken = {}
    for name, recording_turns in turns.items():
        spoken[name] = merge_regions(turn[:2] for turn in recording_turns)
    regions.write_uem(tmp_path / "a.uem", spoken)
    assert regions.read_uem(tmp_path / "a.uem") == spoken


def test_bounds_are_rounded_to_milliseconds(tmp_path):
    path = tmp_path / "a.rttm"
    first = Turn(0, 1.0004, "x")
    second = Turn(1.0004, 2.0008, "x")
    regions.write_rttm(path, {"a": [first, second]})
    # They still touch.
    rounded = [Turn(0, 1, "x"), Turn(1, 2.001, "x")]
    assert read_rttm(path)["a"] == rounded


@pytest.mark.parametrize(
    ("turn", "value"),
    [
        (Turn(0, 1, "ann lee"), "ann lee"),
        (Turn(0, float("nan"), "ann"), "nan"),
        (Turn(2, 1, "ann"), "2 to 1"),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path, turn, value):
    path = tmp_path / "a.rttm"
    with refuses(str(path), value):
        turns = {"a": [turn]}
        regions.write_rttm(path, turns)
    assert not list(tmp_path.iterdir())


def test_overlapping_turns_of_one_speaker_are_merged_and_counted():
    turns = [
        Turn(0, 2, "a"),
        Turn(1, 3, "b"),
        Turn(1, 1.5, "a"),
        Turn(1.5, 4, "a"),
    ]
    merged = [Turn(0, 4, "a"), Turn(1, 3, "b")]
    assert merge_turns(turns) == (merged, 2)

    touching = [Turn(0, 1, "a"), Turn(1, 2, "a")]
    assert merge_turns(touching) == (touching, 0)
    assert merge_regions(turn[:2] for turn in touching) == [(0, 2)]
