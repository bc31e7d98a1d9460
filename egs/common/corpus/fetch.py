"""Resumable downloads of archives, and of MUSAN and RIRS_NOISES."""

import http.client
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from egs.common.corpus.archives import CHUNK_BYTES, checksum_fault, progress_bar, unpack
from egs.common.corpus.sources import ARCHIVES, NONE

# Folder that the archive unpacks to -> (URL, md5). Source: egs/voxceleb/sv-cam++/local/
# download_data.sh:25,27,32,34 and prepare_data.sh:44,48 of github.com/modelscope/3D-Speaker at
# 09e7806.
NOISE_ARCHIVES = {
    "musan": (
        "https://openslr.elda.org/resources/17/musan.tar.gz",
        "md5:0c472d4fc0c5141eca47ad1ffeb2a7df",
    ),
    "RIRS_NOISES": (
        "https://us.openslr.org/resources/28/rirs_noises.zip",
        "md5:e6f48e257286e05de56413b4779d8ffb",
    ),
}


def download_all(files: Mapping[Path, tuple[str, str | None]]) -> None:
    """Download all files that do not exist, path -> (URL, checksum), and print their sizes first.

    Raise ValueError if they do not fit on the disk.
    """
    missing = {path: url for path, (url, _) in files.items() if not path.exists()}
    if missing:
        sizes = {path: _bytes_left(url, path) for path, url in missing.items()}
        folder, total = (
            next(iter(missing)).parent,
            sum(size or 0 for size in sizes.values()),
        )
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"{path.name} {_in_gb(size)}" for path, size in sizes.items()]
        free = shutil.disk_usage(folder).free
        in_all = "" if None in sizes.values() else f"{_in_gb(total)} in all, "
        text = f"{folder}: downloading {', '.join(names)}; {in_all}{_in_gb(free)} free"
        if total > free:
            raise ValueError(
                f"{text}; free some space, or choose a folder on a larger disk"
            )
        print(f"{text}; unpacking needs as much again", flush=True)
    for path, (url, checksum) in files.items():
        download(url, path, checksum=checksum)


def _bytes_left(url: str, path: Path) -> int | None:
    """Return how much of a file is to be downloaded, None if the server does not say."""
    part = _part_of(path)
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            length = reply.headers["Content-Length"]
    except (OSError, http.client.HTTPException):
        return None
    done = part.stat().st_size if part.exists() else 0
    return None if length is None else max(0, int(length) - done)


def _in_gb(size: int | None) -> str:
    return "of unknown size" if size is None else f"{size / 1e9:.2f} GB"


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def download(url: str, path: Path, *, checksum: str | None = None) -> None:
    """Download to `path`; an interrupted download continues from `path`.part.

    checksum: "md5:..." or "sha256:..."; without one only the length is checked.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part_of(path)
    try:
        _receive(url, part)
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(
            f"{url}: download stopped: {error}; run the same command again to continue"
        ) from error
    fault = None if checksum is None else checksum_fault([part], checksum)
    if fault is not None:
        part.unlink()
        raise ValueError(
            f"{url}: {fault}; the file was removed, run the same command again"
        )
    part.replace(path)


def _receive(url: str, part: Path) -> None:
    """Append the missing bytes of `url` to `part`."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(
        url, headers={"Range": f"bytes={have}-"} if have else {}
    )
    try:
        reply = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if (
            have
            and error.code == 416
            and error.headers["Content-Range"] == f"bytes */{have}"
        ):
            return  # already complete
        if error.code == 416:
            part.unlink()
        raise
    with reply:
        if reply.status != 206:
            have = 0  # the server ignored the range and sends the whole file
        length = reply.headers["Content-Length"]
        total = None if length is None else have + int(length)
        with part.open("ab" if have else "wb") as file:
            _copy(reply, file, name=part.stem, done=have, total=total)
    got = part.stat().st_size
    if total is not None and got != total:
        raise OSError(f"{got} of {total} bytes")


def _copy(
    source: IO[bytes], file: IO[bytes], *, name: str, done: int, total: int | None
) -> None:
    bar = progress_bar(desc=name, initial=done, total=total, unit="B", unit_scale=True)
    with bar as progress:
        while chunk := source.read(CHUNK_BYTES):
            progress.update(file.write(chunk))


def download_noise_and_rooms(*, noise: Path | None, rirs: Path | None) -> bool:
    """Download MUSAN and RIRS_NOISES to the folders of --noise and --rirs that do not exist yet.

    Return whether there was something to download.
    Raise FileNotFoundError for a missing folder whose name is not that of the archive.
    """
    archives: dict[Path, tuple[str, str | None]] = {}
    for option, folder in (("noise", noise), ("rirs", rirs)):
        if folder is None or folder == NONE or folder.exists():
            continue
        name, _ = ARCHIVES[option]
        if folder.name != name:
            raise FileNotFoundError(
                f"--{option}: no such folder: {folder}; correct the path, or end it in"
                f" /{name} to download that archive"
            )
        url, checksum = NOISE_ARCHIVES[name]
        archives[folder.parent / url.rpartition("/")[2]] = url, checksum
    download_all(archives)
    for archive in archives:
        unpack([archive], archive.parent)
        print(f"{archive}: unpacked; it may be deleted")
    return bool(archives)
