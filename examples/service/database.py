"""SQLite files that several workers read and write.

A committed transaction survives a kill of any process and, with synchronous=FULL, a loss of power.
The file must lie on a local disk, because network file systems lack the locks that SQLite needs.
"""

import os
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# A writer waits so long for the others, whose transactions take milliseconds.
BUSY_SECONDS = 10.0
# Of the owner alone, because an embedding identifies a person.
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


class Database:
    """Connection to a file, which is used by one thread at a time."""

    def __init__(self, path: Path, schema: str) -> None:
        """Open the file; create it, and the table, if there is none."""
        self.path = path
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        # Before SQLite, which would let everyone read it. The files of its log get the same mode.
        open(path, "ab", opener=private).close()
        _make_private(path)
        self._one_thread = threading.Lock()
        self._connection = _connect(path)
        self._file = _identity(path)
        with self.transaction() as connection:
            connection.execute(schema)

    @contextmanager
    def connected(self) -> Iterator[sqlite3.Connection]:
        """Give the connection to this thread; raise OSError if the file is no longer there."""
        with self._one_thread:
            # Otherwise SQLite would write into the file that was deleted, without an error.
            if _identity(self.path) != self._file:
                raise FileNotFoundError(
                    f"{self.path}: was replaced by another file; restart the service"
                )
            yield self._connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what is done within, or nothing of it; wait for the transactions of others."""
        with self.connected() as connection:
            # IMMEDIATE: a transaction that reads first could not wait before its first write.
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def fetch_one(self, statement: str, values: tuple[Any, ...] = ()) -> Any:
        """Return the first row, or None."""
        with self.connected() as connection:
            return connection.execute(statement, values).fetchone()

    def fetch_all(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self.connected() as connection:
            return connection.execute(statement, values).fetchall()

    def forget_deleted(self) -> None:
        """Remove deleted rows from the log beside the file, unless another worker reads it."""
        with self.connected() as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        with self._one_thread:
            self._connection.close()


def private(path: str, flags: int) -> int:
    """Open a file, as the `opener` of `open`; if it is new, its owner alone can read it."""
    return os.open(path, flags, PRIVATE_FILE)


def check_writable(folder: Path) -> None:
    """Raise OSError unless a file can be written into a folder, by trying it."""
    # Without a name, so that nothing is left. Permissions alone would not show a full disk.
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    # Not all of them name the folder.
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        timeout=BUSY_SECONDS,
        isolation_level=None,  # `transaction` begins and commits
        check_same_thread=False,
    )
    # Readers do not wait for writers.
    connection.execute("PRAGMA journal_mode=WAL")
    # Every commit is on the disk before it returns.
    connection.execute("PRAGMA synchronous=FULL")
    # Zeros replace what is deleted, because an embedding identifies a person.
    connection.execute("PRAGMA secure_delete=ON")
    return connection


def _make_private(path: Path) -> None:
    """Take a database of an earlier version from other users, with its log."""
    for suffix in ("", "-wal", "-shm"):
        file = path.with_name(path.name + suffix)
        if file.exists():
            file.chmod(PRIVATE_FILE)


def _identity(path: Path) -> tuple[int, int]:
    """Return numbers that no other file has."""
    found = path.stat()
    return found.st_dev, found.st_ino
