"""Warnings of a training that waits, for data or for a core, for a large share of its time."""

import logging
from pathlib import Path

log = logging.getLogger(__name__)

# Shares of the time above which a warning is logged.
MAX_DATA_SHARE = 0.2
MAX_CORE_SHARE = 0.2
# A share is checked after each period of so many seconds; after a warning, the period is longer.
CHECK_SECONDS = 30.0
WARNED_SECONDS = 600.0


class WaitWatch:
    """Warns, rarely, if a training waits."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        """Begin; tasks: Linux's folder of the threads of this process."""
        self.tasks = tasks
        self.data = ShareOfTime()
        self.core = ShareOfTime()
        self.is_first_row = True
        self.computed, self.waited = core_seconds(tasks)

    def add_row(self, step: int, *, wait_seconds: float, seconds: float) -> None:
        """Add the times of a row of metrics, and what the threads have done since the last one.

        wait_seconds: that the training has waited for data, of `seconds`.
        """
        computed, waited = core_seconds(self.tasks)
        core_wait = waited - self.waited
        core_use = computed - self.computed
        self.computed, self.waited = computed, waited
        # The time of the first row includes the start of the workers.
        if self.is_first_row:
            self.is_first_row = False
            return
        share = self.data.add(
            wait_seconds,
            of=seconds,
            seconds=seconds,
            most=MAX_DATA_SHARE,
        )
        if share:
            log.warning(
                "step %d: training waited for data %s; give it more CPUs, raise"
                " runtime.num_workers or pack the audio (docs/hardware.md)",
                step,
                share,
            )
        share = self.core.add(
            core_wait,
            of=core_wait + core_use,
            seconds=seconds,
            most=MAX_CORE_SHARE,
        )
        if share:
            log.warning(
                "step %d: the threads waited for a core %s, because other programs use the"
                " cores; end those, or set runtime.num_threads to the number of free cores"
                " (docs/hardware.md)",
                step,
                share,
            )


class ShareOfTime:
    """Share of a time that was spent waiting, over periods."""

    def __init__(self) -> None:
        self.period = CHECK_SECONDS
        self._begin()

    def _begin(self) -> None:
        self.waited = 0.0
        self.whole = 0.0
        self.seconds = 0.0

    def add(self, waited: float, *, of: float, seconds: float, most: float) -> str:
        """Add times; describe the share of a period that ends now, if it is above `most`.

        waited: part of the time `of`. seconds: by the clock, since the last call. Otherwise, the
        text is empty.
        """
        self.waited += waited
        self.whole += of
        self.seconds += seconds
        if self.seconds < self.period:
            return ""
        share = self.waited / self.whole if self.whole else 0.0
        text = f"{100 * share:.0f} % of the last {self.seconds:.0f} s"
        self._begin()
        if share <= most:
            self.period = CHECK_SECONDS
            return ""
        self.period = WARNED_SECONDS
        return text


def core_seconds(tasks: Path) -> tuple[float, float]:
    """Return the seconds that all threads computed, and that they were ready but had no core.

    0 and 0 where the kernel does not count them. Documentation/scheduler/sched-stats.rst of Linux.
    """
    computed = 0
    waited = 0
    try:
        threads = list(tasks.iterdir())
    except OSError:  # not Linux
        return 0.0, 0.0
    for thread in threads:
        try:
            nanoseconds = (thread / "schedstat").read_text().split()
        except OSError:  # the thread has ended, or the kernel has no such file
            continue
        computed += int(nanoseconds[0])
        waited += int(nanoseconds[1])
    return computed / 1e9, waited / 1e9
