"""Checking and unpacking archives, whole or in parts.

In: a tar or zip, or its parts in order, and the checksum that its publisher gives. Out: a folder in
which everything under its final name is whole. Parts are read one after the other; no joined copy
is made.
"""

import hashlib
import io
import shutil
import stat
import tarfile
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path, PurePosixPath

from egs.common.progress import Progress

CHUNK_BYTES = 1 << 20
ZIP_MAGIC = b"PK\x03\x04"


class _Joined(io.RawIOBase):
    """The bytes of several files, one after the other, and a line now and then about how far."""

    def __init__(self, paths: Sequence[Path]) -> None:
        with ExitStack() as opened:
            self._files = [opened.enter_context(path.open("rb")) for path in paths]
            self._opened = opened.pop_all()
        sizes = [path.stat().st_size for path in paths]
        self._starts = [0, *accumulate(sizes)]
        self._position = self._done = 0
        self._progress = Progress(paths[0].name, total=sum(sizes), unit="MB read", per_unit=1e6)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        from_where = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._starts[-1]}
        self._position = max(0, from_where[whence] + offset)
        return self._position

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._position >= self._starts[-1]:
            return 0
        part = bisect_right(self._starts, self._position) - 1
        self._files[part].seek(self._position - self._starts[part])
        count = self._files[part].readinto(buffer)
        self._position += count
        self._done += count
        self._progress.at(self._done)
        return count

    def close(self) -> None:
        self._opened.close()
        super().close()


def _open_joined(paths: Sequence[Path]) -> io.BufferedReader:
    return io.BufferedReader(_Joined(paths), CHUNK_BYTES)


def checksum_fault(paths: Sequence[Path], checksum: str) -> str | None:
    """What is wrong with the digest of files, one after the other, or None.

    checksum: "md5:..." or "sha256:...".
    """
    algorithm, _, expected = checksum.partition(":")
    digest = hashlib.new(algorithm)
    with _open_joined(paths) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() == expected:
        return None
    return f"wrong {algorithm}, got {digest.hexdigest()} instead of {expected}"


def unpack(archives: Sequence[Path], folder: Path, *, checksum: str | None = None) -> None:
    """Unpack a tar or zip, given whole or as its parts in order, into `folder`.

    checksum: of the whole, which is checked first.
    Members that would leave the folder are refused. Everything is unpacked aside and then renamed,
    so a folder that bears its final name is whole.
    """
    names = " ".join(str(path) for path in archives)
    fault = None if checksum is None else checksum_fault(archives, checksum)
    if fault is not None:
        raise ValueError(f"{names}: {fault}; delete and download again")
    fresh = folder / f".unpack-{archives[0].name}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        with _open_joined(archives) as stream:
            is_zip = stream.peek(len(ZIP_MAGIC)).startswith(ZIP_MAGIC)
            (_unpack_zip if is_zip else _unpack_tar)(stream, fresh)
        _move_into(fresh, folder)
    except (tarfile.TarError, zipfile.BadZipFile, RuntimeError, EOFError, zlib.error) as error:
        # RuntimeError: a zip that needs a password, or a method that this Python lacks.
        raise ValueError(
            f"{names}: cannot be unpacked, got {error}; delete and download again"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _unpack_tar(stream: io.BufferedReader, folder: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise ValueError(
            f"{folder}: this Python has no tarfile.data_filter, so unpacking would not be safe, "
            "got one before 3.10.12 or 3.11.4; update Python, or unpack it yourself"
        )
    with tarfile.open(fileobj=stream, mode="r|*") as tar:
        tar.extractall(folder, filter="data")


def _unpack_zip(stream: io.BufferedReader, folder: Path) -> None:
    with zipfile.ZipFile(stream) as archive:
        for member in archive.infolist():
            name = PurePosixPath(member.filename)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if name.is_absolute() or ".." in name.parts or kind == stat.S_IFLNK:
                raise zipfile.BadZipFile(f"{name}, which would lead out of the folder")
            archive.extract(member, folder)


def _move_into(source: Path, target: Path) -> None:
    """Rename what is in `source` into `target`, folders that are in both being joined."""
    for entry in sorted(source.iterdir()):
        place = target / entry.name
        if entry.is_dir() and place.is_dir():
            _move_into(entry, place)
        else:
            entry.replace(place)
