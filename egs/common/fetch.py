"""Downloading archives and unpacking them: what is cut off goes on where it stopped.

In: a URL and the checksum that its publisher gives. Out: a file that is whole, or an error; a
folder in which everything under its final name is whole.
"""

import hashlib
import http.client
import io
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

CHUNK_BYTES = 1 << 20
SECONDS_BETWEEN_LINES = 10.0


def download(url: str, path: Path, *, checksum: str | None = None) -> None:
    """Download to `path` through `path`.part, which a later call continues.

    checksum: "md5:..." or "sha256:..."; without one only the length is checked.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        _receive(url, part)
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(
            f"{url}: download stopped, got {error}; run the same command again to go on"
        ) from error
    if checksum is not None:
        _verify(part, checksum, url)
    part.replace(path)


def _receive(url: str, part: Path) -> None:
    """Append what is missing of `url` to `part`."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        reply = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if have and error.code == 416 and error.headers["Content-Range"] == f"bytes */{have}":
            return  # every byte was there already
        if error.code == 416:
            part.unlink()
        raise
    with reply:
        if reply.status != 206:
            have = 0  # the server sends the whole file, whatever was asked for
        length = reply.headers["Content-Length"]
        total = None if length is None else have + int(length)
        with part.open("ab" if have else "wb") as file:
            _copy(reply, file, name=part.stem, done=have, total=total)
    got = part.stat().st_size
    if total is not None and got != total:
        raise OSError(f"{got} of {total} bytes")


def _copy(source: IO[bytes], file: IO[bytes], *, name: str, done: int, total: int | None) -> None:
    last = time.monotonic()
    while chunk := source.read(CHUNK_BYTES):
        file.write(chunk)
        done += len(chunk)
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{name}: {done / 1e6:.0f} of {(total or 0) / 1e6:.0f} MB", flush=True)


def _verify(part: Path, checksum: str, url: str) -> None:
    """Raise ValueError, and remove the file, where its digest is not `checksum`."""
    algorithm, _, expected = checksum.partition(":")
    digest = hashlib.new(algorithm)
    with part.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        part.unlink()
        raise ValueError(
            f"{url}: wrong {algorithm}, got {digest.hexdigest()} instead of {expected}; "
            "it was removed, run the same command again"
        )


class _Joined(io.RawIOBase):
    """The bytes of several files, one after the other, without a copy on disk."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._file = self._paths.pop(0).open("rb")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        while len(data) < size and self._paths:
            self._file.close()
            self._file = self._paths.pop(0).open("rb")
            data += self._file.read(size - len(data))
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


def unpack(archives: Sequence[Path], folder: Path) -> None:
    """Unpack a tar, given whole or as its parts in order, into `folder`.

    Members that would leave the folder are refused (tarfile's data filter). Everything is unpacked
    aside and then renamed, so a folder that bears its final name is whole.
    """
    if not hasattr(tarfile, "data_filter"):
        raise ValueError(
            f"{archives[0]}: this Python has no tarfile.data_filter, so unpacking would not be "
            "safe, got one before 3.10.12 or 3.11.4; update Python, or unpack it yourself"
        )
    fresh = folder / f".unpack-{archives[0].name}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        with _Joined(archives) as stream, tarfile.open(fileobj=stream, mode="r|*") as tar:
            tar.extractall(fresh, filter="data")
        _move_into(fresh, folder)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{archives[0]}: cannot be unpacked, got {error}; delete it and download it again"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _move_into(source: Path, target: Path) -> None:
    """Rename what is in `source` into `target`, folders that are in both being joined."""
    for entry in sorted(source.iterdir()):
        place = target / entry.name
        if entry.is_dir() and place.is_dir():
            _move_into(entry, place)
        else:
            entry.replace(place)
