"""Tables with other columns, encodings and neighbours than a data directory has."""

import re
from pathlib import Path

import numpy as np
import pytest
from refusals import refused, refuses

from speakerlab.bin.check import main as check
from speakerlab.core.faults import Faults
from speakerlab.data.table_arguments import EXAMPLES
from speakerlab.data.tables import (
    list_conditions,
    list_skipped,
    list_tables,
    list_trials,
    read_about,
    read_enroll,
    read_rejected,
    read_segments,
    read_table,
    write_data_dir,
)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("utt2spk", "u s m"),
        ("utt2spk", "u"),
        ("utt2spk", "u Ann Lee"),
        ("train_utt2spk", "u s m"),
        ("utt2dur", "u 1.0 s"),
        ("utt2lang", "u zh CN"),
        ("spk2gender", "s f 40"),
        ("segments", "u r 0"),
        ("segments", "u r 0 1 2"),
        ("segments", "u my r 0 1"),
        ("wav.scp", "u"),
        ("enroll.map", "model"),
    ],
)
def test_a_line_with_more_or_fewer_columns_is_refused(tmp_path, name, line):
    path = tmp_path / name
    good = "a 0 0 1" if name == "segments" else "a 1"
    path.write_text(f"{good}\n{line}\n")
    with refuses(f"{path}:2", line):
        read_table(path)


def test_paths_texts_and_lists_may_have_blanks(tmp_path):
    (tmp_path / "wav.scp").write_text("u\t/my  voice/张 三 1.wav \n")
    assert read_table(tmp_path / "wav.scp") == {"u": "/my  voice/张 三 1.wav"}
    (tmp_path / "list").write_text("u my voice.wav\n")
    assert read_table(tmp_path / "list") == {"u": "my voice.wav"}
    with refuses(f"{tmp_path}/list:1", "my voice.wav"):
        read_table(tmp_path / "list", columns="utterance speaker")
    (tmp_path / "about").write_text("corpus My own corpus\n")
    assert read_about(tmp_path) == {"corpus": "My own corpus"}
    (tmp_path / "enroll.map").write_text("m a  b c\n")
    assert read_enroll(tmp_path / "enroll.map") == {"m": ["a", "b", "c"]}
    (tmp_path / "segments").write_text("u r  0\t1.5\n")
    assert read_segments(tmp_path / "segments") == {"u": ("r", 0.0, 1.5)}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_tables_of_windows_are_read(tmp_path, encoding):
    path = tmp_path / "wav.scp"
    path.write_bytes("u1 张三.wav\r\nu2 b.wav\r\n".encode(encoding))
    assert read_table(path) == {"u1": "张三.wav", "u2": "b.wav"}


def test_speakers_that_look_alike_are_refused(tmp_path):
    path = tmp_path / "utt2spk"
    path.write_text("a ann\nb ann\u200b\nc bob\n", encoding="utf-8")
    with refuses(path, "'ann'", r"'ann\u200b'"):
        read_table(path)
    faults = Faults()
    read_table(path, faults)
    assert faults
    # Ids are not compared, because they come from file names, which nobody chose to spell so.
    path.write_text("a ann\na\u200b bob\n", encoding="utf-8")
    assert len(read_table(path)) == 2


def test_each_line_of_another_encoding_is_named(tmp_path):
    path = tmp_path / "utt2spk"
    path.write_bytes("a x\nb Müller\nc y\nd Gül\n".encode("latin-1"))
    faults = Faults()
    assert read_table(path, faults) == {"a": "x", "c": "y"}
    report = faults.report()
    assert refused(report, f"{path}:2", "UTF-8", "M\\udcfcller")
    assert refused(report, f"{path}:4", "UTF-8")


@pytest.fixture
def folder(make_data_dir) -> Path:
    """A data directory with a list, a condition, and what programs leave beside them."""
    folder = make_data_dir(speakers=[0, 1], seconds=[0.5, 0.75])
    for name in ("trials", "trials_b", "utt2device", "spk2gender"):
        (folder / name).write_text("")
    for name in (
        "trials~",
        "trials.bak",
        "trials (conflicted copy)",
        "trials copy",
        "._trials",
        "utt2device~",
        "#utt2spk#",
    ):
        (folder / name).write_text("old")
    return folder


def test_copies_of_tables_are_skipped_and_counted(folder):
    assert [path.name for path in list_trials(folder)] == ["trials", "trials_b"]
    assert list_conditions(folder) == ["spk2gender", "utt2device"]
    assert list_tables(folder) == [
        "wav.scp",
        "utt2spk",
        "spk2gender",
        "utt2device",
        "trials",
        "trials_b",
    ]
    assert list_skipped(folder) == [
        "#utt2spk#",
        "._trials",
        "trials (conflicted copy)",
        "trials copy",
        "trials.bak",
        "trials~",
        "utt2device~",
    ]


@pytest.mark.parametrize("name", ["trials", "trials_vox1", "utt2lang", "spk2info"])
def test_a_folder_named_like_a_table_is_refused(make_data_dir, name, capsys):
    folder = make_data_dir(speakers=[0, 1], seconds=[0.5, 0.75])
    (folder / name).mkdir()
    with refuses(folder / name, "folder"):
        list_tables(folder)
    with refuses(folder / name, "folder"):
        check([str(folder)])


