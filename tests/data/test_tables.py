"""Tables with other columns, encodings and neighbours than a data directory has."""

from pathlib import Path

import pytest
from refusals import refused, refuses

from speakerlab.bin.check import main as check
from speakerlab.core.faults import Faults
from speakerlab.data.tables import (
    list_conditions,
    list_skipped,
    list_tables,
    list_trials,
    read_about,
    read_enroll,
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
