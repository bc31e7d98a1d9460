"""Clean shutdown on SIGTERM, SIGINT, SIGHUP and SIGUSR1.

The handler only records the signal: the trainer saves and exits at the end of a step, with all
ranks. If a process cannot do so (it hangs in a collective because another rank is gone), a thread
ends it.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable

from speakerlab.core.process import existing_signals

log = logging.getLogger(__name__)
# SIGUSR1: Slurm's warning before the time is up (--signal=USR1@180).
SHUTDOWN = existing_signals("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
PATIENCE_SECONDS = 25.0  # torchrun and most schedulers kill after 30


class Stopped(RuntimeError):
    """The run was stopped by a signal, and its state is saved."""

    def __init__(self, number: int, step: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} at step {step}, saved")
        self.number = number


class Signals:
    """Record of the first shutdown signal; a second Ctrl-C, or a timeout, ends the process.

    end: called with the signal from a thread; it must not return.
    """

    def __init__(
        self, end: Callable[[int], None], *, patience: float = PATIENCE_SECONDS
    ) -> None:
        self.number = 0
        self.end = end
        self.patience = patience
        # Python calls handlers in the main thread alone, which may be stuck in C++ code. The
        # interpreter also writes the number of each signal to this pipe, at once; a thread reads
        # it. Writing must not block: it happens inside of the signal's handler in C.
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)

    def listen(self) -> None:
        """Install the handlers; call it from the main thread."""
        for number in SHUTDOWN:
            # A training that is started with nohup must survive the end of the terminal.
            is_ignored = signal.getsignal(number) == signal.SIG_IGN
            if number.name == "SIGHUP" and is_ignored:
                continue
            signal.signal(number, self._note)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def _note(self, number: int, _frame: object) -> None:
        # The first signal decides the exit code.
        self.number = self.number or number

    def _watch(self) -> None:
        """Read the signals as they come, even while the main thread is stuck."""
        first_number = self._read()
        name = signal.Signals(first_number).name
        log.warning("%s: saving and exiting after this step", name)
        timer = threading.Timer(self.patience, self._end_late, [first_number])
        timer.daemon = True
        timer.start()
        # A launcher may repeat SIGTERM. Only Ctrl-C means that the user will not wait.
        while self._read() != signal.SIGINT:
            pass
        log.warning("SIGINT again: exiting now, without saving")
        self.end(signal.SIGINT)

    def _read(self) -> int:
        """Wait for the next shutdown signal; the pipe also has other signals."""
        while True:
            (number,) = os.read(self.reader, 1)
            if number in SHUTDOWN:
                return number

    def _end_late(self, number: int) -> None:
        """End the process, which cannot reach the end of its step."""
        log.warning("no step ended within %g s: exiting without saving", self.patience)
        self.end(number)
