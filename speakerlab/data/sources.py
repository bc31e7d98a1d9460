"""Sources of recordings: a path, the content of a file, or an open file -> a file to decode."""

import io
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

# A file by its path, its content, or an open file.
Source = str | os.PathLike[str] | bytes | BinaryIO
# What decoders read: a file of the system, or content in memory. Neither raises errors while a
# decoder calls it, which libsndfile would print on stderr.
BinaryFile = io.FileIO | io.BytesIO

# Chunks and tags behind the sound begin with a name of four letters. The names of whole files and
# of a second chunk of sound are no such names: there, two recordings were joined.
TAG = re.compile(
    rb"(?!RIFF|RIFX|RF64|FORM|OggS|fLaC|caff|NIST|riff|data|Xing|Info)[A-Za-z0-9 _-]{4}"
)
PEEK_BYTES = 1 << 16
NUM_FIRST_BYTES = 64
RIFF_HEADER_BYTES = 12
OGG_PAGE = b"OggS\0"  # start of a page, and the version
OGG_HEADER_BYTES = 27  # with the number of segments as the last byte
OGG_MAX_PAGE_BYTES = OGG_HEADER_BYTES + 255 + 255 * 255
CHUNK_HEADER_BYTES = 8
MAX_CHUNKS = 1000  # before the sound

# A program that does not know the length of a recording yet writes a round number, often less the
# size of a header or of a page.
ROUND_NUMBERS = (1 << 24, 10**8)
MAX_BELOW_ROUND = 1 << 16
MAX_ABOVE_ROUND = 256
# Or just a huge number: few recordings of hours are cut in their first percent.
HUGE_LENGTH = 1 << 28
HUGE_RATIO = 100
# One in 200 lengths is as near to a round number by chance, so a smaller one must be far too long.
ROUND_RATIO = 4
# Some programs count the header as sound, or the part of it behind the size of the file: these are
# the usual lengths of headers of wav, AIFF and AU files.
HEADER_LENGTHS = (8, 24, 36, 38, 44, 46, 50, 54, 58, 60, 68, 70, 78, 80)

# What is often found in place of a recording -> what it is, and the remedy.
OTHER_CONTENT = {
    rb"version https://git-lfs": "is a pointer of Git LFS; run git lfs pull",
    rb"\s*<(?i:!doctype|html|\?xml)": "is a web page, not a recording; download it again",
    rb"\x1f\x8b\x08": "is compressed with gzip; unpack it",
    rb"PK\x03\x04": "is a zip archive; unpack it",
    rb"\x00\x05\x16\x07": "holds attributes that macOS stores; give the file of that name"
    " without ._",
}
# `Path` makes https:/host of https://host; a single letter is a drive of Windows.
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def name_of(source: object) -> str:
    """Return the name of a recording for messages, which are one line."""
    if isinstance(source, str | os.PathLike):
        name = os.fsdecode(source)
    else:
        name = getattr(source, "name", None)
    if isinstance(name, str) and name:
        # The end of a line, which a program has read with a path, is shown as \n.
        return CONTROL.sub(lambda match: repr(match[0])[1:-1], name)
    return f"audio ({type(source).__name__})"


def open_source(source: Source) -> BinaryFile:
    """Open a recording; raise ValueError or FileNotFoundError with one line."""
    where = name_of(source)
    if isinstance(source, str | os.PathLike):
        file = _open_path(os.fsdecode(source), where)
    elif isinstance(source, bytes):
        file = io.BytesIO(source)
    else:
        file = _open_again(source, where)
    if not size_of(file):
        file.close()
        raise ValueError(
            f"{where}: is empty (0 bytes); copy it again or give another recording"
        )
    start = peek(file, 0, NUM_FIRST_BYTES)
    for pattern, kind in OTHER_CONTENT.items():
        if re.match(pattern, start):
            file.close()
            raise ValueError(f"{where}: {kind}")
    return file


def size_of(file: BinaryFile) -> int:
    """Return the number of bytes."""
    if isinstance(file, io.BytesIO):
        return len(file.getbuffer())
    return os.fstat(file.fileno()).st_size


def peek(file: BinaryFile, position: int, num_bytes: int = PEEK_BYTES) -> bytes:
    """Return bytes from a position on; the file stays where it is."""
    before = file.tell()
    file.seek(position)
    content = file.read(num_bytes)
    file.seek(before)
    return content


def count_rest(file: BinaryFile, position: int) -> int:
    """Return the number of bytes from `position` on; 0 if they are zeros, a chunk or a tag."""
    content = peek(file, position).lstrip(b"\0")
    if not content or TAG.match(content):
        return 0
    return max(size_of(file) - position, 0)


def refuse_cut(stated: int, present: int, unit: str, where: str) -> None:
    """Raise ValueError if there is less than a header states.

    A placeholder, and a length that includes the header, are no reason.
    """
    counts_header = unit == "bytes" and stated - present in HEADER_LENGTHS
    is_short = stated > present and not counts_header
    if is_short and not _is_placeholder(stated, present):
        raise ValueError(
            f"{where}: is cut short, after {present} of {stated} {unit}; copy it again"
        )


