"""How far a long job is: a bar on a terminal, a line every ten seconds elsewhere."""

import logging
import sys
import time

log = logging.getLogger(__name__)
SECONDS_PER_LINE = 10.0
SECONDS_PER_BAR = 0.2
BAR_CELLS = 24


class Progress:
    """Tells what is done of `total` and the time left. bar=False: lines on a terminal too."""

    def __init__(self, total: int = 0, *, what: str = "recordings", bar: bool = True) -> None:
        self.total, self.what = total, what
        self.has_bar = bar and sys.stderr.isatty()
        self.started_at = self.last_at = time.monotonic()

    def tell(self, done: int, total: int | None = None) -> None:
        """`done` of them are done; called as often as one likes. total: where it is known now."""
        self.total = self.total if total is None else total
        now = time.monotonic()
        seconds_left = (now - self.started_at) / max(done, 1) * (self.total - done)
        if self.has_bar and (now - self.last_at >= SECONDS_PER_BAR or done == self.total):
            self.last_at = now
            full = BAR_CELLS * done // max(self.total, 1)
            bar = f"[{'#' * full}{'.' * (BAR_CELLS - full)}]"
            end = "\n" if done == self.total else ""
            left = f"{int(seconds_left) // 60}:{int(seconds_left) % 60:02d}"
            sys.stderr.write(f"\r{bar} {done}/{self.total} {self.what}, {left} left {end}")
            sys.stderr.flush()
        elif not self.has_bar and now - self.last_at >= SECONDS_PER_LINE:
            self.last_at = now
            log.info("%d of %d %s, %.0f s left", done, self.total, self.what, seconds_left)
