"""Files that grow by whole records, whatever the disk does. In: bytes or log lines. Out: the file.

On a disk that is full nothing is lost and nothing ends: records wait in memory until there is room.
"""

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


class AppendedFile:
    """Records in order, each whole or not yet there; trouble is told once, and when it is over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []

    def append(self, *records: bytes) -> None:
        """Write these, after what waits."""
        was_waiting = bool(self.waiting)
        self.waiting += records
        try:
            _append(self.path, b"".join(self.waiting))
        except OSError as error:
            if not was_waiting:
                log.warning("%s", self._told(error))
            return
        self.waiting.clear()
        if was_waiting:
            log.warning("%s: is written again, nothing is missing", self.path)

    def close(self) -> None:
        """The last chance for what waits."""
        if self.waiting:
            self.append()
        if self.waiting:
            log.warning("%s: lacks its last %d records", self.path, len(self.waiting))

    def _told(self, error: OSError) -> str:
        free = ""
        with suppress(OSError):
            free = f" with {shutil.disk_usage(self.path.parent).free >> 10} KiB free"
        return (
            f"{self.path}: cannot be written, got '{error.strerror}'{free}; free some room: "
            "until then it is kept in memory, and training goes on"
        )


class LogFile(logging.FileHandler):
    """A log file whose lines wait where they cannot be written; logging itself drops them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self.file = AppendedFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.file.append(f"{self.format(record)}\n".encode())
        except Exception:  # as every handler: a bad record must not end what it tells of
            self.handleError(record)


def _append(path: Path, data: bytes) -> None:
    """All of `data`, or none of it: a part that was written is cut off again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    size = os.fstat(descriptor).st_size
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)  # where a network file system tells that it is full
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise
