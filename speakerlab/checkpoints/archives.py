"""Archives of strangers, unpacked so that nothing lands outside the folder meant for it.

In: a `.zip`, `.tar`, `.tar.gz` or `.tgz`. Out: its regular files below a folder. One member that
is a link, a device, absolute or above the folder, and nothing at all is unpacked.
"""

import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import IO

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")
MAX_BYTES = 8 << 30  # of all members together: the largest published model is a fifth of it


@dataclass(frozen=True)
class Member:
    """What a table of contents says of a member."""

    name: str
    size: int
    kind: str  # file, folder, or what it is instead


def is_archive(path: Path) -> bool:
    """Whether the name is that of an archive; a checkpoint of torch is a zip of another name."""
    return path.name.lower().endswith(SUFFIXES)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the regular files. Raises ValueError, one line, where a member may not be unpacked."""
    try:
        with _opened(archive) as (members, open_member):
            _refuse_bad(members, archive)
            for member in members:
                if member.kind == "file":
                    target = folder / member.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with open_member(member.name) as source, target.open("wb") as file:
                        shutil.copyfileobj(source, file)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{archive}: cannot be unpacked, got '{reason}'; get it again") from error


@contextmanager
def _opened(archive: Path) -> Iterator[tuple[list[Member], "_Opener"]]:
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive) as bundle:
            yield [_zip_member(info) for info in bundle.infolist()], _Opener(bundle)
    else:
        with tarfile.open(archive) as bundle:
            yield [_tar_member(info) for info in bundle], _Opener(bundle)


class _Opener:
    """Opens a member of either kind of archive for reading."""

    def __init__(self, bundle: zipfile.ZipFile | tarfile.TarFile) -> None:
        self.bundle = bundle

    def __call__(self, name: str) -> IO[bytes]:
        if isinstance(self.bundle, zipfile.ZipFile):
            return self.bundle.open(name)
        file = self.bundle.extractfile(name)
        assert file is not None  # only regular files are opened
        return file


def _zip_member(info: zipfile.ZipInfo) -> Member:
    mode = info.external_attr >> 16
    kind = "folder" if info.is_dir() else "file"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        kind = "link" if stat.S_ISLNK(mode) else "special file"
    return Member(info.filename, info.file_size, kind)


def _tar_member(info: tarfile.TarInfo) -> Member:
    kind = "file" if info.isfile() else "folder" if info.isdir() else "special file"
    return Member(info.name, info.size, "link" if info.issym() or info.islnk() else kind)


def _refuse_bad(members: list[Member], archive: Path) -> None:
    for member in members:
        path = PureWindowsPath(member.name)  # knows both slashes, and drives
        if path.drive or path.root or ".." in path.parts:
            raise ValueError(
                f"{archive}: a member points outside of it, got '{member.name}'; do not use it"
            )
        if member.kind not in ("file", "folder"):
            raise ValueError(
                f"{archive}: a member is a {member.kind}, got '{member.name}'; do not use it"
            )
    total = sum(member.size for member in members)
    if total > MAX_BYTES:
        raise ValueError(
            f"{archive}: unpacks to too much, got {total / 2**30:.0f} GiB; unpack it yourself"
        )
