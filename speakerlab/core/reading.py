"""Read text and JSON; the error of an unreadable file is one line with its path."""

import codecs
import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from speakerlab.core.counting import count_of

AGAIN = "copy it again, or make it again with the command that wrote it"
# `__pydantic_config__` of a dataclass.
ONLY_FINITE = {"extra": "forbid", "allow_inf_nan": False}
# Byte order mark -> encoding. The mark of UTF-32 begins like one of UTF-16, so it comes first.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
MARKS_OF_LINES = re.compile(rb"(?<=[\r\n])(\xef\xbb\xbf)+")  # of UTF-8
# Users often give one of these files instead of a text file: first bytes -> problem and fix.
NO_TEXTS = {
    b"version https://git-lfs": (
        "is a pointer of Git LFS, not the file itself; run `git lfs pull` in its"
        " repository"
    ),
    b"\x1f\x8b": "is compressed by gzip; unpack it with gunzip",
    b"BZh91AY&SY": "is compressed by bzip2; unpack it with bunzip2",
    b"\xfd7zXZ": "is compressed by xz; unpack it with unxz",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it with unzstd",
    b"PK\x03\x04": "is a zip archive or a spreadsheet; unpack it, or save it as text",
    b"\xd0\xcf\x11\xe0": "is a file of Office; save it as text",
    b"%PDF": "is a PDF; save its table as text",
    b"{\\rtf": "is a rich text file (RTF); save it as plain text",
    b"<!DOCTYPE html": "is a web page; download the file itself",
    b"<!doctype html": "is a web page; download the file itself",
    b"<html": "is a web page; download the file itself",
    b"<HTML": "is a web page; download the file itself",
}
NUM_HEAD = max(map(len, NO_TEXTS))  # bytes
# Characters without a glyph that web pages and editors put into text. The joiners U+200C and U+200D
# are not among them, because some scripts need them.
INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
READ_BYTES = 1 << 16  # at once


@contextmanager
def open_text(
    path: Path, *, newline: str | None = None, errors: str = "strict"
) -> Iterator[TextIO]:
    """Open a text file: UTF-8, with or without a byte order mark, or UTF-16 or 32 with one.

    errors: "surrogateescape" yields lines with bytes that are not UTF-8, to be refused one by one.
    Raises ValueError for a folder, a file of NO_TEXTS, another encoding and NUL bytes, with the
    number of the first such line, or if a `csv.reader` in the block rejects the file.
    """
    try:
        file = path.open("rb", buffering=0)
    except (IsADirectoryError, PermissionError):
        if not path.is_dir():  # on Windows, a folder is a PermissionError
            raise
        raise ValueError(
            f"{path}: is a folder, not a file; give a file, or move the folder away"
        ) from None
    try:
        source = _Bytes(file, path)
    except BaseException:
        file.close()
        raise
    try:
        with io.TextIOWrapper(
            source, encoding=source.encoding, errors=errors, newline=newline
        ) as stream:
            yield stream
    except UnicodeDecodeError as error:
        raise ValueError(source.describe(error)) from None
    except csv.Error as error:
        raise ValueError(f"{path}: is not a table ({error}); correct it") from None


