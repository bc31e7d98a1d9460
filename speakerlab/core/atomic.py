"""Atomic files and folders: a reader, or a run after a kill, never sees half of one.

`alone` is a lock between processes, also of several hosts if the file system has locks.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write; it replaces `path` on success and is removed on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it replaces `folder`, or what that links to."""
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        fresh = Path(scratch, "new")
        fresh.mkdir()
        yield fresh
        for number in count():  # again if another process has put its folder there in between
            with suppress(FileNotFoundError):
                folder.rename(Path(scratch, f"old{number}"))
            try:
                fresh.rename(folder)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise


def check_writable(path: Path) -> None:
    """Raise ValueError, one line, unless a file can be created or replaced at `path`."""
    place = path.parent
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); choose another path, or correct the "
            f"permissions of {place}"
        ) from error


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock on a file, after waiting for it; the kernel frees that of a dead process.

    Not twice at a time in one process, where the end of the inner lock would end the outer one.
    """
    with path.open("a") as file:
        for number in count():
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if number == 10:
                    log.info("%s: locked by another process; waiting for it", path)
                time.sleep(0.1)
        yield


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=1) + "\n")
