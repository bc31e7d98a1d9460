"""SQLite files that several workers read and write.

A committed transaction survives a kill of any process and, with synchronous=FULL, a loss of power.
The file must lie on a local disk, because network file systems lack the locks that SQLite needs.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A writer waits so long for the others, whose transactions take milliseconds.
BUSY_SECONDS = 10.0


def connect(path: Path, schema: str) -> sqlite3.Connection:
    """Open or create a database; the caller lets one thread at a time use the connection."""
    path.parent.mkdir(parents=True, exist_ok=True)
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
    with transaction(connection):
        connection.execute(schema)
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit what is done within, or nothing of it; wait for the transactions of others."""
    # IMMEDIATE: a transaction that reads first could not wait before its first write.
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def forget_deleted(connection: sqlite3.Connection) -> None:
    """Remove deleted rows from the log beside the database, unless another worker reads it."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
