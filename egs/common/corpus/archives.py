"""Checking and unpacking archives: a tar or zip, whole or split into parts.

Parts are read one after the other; no joined copy is made.
"""

import hashlib
import io
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePosixPath

from tqdm import tqdm

CHUNK_BYTES = 1 << 20
ZIP_MAGIC = b"PK\x03\x04"
# disable=None shows a bar only on a terminal, never in a log file.
progress_bar = partial(tqdm, disable=None)


class _Joined(io.RawIOBase):
    """Read-only stream of the bytes of several files, with a progress bar."""

    def __init__(self, paths: Sequence[Path]) -> None:
        with ExitStack() as opened:
            self._files = [opened.enter_context(path.open("rb")) for path in paths]
            sizes = [path.stat().st_size for path in paths]
            bar = progress_bar(
                total=sum(sizes), unit="B", unit_scale=True, desc=paths[0].name
            )
            self._progress = opened.enter_context(bar)
            self._opened = opened.pop_all()
        self._starts = [0, *accumulate(sizes)]
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {
            io.SEEK_SET: 0,
            io.SEEK_CUR: self._position,
            io.SEEK_END: self._starts[-1],
        }
        self._position = max(0, origin[whence] + offset)
        return self._position

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._position >= self._starts[-1]:
            return 0
        part = bisect_right(self._starts, self._position) - 1
        self._files[part].seek(self._position - self._starts[part])
        count = self._files[part].readinto(buffer)
        self._position += count
        self._progress.update(count)
        return count

    def close(self) -> None:
        self._opened.close()
        super().close()


def _open_joined(paths: Sequence[Path]) -> io.BufferedReader:
    return io.BufferedReader(_Joined(paths), CHUNK_BYTES)


def checksum_fault(paths: Sequence[Path], checksum: str) -> str | None:
    """Compare the digest of files, joined in order, with "md5:..." or "sha256:...".

    Return None if it matches, else a description of the mismatch.
    """
    algorithm, _, expected = checksum.partition(":")
    digest = hashlib.new(algorithm)
    with _open_joined(paths) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() == expected:
        return None
    return f"wrong {algorithm}: {digest.hexdigest()}, expected {expected}"


def unpack(
    archives: Sequence[Path], folder: Path, *, checksum: str | None = None
) -> None:
    """Unpack a tar or zip, given whole or as its parts in order, into `folder`.

    checksum: of the whole archive, verified first.
    Members with a path outside the folder are refused. Members are unpacked to a temporary folder
    and then renamed, so a folder under its final name is complete.
    """
    names = " ".join(str(path) for path in archives)
    fault = None if checksum is None else checksum_fault(archives, checksum)
    if fault is not None:
        raise ValueError(f"{names}: {fault}; delete it and download it again")
    fresh = folder / f".unpack-{archives[0].name}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        with _open_joined(archives) as stream:
            is_zip = stream.peek(len(ZIP_MAGIC)).startswith(ZIP_MAGIC)
            (_unpack_zip if is_zip else _unpack_tar)(stream, fresh)
        _move_into(fresh, folder)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        RuntimeError,
        EOFError,
        zlib.error,
    ) as error:
        # RuntimeError: a zip with a password, or with a method that this Python lacks.
        raise ValueError(
            f"{names}: cannot be unpacked: {error}; delete it and download it again"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _unpack_tar(stream: io.BufferedReader, folder: Path) -> None:
    with tarfile.open(fileobj=stream, mode="r|*") as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
            return
        for member in tar:  # Python before 3.10.12 and 3.11.4, such as Debian 12's
            name = PurePosixPath(member.name)
            if not (member.isfile() or member.isdir()):
                raise ValueError(
                    f"{folder}: this Python cannot safely unpack {name}, a link or"
                    " device; update to 3.10.12, 3.11.4 or newer, or unpack the"
                    " archive yourself"
                )
            if name.is_absolute() or ".." in name.parts:
                raise tarfile.TarError(
                    f"member {name} would be written outside the folder"
                )
            member.mode = 0o755 if member.isdir() else 0o644
            member.uid, member.gid = (
                os.getuid(),
                os.getgid(),
            )  # root would set those of the archive
            tar.extract(member, folder, numeric_owner=True)


def _unpack_zip(stream: io.BufferedReader, folder: Path) -> None:
    with zipfile.ZipFile(stream) as archive:
        for member in archive.infolist():
            name = PurePosixPath(member.filename)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if name.is_absolute() or ".." in name.parts or kind == stat.S_IFLNK:
                raise zipfile.BadZipFile(
                    f"member {name} would be written outside the folder"
                )
            archive.extract(member, folder)


def _move_into(source: Path, target: Path) -> None:
    """Move the content of `source` into `target`; folders in both are merged."""
    for entry in sorted(source.iterdir()):
        place = target / entry.name
        if entry.is_dir() and place.is_dir():
            _move_into(entry, place)
        else:
            entry.replace(place)
