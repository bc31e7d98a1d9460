"""Passes of models in progress, which a fork of the process waits for.

During a pass, libraries hold locks, such as oneDNN's for the kernels that it stores. A process that
is forked meanwhile by another thread has these locks, but not the threads that would release them:
its first pass would wait for ever, once in some hundred forks.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# A pass takes seconds. One that takes longer may wait for the fork itself.
MAX_WAIT_SECONDS = 60.0


class Passes:
    """Number of passes in progress; none begins while a thread forks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_running = 0
        self._num_forks = 0  # that threads are about to make

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block, a pass is in progress."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_forks, MAX_WAIT_SECONDS)
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def wait_before_fork(self) -> None:
        """Wait for the passes in progress, and hold others back."""
        with self._changed:
            self._num_forks += 1
            self._changed.wait_for(lambda: not self._num_running, MAX_WAIT_SECONDS)

    def resume_after_fork(self) -> None:
        """Let the passes of this process begin."""
        with self._changed:
            self._num_forks -= 1
            self._changed.notify_all()

    def begin_in_child(self) -> None:
        """Forget the passes of the parent, whose threads a forked process lacks."""
        self._changed = threading.Condition()
        self._num_running = 0
        self._num_forks = 0


PASSES = Passes()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=PASSES.wait_before_fork,
        after_in_parent=PASSES.resume_after_fork,
        after_in_child=PASSES.begin_in_child,
    )
