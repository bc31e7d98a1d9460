"""Files that grow by whole records and survive a full disk: records wait in memory for room."""

import logging
import os
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


class AppendedFile:
    """Records in order, each written whole; a failure is logged once, and when it is over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []

    def append(self, *records: bytes) -> None:
        was_waiting = bool(self.waiting)
        self.waiting += records
        try:
            _append(self.path, b"".join(self.waiting))
        except OSError as error:
            if not was_waiting:
                text = "%s: cannot be written: %s; free some space: rows are kept in memory"
                log.warning(text, self.path, error.strerror)
            return
        self.waiting.clear()
        if was_waiting:
            log.warning("%s: written again, nothing is missing", self.path)

    def close(self) -> None:
        """Try once more to write the records that wait."""
        if self.waiting:
            self.append()
        if self.waiting:
            log.warning("%s: the last %d records are missing", self.path, len(self.waiting))


class LogFile(logging.FileHandler):
    """A log file whose lines wait for room on a full disk; logging itself drops them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self.file = AppendedFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.file.append(f"{self.format(record)}\n".encode())
        except Exception:  # as in every handler: a bad record must not end the program
            self.handleError(record)


def _append(path: Path, data: bytes) -> None:
    """Append all of `data` or nothing: a part that was written is cut off again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab", buffering=0) as file:  # a network file system may be full at the end
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise
