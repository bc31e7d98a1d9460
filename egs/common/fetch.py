"""Downloading archives: what is cut off goes on where it stopped.

In: a URL and the checksum that its publisher gives. Out: a file that is whole, or an error.
"""

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from egs.common.archives import CHUNK_BYTES, checksum_fault
from egs.common.progress import Progress


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
    fault = None if checksum is None else checksum_fault([part], checksum)
    if fault is not None:
        part.unlink()
        raise ValueError(f"{url}: {fault}; it was removed, run the same command again")
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
    progress = Progress(name, total=total or 0, unit="MB", per_unit=1e6)
    while chunk := source.read(CHUNK_BYTES):
        file.write(chunk)
        done += len(chunk)
        progress.at(done)
