"""Handling of Ctrl-C (SIGINT), in this process and in processes that it starts."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from speakerlab.core.process import EXIT_SIGNAL


def leave_on_ctrl_c() -> None:
    """Let Ctrl-C exit with one line and without an exception, unless it is ignored.

    An exception that is raised while torch is imported can abort the process in C++ code.
    """

    def stop(number: int, _frame: object) -> None:
        # Not through sys.stderr, which this may have interrupted.
        os.write(2, b"stopped by Ctrl-C\n")
        os._exit(EXIT_SIGNAL + number)

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)


def die_of_ctrl_c() -> Any:
    """Let SIGINT end this process at once unless it is ignored; return the previous handler.

    While a process waits for others in C++ code, Python's own handler does not run.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return handler


@contextmanager
def hold_ctrl_c() -> Iterator[None]:
    """Hold Ctrl-C back; processes that start within inherit this, and leave Ctrl-C to their parent.

    In a terminal every process gets it, and each one that is starting would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def let_ctrl_c_through() -> None:
    """End what a parent has held back with `hold_ctrl_c`."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
