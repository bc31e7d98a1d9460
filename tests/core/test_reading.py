"""Text of any editor: byte order marks, line ends, encodings and NUL bytes."""

import gzip
import os
import threading
from pathlib import Path

import pytest
from refusals import refused, refuses

from speakerlab.core.reading import (
    READ_BYTES,
    describe_case_twins,
    open_text,
    read_text,
    refuse_twins,
)

TEXT = "语音 é\nb\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_marks_and_line_ends_of_all_systems_are_read(tmp_path, encoding, end):
    path = tmp_path / "text"
    path.write_bytes(TEXT.replace("\n", end).encode(encoding))
    assert read_text(path) == TEXT


@pytest.mark.parametrize("mark", [b"\xfe\xff", b"\xff\xfe"])
def test_both_byte_orders_are_read(tmp_path, mark):
    path = tmp_path / "text"
    order = "utf-16-be" if mark == b"\xfe\xff" else "utf-16-le"
    path.write_bytes(mark + TEXT.encode(order))
    assert read_text(path) == TEXT


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("num_before", [0, 2, READ_BYTES])
def test_the_first_line_of_another_encoding_is_named(tmp_path, end, num_before):
    path = tmp_path / "text"
    for encoding in ("gbk", "latin-1"):
        name = "语音" if encoding == "gbk" else "Müller"
        bad_line = f"s1 {name} x".encode(encoding)
        good_lines = (b"ab\xc3\xa9" + end) * num_before
        path.write_bytes(good_lines + bad_line + end + b"more" + end)
        with refuses(f"{path}:{num_before + 1}", "UTF-8", "s1 "):
            read_text(path)


def test_a_character_that_is_cut_off_is_refused(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a\nb\n" + "语".encode()[:2])
    with refuses(f"{path}:3", "UTF-8"):
        read_text(path)


@pytest.mark.parametrize("num_before", [0, 3, READ_BYTES])
def test_nul_bytes_are_refused(tmp_path, num_before):
    path = tmp_path / "text"
    path.write_bytes(b"a\r\n" * num_before + b"b\0c\n")
    with refuses(f"{path}:{num_before + 1}", "NUL"):
        read_text(path)
    # UTF-16 without a byte order mark.
    path.write_bytes("u1 a.wav\n".encode("utf-16-le"))
    with refuses(f"{path}:1", "NUL", "UTF-16"):
        read_text(path)


@pytest.mark.parametrize(
    ("content", "format_name"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "Git LFS"),
        (gzip.compress(b"a s1\n", mtime=0), "gunzip"),
        (b"PK\x03\x04\x14\0", "spreadsheet"),
        (b"\n<!DOCTYPE html>\n<html>", "web page"),
        (b"{\\rtf1\\ansi a s1}", "plain text"),
    ],
)
def test_other_files_in_the_place_of_a_text_are_named(tmp_path, content, format_name):
    path = tmp_path / "utt2spk"
    path.write_bytes(content)
    with refuses(path, format_name):
        read_text(path)


def test_ids_like_the_beginning_of_another_format_are_read(tmp_path):
    path = tmp_path / "utt2spk"
    for text in ("BZh001 s1\n", "version s1\n", "html s1\n", "PK s1\n"):
        path.write_text(text)
        assert read_text(path) == text


@pytest.mark.parametrize(
    "names",
    [
        ("s1", "s1\u200b"),
        ("s1", "\ufeffs1"),
        ("s\u00ad1\u200e", "s1\u2060"),
        ("caf\u00e9", "cafe\u0301"),
        ("ANN", "\uff21\uff2e\uff2e"),
        ("762005", "\uff17\uff16\uff12\uff10\uff10\uff15"),
        ("\u30a2\u30f3", "\uff71\uff9d"),
    ],
)
def test_names_that_look_alike_are_refused(names):
    for pair in (names, names[::-1]):
        with refuses("here", ascii(names[0]), ascii(names[1])):
            refuse_twins(pair, where="here", kind="speakers")
    # One spelling alone is a name like any other; joiners change how a word is read.
    for name in names:
        refuse_twins([name, name], where="here", kind="speakers")
    refuse_twins(["\u0645\u06cc", "\u0645\u200c\u06cc"], where="", kind="")


def test_names_that_differ_in_case_are_one_line():
    def describe(*names: str) -> list[str]:
        return describe_case_twins(names, where="here", kind="speakers")

    assert describe("Ann", "Bob", "Ann") == []
    assert describe("Strauss", "Strau\u00df") == []
    (line,) = describe("bob", "\u00c9ve", "ann", "Ann", "ANN", "\u00e9ve")
    assert refused(line, "here", "3 pairs of speakers", "Ann and ANN")
    (line,) = describe("ann", "\uff21\uff2e\uff2e")
    assert refused(line, "here", "1 pair of speakers")


@pytest.mark.parametrize("length", range(READ_BYTES - 5, READ_BYTES + 2))
def test_marks_within_joined_files_are_skipped(tmp_path, length):
    path = tmp_path / "text"
    mark = b"\xef\xbb\xbf"
    path.write_bytes(mark + b"a" * length + b"\n" + mark + mark + b"b\r\n" + mark)
    assert read_text(path) == "a" * length + "\nb\n"
    path.write_bytes(mark)
    assert read_text(path) == ""
    # Within a line it is a character like any other.
    path.write_bytes(b"a" + mark + b"b")
    assert read_text(path) == "a\ufeffb"


def test_a_damaged_utf16_and_a_folder_are_named(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xff\xfea\0b")
    with refuses(path, "UTF-16"):
        read_text(path)
    with refuses(tmp_path, "folder"):
        read_text(tmp_path)


def test_a_pipe_is_read_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=[b"\xef\xbb\xbfa\r\nb"])
    writer.start()
    assert read_text(path) == "a\nb"
    writer.join()


def test_lines_of_another_encoding_can_be_refused_one_by_one(tmp_path: Path):
    path = tmp_path / "text"
    path.write_bytes(b"a\n\xe9\nb\n")
    with open_text(path, errors="surrogateescape") as lines:
        assert list(lines) == ["a\n", "\udce9\n", "b\n"]