def find_wav_length(file: BinaryFile) -> tuple[int, int] | None:
    """Return the bytes of sound that a wav file states and has; None if it is no wav file."""
    header = peek(file, 0, RIFF_HEADER_BYTES)
    if not (header.startswith(b"RIFF") and header.endswith(b"WAVE")):
        return None
    position = RIFF_HEADER_BYTES
    for _ in range(MAX_CHUNKS):
        chunk = peek(file, position, CHUNK_HEADER_BYTES)
        if len(chunk) < CHUNK_HEADER_BYTES:
            break
        num_bytes = int.from_bytes(chunk[4:], "little")
        position += CHUNK_HEADER_BYTES
        if chunk.startswith(b"data"):
            return num_bytes, size_of(file) - position
        # Chunks begin at even places.
        position += num_bytes + num_bytes % 2
    return None


def refuse_cut_ogg(file: BinaryFile, where: str) -> None:
    """Raise ValueError if an Ogg file ends within a page, which no decoder reports.

    RFC 3533, section 6: a page has a header, a table of segment lengths, and the segments.
    """
    num_bytes = size_of(file)
    first = max(num_bytes - OGG_MAX_PAGE_BYTES, 0)
    tail = peek(file, first, OGG_MAX_PAGE_BYTES)
    start = tail.rfind(OGG_PAGE)
    if start < 0:
        return
    page = tail[start:]
    stated = OGG_HEADER_BYTES
    if len(page) >= OGG_HEADER_BYTES:
        num_segments = page[OGG_HEADER_BYTES - 1]
        lengths = page[OGG_HEADER_BYTES : OGG_HEADER_BYTES + num_segments]
        stated += num_segments + sum(lengths)
    if len(page) < stated:
        raise ValueError(
            f"{where}: is cut short, within the page of its last {len(page)} bytes; copy"
            " it again"
        )


def _is_placeholder(stated: int, present: int) -> bool:
    """Return whether the length in a header is a number that a program writes before it knows."""
    is_huge = stated >= HUGE_LENGTH
    for unit in ROUND_NUMBERS:
        nearest = max(round(stated / unit), 1) * unit
        is_round = -MAX_BELOW_ROUND <= stated - nearest <= MAX_ABOVE_ROUND
        if is_round and (is_huge or stated > ROUND_RATIO * present):
            return True
    return is_huge and stated > HUGE_RATIO * present


def require_file(path: str | Path) -> None:
    """Raise FileNotFoundError or ValueError unless a plain file, or a link to one, is there.

    Opening something else may have effects, and reading from a pipe may wait for ever.
    """
    where = name_of(path)
    # `Path("")` would be the current folder.
    if path == "":
        raise ValueError("path: is empty; give the path of a recording")
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        fix = "correct the path or restore it"
        if ADDRESS.match(where):
            fix = "download it and give its path"
        elif where.startswith("~"):
            fix = "write the home folder in place of ~"
        raise FileNotFoundError(f"{where}: no such file; {fix}") from None
    except (OSError, ValueError) as error:
        # Links in a circle, a name that is too long, or no permission.
        reason: object = error
        if isinstance(error, OSError):
            reason = error.strerror
        raise ValueError(
            f"{where}: cannot be opened ({reason}); repair it or drop it"
        ) from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise ValueError(f"{where}: is {kind}; give the path of a recording")


def _open_path(path: str, where: str) -> io.FileIO:
    require_file(path)
    try:
        return io.FileIO(path)
    except PermissionError:
        raise ValueError(
            f"{where}: cannot be opened (Permission denied); correct its permissions"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{where}: cannot be opened ({error.strerror}); repair it or drop it"
        ) from None


def _open_again(source: Any, where: str) -> BinaryFile:
    """Return an open file as a file of its own, or with its content in memory."""
    # Uploads and temporary files wrap the file itself.
    inner = getattr(source, "file", None)
    if hasattr(inner, "read"):
        source = inner
    # A closed file, or one for writing only, raises an error.
    start = _call(lambda: source.read(0), where)
    _require_bytes(start, where)
    raw = getattr(source, "raw", source)
    if isinstance(raw, io.FileIO) and _is_regular(raw.fileno()):
        _call(source.flush, where)
        return io.FileIO(os.dup(raw.fileno()))
    # A file that was read before begins again; a pipe or a socket cannot.
    with suppress(OSError, AttributeError):
        source.seek(0)
    content = _call(source.read, where)
    _require_bytes(content, where)
    return io.BytesIO(content)


def _call(method: Callable[[], Any], where: str) -> Any:
    """Call a method of an open file of any kind, such as a part of an archive or a connection."""
    try:
        return method()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{where}: cannot be read ({reason}); give a file opened with 'rb'"
        ) from error


def _require_bytes(content: object, where: str) -> None:
    if isinstance(content, str):
        raise ValueError(f"{where}: is opened as text; open it with 'rb'")
    if not isinstance(content, bytes | bytearray | memoryview):
        kind = type(content).__name__
        raise ValueError(
            f"{where}: read() must return bytes, got {kind}; give an open binary file"
            " or its content"
        )


def _is_regular(file_descriptor: int) -> bool:
    mode = os.fstat(file_descriptor).st_mode
    return stat.S_ISREG(mode)
