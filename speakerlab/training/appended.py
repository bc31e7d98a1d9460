"""Files that grow by whole records and survive a full disk: records then wait in memory."""

import logging
import os
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


class AppendedFile:
    """File of whole records in order; logs when writing begins to fail, and when it works again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []  # records that are not in the file yet

    def append(self, *records: bytes) -> None:
        """Write waiting records, then these; keep all of them in memory if the disk is full."""
        was_waiting = bool(self.waiting)
        self.waiting += records
        data = b"".join(self.waiting)
        try:
            _append(self.path, data)
        except OSError as error:
            # Only once: a training appends every few steps, and would fill the console.
            if not was_waiting:
                log.warning(
                    "%s: cannot be written: %s; free some space: rows are kept in"
                    " memory",
                    self.path,
                    error.strerror,
                )
            return
        self.waiting.clear()
        if was_waiting:
            log.warning("%s: written again, nothing is missing", self.path)

    def close(self) -> None:
        """Try once more to write the waiting records."""
        if self.waiting:
            self.append()
        if self.waiting:
            log.warning(
                "%s: the last %d records are missing", self.path, len(self.waiting)
            )


class LogFile(logging.FileHandler):
    """Log file whose lines wait in memory while the disk is full; a `FileHandler` drops them."""

    def __init__(self, path: Path) -> None:
        # With `delay`, the base class never opens the file: `emit` below writes it.
        super().__init__(path, encoding="utf-8", delay=True)
        self.file = AppendedFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        # As in every handler: a record that cannot be formatted must not end the program.
        try:
            line = f"{self.format(record)}\n"
            self.file.append(line.encode())
        except Exception:
            self.handleError(record)


def _append(path: Path, data: bytes) -> None:
    """Append all of `data` or nothing: a part that was written is cut off again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size_before = 0
    if path.exists():
        size_before = path.stat().st_size
    try:
        # Without a buffer, a full disk is reported by `write`, which may write only a part. A
        # network file system may report it no earlier than at the end of the block.
        with path.open("ab", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                num_written = file.write(rest)
                rest = rest[num_written:]
    except OSError:
        # Half a record would make the file unreadable. Shortening needs no room on the disk.
        with suppress(OSError):
            os.truncate(path, size_before)
        raise
