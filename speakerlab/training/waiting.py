"""Warnings of a training that waits, for data or for a core, for a large share of its time."""

import logging
from pathlib import Path

log = logging.getLogger(__name__)

# Shares of the time above which a warning is logged.
MAX_DATA_SHARE = 0.2
MAX_CORE_SHARE = 0.2
# The shares are checked after each period of so many seconds; after a warning, it is longer.
CHECK_SECONDS = 30.0
WARNED_SECONDS = 600.0


class WaitWatch:
    """Warns, rarely, if a training waits."""

    def __init__(self, threads: Path = Path("/proc/self/task")) -> None:
        """Begin; threads: Linux's folder of the threads of this process."""
        self.threads = threads
        self.period = CHECK_SECONDS
        self.is_first_row = True
        self._begin()

    def _begin(self) -> None:
        """Begin a period."""
        self.seconds = 0.0
        self.data_seconds = 0.0
        self.times = thread_seconds(self.threads)

    def add_row(self, step: int, *, wait_seconds: float, seconds: float) -> None:
        """Add the times of a row of metrics; log a warning if a period ends.

        wait_seconds: the part of `seconds` in which the training waited for data.
        """
        # The time of the first row includes the start of the workers.
        if self.is_first_row:
            self.is_first_row = False
            self._begin()
            return
        self.seconds += seconds
        self.data_seconds += wait_seconds
        if self.seconds >= self.period:
            has_warned = self._warn(step)
            self.period = WARNED_SECONDS if has_warned else CHECK_SECONDS
            self._begin()

    def _warn(self, step: int) -> bool:
        """Warn of large shares of the period that ends; return whether there is one."""
        data_share = self.data_seconds / self.seconds
        if data_share > MAX_DATA_SHARE:
            log.warning(
                "step %d: training waited for data %.0f %% of the last %.0f s; give it"
                " more CPUs, raise runtime.num_workers or pack the audio"
                " (docs/hardware.md)",
                step,
                100 * data_share,
                self.seconds,
            )
        core_use = 0.0
        core_wait = 0.0
        for thread, (computed, waited) in thread_seconds(self.threads).items():
            # A thread that has started in this period is new; one that has ended is left out.
            computed_before, waited_before = self.times.get(thread, (0.0, 0.0))
            core_use += computed - computed_before
            core_wait += waited - waited_before
        # 0 of 0 where the kernel does not count.
        core_share = core_wait / max(core_wait + core_use, 1e-9)
        if core_share > MAX_CORE_SHARE:
            log.warning(
                "step %d: the threads waited for a core %.0f %% of the last %.0f s,"
                " because other programs or data workers use the cores; end those"
                " programs, or lower runtime.num_threads (docs/hardware.md)",
                step,
                100 * core_share,
                self.seconds,
            )
        return data_share > MAX_DATA_SHARE or core_share > MAX_CORE_SHARE


def thread_seconds(threads: Path) -> dict[str, tuple[float, float]]:
    """Return thread -> seconds that it computed, and seconds that it was ready but had no core.

    Empty where the kernel does not count them. Documentation/scheduler/sched-stats.rst of Linux.
    """
    seconds_of: dict[str, tuple[float, float]] = {}
    try:
        folders = list(threads.iterdir())
    except OSError:  # not Linux
        return {}
    for folder in folders:
        try:
            computed, waited, _ = (folder / "schedstat").read_text().split()
        except OSError:  # the thread has ended, or the kernel has no such file
            continue
        # Nanoseconds.
        seconds_of[folder.name] = (int(computed) / 1e9, int(waited) / 1e9)
    return seconds_of
