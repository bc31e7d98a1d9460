"""Files written whole or not at all: a reader, or a run after a kill, never meets half a file.

`alone` keeps processes, of several hosts where the file system has locks, out of each other's way.
"""

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that takes the place of `path` when all went well, and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is here; the kernel frees the lock file of one that is dead."""
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
    """Write a text file whole."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write readable JSON whole."""
    write_text(path, json.dumps(values, indent=1) + "\n")
