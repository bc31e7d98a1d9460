"""Signals that ask a training to save and leave. In: SIGTERM, SIGINT, SIGHUP, SIGUSR1. Out: which.

The handler only notes the number: the trainer leaves at the end of a step, with all ranks. A
process that cannot (it hangs in a collective because another rank is gone) is ended by a thread.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
# SIGUSR1: Slurm's warning before the time is up (--signal=USR1@180).
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PATIENCE_SECONDS = 25.0  # torchrun and most schedulers kill after 30


class Stopped(RuntimeError):
    """The run was asked to leave, and its state is saved."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} at step {step}, saved")
        self.number = number


class Signals:
    """Notes the first signal that asks to leave; a second Ctrl-C, or patience at its end, ends.

    end: called with the number from a thread; it must not return.
    """

    def __init__(self, end: Callable[[int], None], *, patience: float = PATIENCE_SECONDS) -> None:
        self.number = 0
        self.end, self.patience = end, patience
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)

    def listen(self) -> None:
        """Take the signals over; call it from the main thread."""
        for number in ASKING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def _note(self, number: int, _frame: object) -> None:
        if not self.number:
            self.number = number

    def _watch(self) -> None:
        """The bytes come as signals do, whatever the main thread is stuck in."""
        first = self._read()
        log.warning("%s: will save and leave after this step", signal.Signals(first).name)
        timer = threading.Timer(self.patience, self._end_late, [first])
        timer.daemon = True
        timer.start()
        while self._read() != signal.SIGINT:
            pass
        log.warning("SIGINT again: leaving at once, without saving")
        self.end(signal.SIGINT)

    def _read(self) -> int:
        while True:
            number = os.read(self.reader, 1)[0]
            if number in ASKING:
                return number

    def _end_late(self, number: int) -> None:
        log.warning("no step ended within %g s: leaving without saving", self.patience)
        self.end(number)
