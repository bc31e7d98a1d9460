"""Clean shutdown on SIGTERM, SIGINT, SIGHUP and SIGUSR1.

The handler only notes the signal: the trainer saves and leaves at the end of a step, with all
ranks. A process that cannot (it hangs in a collective because another rank is gone) is ended by a
thread.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
# SIGUSR1: Slurm's warning before the time is up (--signal=USR1@180).
SHUTDOWN = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PATIENCE_SECONDS = 25.0  # torchrun and most schedulers kill after 30


class Stopped(RuntimeError):
    """The run was stopped by a signal, and its state is saved."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} at step {step}, saved")
        self.number = number


class Signals:
    """Notes the first shutdown signal; a second Ctrl-C, or a timeout, ends the process.

    end: called with the signal from a thread; it must not return.
    """

    def __init__(self, end: Callable[[int], None], *, patience: float = PATIENCE_SECONDS) -> None:
        self.number = 0
        self.end, self.patience = end, patience
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)

    def listen(self) -> None:
        """Install the handlers; call it from the main thread."""
        for number in SHUTDOWN:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def _note(self, number: int, _frame: object) -> None:
        self.number = self.number or number

    def _watch(self) -> None:
        """Read the signals as they come, even while the main thread is stuck."""
        first = self._read()
        log.warning("%s: saving and exiting after this step", signal.Signals(first).name)
        timer = threading.Timer(self.patience, self._end_late, [first])
        timer.daemon = True
        timer.start()
        while self._read() != signal.SIGINT:
            pass
        log.warning("SIGINT again: exiting now, without saving")
        self.end(signal.SIGINT)

    def _read(self) -> int:
        while True:
            number = os.read(self.reader, 1)[0]
            if number in SHUTDOWN:
                return number

    def _end_late(self, number: int) -> None:
        log.warning("no step ended within %g s: exiting without saving", self.patience)
        self.end(number)
