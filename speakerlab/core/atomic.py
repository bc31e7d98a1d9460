"""Atomic files: a reader, or a run after a kill, never sees half a file.

`alone` is a lock between processes, also of several hosts if the file system has locks.
"""

import errno
import fcntl
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
    """Hold a lock on a file, after waiting for it; the kernel frees that of a dead process."""
    with path.open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
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
