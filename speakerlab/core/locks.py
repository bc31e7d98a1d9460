"""Locks on open files, between processes: of POSIX, or of Windows.

The system frees the lock of a process that dies. Windows has two differences: Python knows only
exclusive locks there, and nobody else can read the bytes that are locked. So a byte behind the end
of the file is locked, which nobody reads.
"""

import importlib
import sys
import time
from types import ModuleType
from typing import IO, Any

POLL_SECONDS = 0.1
BEHIND_THE_END = 1 << 30  # the byte that is locked on Windows


def _find(name: str) -> ModuleType | None:
    """Return a module of one system only, or None on others."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# Any: type checkers know the attributes of only one system.
_fcntl: Any = _find("fcntl")
_msvcrt: Any = None if _fcntl else _find("msvcrt")


def try_lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Return whether the lock was free; it is held until the file is closed.

    shared: several processes may hold it at once if all of them share it; exclusive on Windows.
    On POSIX the lock does not exclude threads of this process, and they lose it when one of them
    closes the file. Raises OSError on a file system without locks.
    """
    try:
        if _fcntl is None:
            _lock_on_windows(file)
        else:
            kind = _fcntl.LOCK_SH if shared else _fcntl.LOCK_EX
            _fcntl.lockf(file, kind | _fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def wait_for_lock(file: IO[Any]) -> None:
    """Hold an exclusive lock, also against other threads that open the file, until it is closed."""
    if _fcntl is not None:
        _fcntl.flock(file, _fcntl.LOCK_EX)
        return
    while not try_lock(file):
        time.sleep(POLL_SECONDS)


def share_lock(file: IO[Any]) -> None:
    """Hold a lock that any number of readers share, after waiting for a writer.

    On Windows this is no lock, because Windows itself does not replace a file that is open.
    """
    if _fcntl is not None:
        _fcntl.lockf(file, _fcntl.LOCK_SH)


def _lock_on_windows(file: IO[Any]) -> None:
    """Lock a byte without waiting; PermissionError if another process, or this one, holds it."""
    if _msvcrt is None:
        raise OSError(f"file locks: {sys.platform} has none that Python knows")
    position = file.tell()
    file.seek(BEHIND_THE_END)
    try:
        _msvcrt.locking(file.fileno(), _msvcrt.LK_NBLCK, 1)
    finally:
        file.seek(position)