def test_a_data_directory_is_written_to_a_path_given_as_text(tmp_path):
    folder = f"{tmp_path}/new/data"
    write_data_dir(folder, wavs={"a": f"{tmp_path}/a.wav"}, speakers={"a": "ann"})
    assert read_table(Path(folder) / "wav.scp") == {"a": f"{tmp_path}/a.wav"}


WAVS = {"a": "a.wav", "b": "b.wav"}
SPEAKERS = {"a": "ann", "b": "bob"}


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ({"wavs": "a.wav"}, ["'a.wav'"]),
        ({"wavs": ["a.wav"]}, ["['a.wav']"]),
        ({"wavs": None}, ["None"]),
        ({"wavs": {1: "a.wav"}}, ["got 1;"]),
        ({"wavs": {"a": ["a.wav"]}}, ["a must", "['a.wav']"]),
        ({"speakers": "ann"}, ["'ann'"]),
        ({"speakers": {"a": "ann", "b": "Bob Lee"}}, ["of b", "'Bob Lee'"]),
        ({"speakers": {"a": "ann", "b": 2}}, ["of b", "got 2;"]),
        ({"speakers": {"b": "bob"}}, ["of a"]),
        ({"speakers": {}}, ["of a and 1 other;"]),
        ({"segments": {"s": ("a", 0.5)}}, ["s must", "('a', 0.5)"]),
        ({"segments": {"s": ("a", 2, 1)}}, ["s must", "('a', 2, 1)"]),
        ({"trials": "a b target"}, ["'a b target'"]),
        ({"trials": [("a", "b", True)]}, ["[('a', 'b', True)]"]),
        ({"trials": {"test": []}}, ["'test'"]),
        ({"trials": {"trials": "a b target"}}, ["trials must", "'a b target'"]),
        ({"trials": {"trials": [("a", "b")]}}, ["row 1", "('a', 'b')"]),
        ({"trials": {"trials": [("a", "b", True), "abc"]}}, ["row 2", "'abc'"]),
        ({"trials": {"trials": [("a", "b", "same")]}}, ["'same'"]),
        ({"trials": {"trials": [("a", "b", None)]}}, ["None"]),
        ({"trials": {"trials": [("a", "b", [])]}}, ["[]"]),
        ({"trials": {"trials": [("a b", "c", True)]}}, ["'a b'"]),
        ({"trials": {"trials": [(1, "c", True)]}}, ["(1, 'c', True)"]),
        ({"columns": {"device": {"a": "x"}}}, ["'device'"]),
        ({"columns": {"utt2device": "x"}}, ["utt2device", "'x'"]),
        ({"enroll": {"m": "ab"}}, ["'m': 'ab'"]),
        ({"enroll": {"m": [1]}}, ["'m': [1]"]),
        ({"not_used": ["c.wav"]}, ["['c.wav']"]),
    ],
)
def test_an_argument_of_another_shape_is_one_line_with_an_example(
    tmp_path, arguments, values
):
    folder = tmp_path / "data"
    (name,) = arguments
    with refuses(name, *values, f"{name}={{") as caught:
        write_data_dir(folder, **{"wavs": WAVS, "speakers": SPEAKERS, **arguments})
    assert len(str(caught.value).splitlines()) == 1
    assert not folder.exists()


def test_speakers_are_of_segments_where_there_are_any(tmp_path):
    segments = {"s": ("a", 0.5, 1.0)}
    with refuses("speakers", "of s;"):
        write_data_dir(tmp_path, wavs=WAVS, speakers=SPEAKERS, segments=segments)
    write_data_dir(tmp_path, wavs=WAVS, speakers={"s": "ann"}, segments=segments)
    assert read_table(tmp_path / "utt2spk") == {"s": "ann"}


def test_labels_of_trials_may_be_words_or_numbers(tmp_path):
    rows = [
        ("a", "b", False),
        ("b", "a", np.bool_(True)),
        ("a", "a", "target"),
        ("b", "b", "nontarget"),
        ["b", "c", 1],
    ]
    write_data_dir(tmp_path / "data", wavs=WAVS, trials={"trials": iter(rows)})
    text = (tmp_path / "data/trials").read_text()
    labels = [line.split()[2] for line in text.splitlines()]
    assert labels == ["nontarget", "target", "target", "nontarget", "target"]


def test_the_example_of_the_guide_writes_what_it_says(tmp_path, monkeypatch):
    guide = Path(__file__).parents[2] / "docs/own-data.md"
    (example,) = re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    folder = tmp_path / "data/test"
    assert read_table(folder / "utt2spk")["ann-2"] == "ann"
    assert read_segments(folder / "segments")["ann-2"] == ("tape-1", 6.5, 9.0)
    assert read_enroll(folder / "enroll.map") == {"ann": ["ann-1"]}
    assert read_about(folder)["licence"] == "CC BY 4.0"
    assert (folder / "trials").read_text().splitlines()[0] == "ann ann-2 target"
    assert list_conditions(folder) == ["spk2gender", "utt2device"]
    assert len(read_rejected(folder)) == 2
    # The example has each argument.
    for argument in EXAMPLES:
        assert f"    {argument}=" in example