class _Bytes(io.BufferedIOBase):
    """Bytes of a text file on their way to the decoder, without the marks of UTF-8.

    They are read once, from the start, because the file may be a pipe.
    """

    def __init__(self, file: BinaryIO | io.FileIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.num_line_ends = 0  # before `last`
        self.last = b""  # the bytes that were read last
        self.head = b""
        # A pipe may yield fewer bytes than there are.
        while len(self.head) < NUM_HEAD:
            more_bytes = file.read(NUM_HEAD - len(self.head))
            if not more_bytes:
                break
            self.head += more_bytes
        refuse_no_text(self.head, path)
        self.encoding = "utf-8"
        for mark, encoding in MARKS.items():
            if self.head.startswith(mark):
                self.encoding = encoding
                break

    @property
    def name(self) -> str:
        return str(self.path)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size >= 0:
            return self.read1(size)
        parts = list(iter(self.read1, b""))
        return b"".join(parts)

    def read1(self, size: int = -1, /) -> bytes:
        data = self._read_without_marks()
        self.num_line_ends += count_line_ends(self.last)
        if self.last.endswith(b"\r") and data.startswith(b"\n"):
            self.num_line_ends -= 1  # both are one line end
        self.last = data
        # A NUL byte is damage in UTF-8 only: UTF-16 and UTF-32 have them in every line.
        if self.encoding == "utf-8" and b"\0" in data:
            before, _, _ = data.partition(b"\0")
            number = self.num_line_ends + count_line_ends(before) + 1
            raise ValueError(
                f"{self.path}:{number}: has a NUL byte, as damaged files and UTF-16"
                " without a byte order mark have; save it as UTF-8"
            )
        return data

    def _read_without_marks(self) -> bytes:
        """Read bytes without marks at the starts of lines, which files joined by `cat` have."""
        is_line_start = not self.last or self.last.endswith((b"\r", b"\n"))
        while True:
            data = self.head or self.file.read(READ_BYTES) or b""
            self.head = b""
            # A mark must not be cut in two.
            while data.endswith((codecs.BOM_UTF8[:1], codecs.BOM_UTF8[:2])):
                next_byte = self.file.read(1)
                if not next_byte:
                    break
                data += next_byte
            if self.encoding != "utf-8" or codecs.BOM_UTF8 not in data:
                return data
            while is_line_start and data.startswith(codecs.BOM_UTF8):
                data = data.removeprefix(codecs.BOM_UTF8)
            data = MARKS_OF_LINES.sub(b"", data)
            # No bytes would be the end of the file.
            if data:
                return data

    def describe(self, error: UnicodeDecodeError) -> str:
        """Return one line with the number and the start of the line that is not UTF-8."""
        if self.encoding != "utf-8":
            name = self.encoding.upper()
            return (
                f"{self.path}: begins as {name} but is not {name} text; save it as"
                " UTF-8"
            )
        # What the decoder was given: bytes that it had left before, and the bytes read last.
        data = error.object
        num_after = count_line_ends(data[error.start :])
        num_read = self.num_line_ends + count_line_ends(self.last)
        number = num_read - num_after + 1
        *_, start = re.split(rb"[\r\n]", data[: error.start])
        end, *_ = re.split(rb"[\r\n]", data[error.start :])
        line = (start[-40:] + end[:40]).decode("utf-8", "backslashreplace")
        got = re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", line.strip())
        return f"{self.path}:{number}: is not UTF-8 text, got '{got}'; save it as UTF-8"


def refuse_no_text(data: bytes, path: Path) -> None:
    """Raise ValueError if the bytes of a file begin like one of NO_TEXTS."""
    head = data[:NUM_HEAD].removeprefix(codecs.BOM_UTF8).lstrip()
    for beginning, problem in NO_TEXTS.items():
        if head.startswith(beginning):
            raise ValueError(f"{path}: {problem}")


def count_line_ends(data: bytes) -> int:
    r"""Return the number of line ends: \n, \r\n or \r."""
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


def refuse_twins(names: Iterable[str], *, where: str, kind: str) -> None:
    """Raise ValueError if two names look the same, but are different text.

    Such are a name with an invisible character beside one without, the two spellings of an accent
    in Unicode (one character on Windows and Linux, two in file names of macOS), and the wide
    characters of East Asian keyboards beside others. The two would count as two speakers or
    recordings.
    """
    all_names = set(names)
    name_of_look: dict[str, str] = {}
    # Names in ASCII look different from each other, so there is nothing to do for most files.
    for name in sorted(all_names):
        if name.isascii():
            continue
        look = look_of(name)
        is_twin = look != name and look in all_names
        twin = look if is_twin else name_of_look.setdefault(look, name)
        if twin != name:
            raise ValueError(
                f"{where}: two {kind} look alike, {ascii(twin)} and {ascii(name)};"
                " spell them the same"
            )


def look_of(name: str) -> str:
    """Return the text that names which look alike have in common."""
    if name.isascii():
        return name
    visible = INVISIBLE.sub("", name)
    return unicodedata.normalize("NFKC", visible)


def describe_case_twins(names: Iterable[str], *, where: str, kind: str) -> list[str]:
    """Return a line if names differ only in case, else none.

    They are not refused: random ids, such as aB and Ab, may differ so.
    """
    distinct_names = sorted(set(names))
    first_of_name: dict[str, str] = {}  # in lower case -> as it is spelled first
    twins: list[str] = []
    for name in distinct_names:
        lower = look_of(name).lower()
        first = first_of_name.setdefault(lower, name)
        if first != name:
            twins.append(f"{name} and {first}")
    if not twins:
        return []
    return [
        f"{where}: {count_of(len(twins), 'pair')} of {kind} whose names differ only in"
        f" case, such as {twins[0]}; spell them the same if they are one"
    ]


def show_invisible(name: str) -> str:
    """Return a name with its invisible characters as escapes."""
    return INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", name)


def read_text(path: Path) -> str:
    with open_text(path) as stream:
        return stream.read()


def read_json(
    path: Path, kind: Any = dict[str, Any], *, like: Any = None, fix: str = AGAIN
) -> Any:
    """Read a JSON file as `parse_json` does."""
    text = path.read_bytes()
    if re.search(rb"\d{300}", text):  # an integer beyond the range of float
        raise ValueError(
            f"{path}: is damaged (a number of more than 300 digits); {fix}"
        )
    return parse_json(text, kind, like=like, where=path, fix=fix)


def parse_json(
    text: str | bytes,
    kind: Any,
    *,
    like: Any = None,
    where: Path | str,
    fix: str = AGAIN,
) -> Any:
    """Parse JSON into a value of the type `kind`, such as a dataclass; raise ValueError otherwise.

    like: another type that it must fit, such as a type from `keys`. where: the source, for errors.
    """
    from pydantic import ValidationError  # commands that read no JSON start without it

    try:
        if like is not None:
            _adapter(like).validate_json(text, strict=True)
        adapter = _adapter(kind)
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        places = [f"{part}: " for part in first["loc"]]
        place = "".join(places)
        raise ValueError(
            f"{where}: is damaged ({place}{first['msg']}); {fix}"
        ) from None


def keys(may: Mapping[str, Any] | None = None, **types: Any) -> type:
    """Return the type of objects with these keys and, optionally, the keys of `may`."""
    optional: list[tuple[str, Any, Any]] = []
    optional_types = may or {}
    for name, kind in optional_types.items():
        optional.append((name, kind, field(default=None)))
    # A dataclass, whose fields with a default must come last.
    return make_dataclass("Keys", [*types.items(), *optional])


# Cached, because pydantic takes longer to make an adapter than to read most files.
@lru_cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
