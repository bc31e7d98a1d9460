"""Atomic files and folders: no reader sees a partial one, even after a kill.

`locked` is a lock between processes, also of several hosts if the file system has locks.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from speakerlab.core.locks import try_lock

log = logging.getLogger(__name__)
# Errors of network file systems without locks.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Errors of a write for which there is no room: the disk, the user's quota, the largest file.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file to fill; it replaces `path` on success and is removed on an error.

    The mode of an existing file is kept; the umask decides the mode of a new one. If `path` is a
    link, the file that it points to is replaced, and the link stays.
    """
    # Else a link would become a file, and readers of its target would get old content.
    if path.is_symlink():
        path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named by host and process, because several may write the same file.
    writer = f"{socket.gethostname()}.{os.getpid()}"
    name = path.name
    # A file name has at most 255 bytes, and a character at most 4.
    if len(os.fsencode(name)) > 128:
        name = name[-32:]
    partial = path.with_name(f".{name}.{writer}.partial")
    try:
        with _naming_output(path, partial=partial):
            partial.touch()
            mode = partial.stat().st_mode
            # An owner may have shared the old file with a group, or closed it to others.
            with suppress(FileNotFoundError):
                mode = path.stat().st_mode
            yield partial
            # Some writers, such as safetensors' `save_file`, put a file in its place that only its
            # owner may read.
            if partial.stat().st_mode != mode:
                partial.chmod(mode)
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it replaces `folder`, or the target of a link."""
    folder = folder.resolve()
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, because a rename works only within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=parent) as scratch:
        fresh = Path(scratch, "new")
        fresh.mkdir()
        with _naming_output(folder, partial=fresh):
            yield fresh
        # Try again if another process has put its folder there in between.
        for number in count():
            with suppress(FileNotFoundError):
                folder.rename(Path(scratch, f"old{number}"))
            try:
                fresh.rename(folder)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise


@contextmanager
def _naming_output(path: Path, *, partial: Path) -> Iterator[None]:
    """Name the output at `path` in errors of writing `partial`, which becomes this output.

    The error of a write names no file, and that of a copy names its source first.
    """
    try:
        yield
    except OSError as error:
        name = error.filename2 or error.filename
        if name is None and error.errno in NO_ROOM:
            name = partial
        # The error of an input is raised as it is.
        if not isinstance(name, str | Path) or not Path(name).is_relative_to(partial):
            raise
        # The output itself, or a file in the output folder.
        output = path / Path(name).relative_to(partial)
        raise OSError(error.errno, error.strerror, str(output)) from error


def copy_files(source: Path, target: Path, *, leave_out: Collection[str] = ()) -> None:
    """Copy the content of a folder into another, without files of the names `leave_out`.

    Unlike `shutil.copytree`, which collects errors in a list, this raises the first error.
    """
    for path in source.iterdir():
        if path.name in leave_out:
            continue
        copy = target / path.name
        if path.is_dir():
            copy.mkdir()
            copy_files(path, copy, leave_out=leave_out)
        else:
            # So that an error names the copy.
            with replacing(copy) as partial:
                shutil.copy2(path, partial)


def check_writable(path: Path) -> None:
    """Raise ValueError, one line, unless a file can be created or replaced at `path`."""
    # The nearest existing parent; missing folders are created in it.
    place = path.parent
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with suppress(FileNotFoundError):
            path.lstat()  # raises an error if the name is too long
        if path.is_dir():
            reason = os.strerror(errno.EISDIR)
            raise IsADirectoryError(errno.EISDIR, reason)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); choose another path, or"
            f" correct the permissions of {place}"
        ) from error


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[bool]:
    """Hold a lock on a file, after waiting for it; yield whether another process had it.

    The kernel frees the lock of a process that dies. shared: several processes may hold the lock
    at once if all of them share it.
    Do not nest it in one process: releasing the inner lock would also release the outer one.
    """
    with _open_lock(path, shared=shared) as file:
        num_waits = 0
        while not _try_lock(file, path, shared=shared):
            num_waits += 1
            if num_waits == 10:
                log.info("%s: locked by another process; waiting for it", path)
            time.sleep(0.1)
        yield num_waits > 0


def _try_lock(file: TextIO, path: Path, *, shared: bool) -> bool:
    """Return whether the lock was free and is now held, or cannot exist on this file system."""
    try:
        return try_lock(file, shared=shared)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        log.warning(
            "%s: this file system has no locks; run one command at a time", path
        )
    return True


def _open_lock(path: Path, *, shared: bool) -> TextIO:
    """Open or create a lock file; raise ValueError where that is impossible."""
    try:
        return path.open("a+")
    except FileNotFoundError:  # its folder does not exist
        raise
    except OSError as error:
        if shared:
            # A shared lock needs no right to write, so the file may belong to another user.
            with suppress(OSError):
                return path.open()
        raise ValueError(
            f"{path.parent}: cannot be written ({error.strerror}); correct its"
            " permissions, or choose another folder"
        ) from error


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        # In blocks, because a file may be larger than the memory.
        block = file.read(1 << 20)
        while block:
            digest.update(block)
            block = file.read(1 << 20)
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    # Windows would write other line ends, and the digest of a table would depend on the system.
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=1)
    write_text(path, text + "\n")
