"""A line about work that takes long, now and then. In: how much is done. Out: printed lines."""

import time

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Says `<name>: <done> of <total> <unit>`, at most every ten seconds."""

    def __init__(self, name: str, *, total: float, unit: str, per_unit: float = 1) -> None:
        """per_unit: what is counted of `total` and `done` to one unit, 1e6 bytes to a MB, say."""
        self._name, self._unit = name, unit
        self._total, self._per_unit = total, per_unit
        self._last = time.monotonic()

    def at(self, done: float) -> None:
        """Print the line if it is time to."""
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            done, total = done / self._per_unit, self._total / self._per_unit
            print(f"{self._name}: {done:.0f} of {total:.0f} {self._unit}", flush=True)
