"""A bar that stays in the last line of a terminal. In: how far a run is. Out: one line, redrawn.

Lines of the log are written above it; where there is no terminal nothing is drawn at all.
"""

import logging
import os
import sys
import time
from typing import TextIO

CELLS = 24
REDRAW_SECONDS = 0.2
CLEAR = "\r\x1b[K"  # to the first column; erase to the end of the line


class Bar:
    """Draws on `stream`, by default where the log goes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.is_drawn = False
        self.drawn_at = float("-inf")
        self.eraser: _Eraser | None = None
        if self.stream.isatty():
            self.eraser = _Eraser(self)
            logging.getLogger().handlers.insert(0, self.eraser)

    def draw(self, share: float, text: str) -> None:
        """Redraw with the share that is done, 0 to 1; not more often than an eye can follow."""
        now = time.monotonic()
        if self.eraser is None or now - self.drawn_at < REDRAW_SECONDS:
            return
        full = round(CELLS * share)
        line = f"[{'#' * full}{'.' * (CELLS - full)}] {100 * share:.0f}% {text}"
        self._write(CLEAR + line[: self._columns() - 1])
        self.is_drawn, self.drawn_at = True, now

    def erase(self) -> None:
        """Leave the line empty, for what is written next."""
        if self.is_drawn:
            self._write(CLEAR)
            self.is_drawn, self.drawn_at = False, float("-inf")

    def close(self) -> None:
        self.erase()
        if self.eraser is not None:
            logging.getLogger().removeHandler(self.eraser)

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or 80
        except OSError:
            return 80

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # the terminal was closed; a run under nohup goes on
            self.is_drawn = False


class _Eraser(logging.Handler):
    """The first handler, so that the bar is gone before a line is written."""

    def __init__(self, bar: Bar) -> None:
        super().__init__()
        self.bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        self.bar.erase()
