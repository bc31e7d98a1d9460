"""Timing of work on a device, and rows of measurements.

This file imports nothing from the package, because the benchmarks also load it in the process of
another toolkit. It imports torch only for a GPU, because torch would add to the measured memory of
programs that do not use it.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

BLOCKS = 5  # maximum number; callers take the best or the median
T = TypeVar("T")


def synchronise(device: "torch.device | str") -> None:
    """Wait until a GPU has finished its work; do nothing on a CPU."""
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def seconds_of(
    work: Callable[[], object],
    device: "torch.device | str",
    *,
    calls: int = 1,
) -> float:
    """Return the mean seconds of a call."""
    # GPU calls are asynchronous: without waiting, only the launches would be timed.
    synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronise(device)
    return (time.perf_counter() - start) / calls


def block_seconds(
    work: Callable[[], object],
    *,
    device: "torch.device",
    seconds: float,
    least: int = 3,
) -> list[float]:
    """Return the mean seconds of a call in each of up to five blocks of calls, `seconds` in all.

    least: the minimum number of blocks. The first call warms up and is not counted.
    """
    seconds_of(work, device)
    once = seconds_of(work, device)
    # Choose the number of calls so that all blocks together take about `seconds`.
    seconds_per_block = seconds / BLOCKS
    calls = max(1, round(seconds_per_block / once))
    num_blocks = round(seconds / (calls * once))
    num_blocks = min(BLOCKS, max(least, num_blocks))

    # For slow work, with one call per block, the call timed above is the first block.
    blocks = [once] if calls == 1 else []
    while len(blocks) < num_blocks:
        blocks.append(seconds_of(work, device, calls=calls))
    return blocks


class Laps:
    """Lap times: seconds by name, summed over `count` repetitions."""

    def __init__(self, device: "torch.device") -> None:
        self.device = device
        self.start()

    def start(self) -> None:
        """Reset the laps and start the clock."""
        self.seconds = defaultdict[str, float](float)
        self.count = 0
        self.last = time.perf_counter()

    def repeat(
        self,
        items: Iterable[T],
        *,
        warm_up: int,
        seconds: float,
    ) -> Iterator[T]:
        """Yield items until the items after `warm_up`, at least two, have taken `seconds`."""
        for number, item in enumerate(items, 1):
            yield item
            # Here the caller has finished the work on this item.
            self.count += 1
            if number == warm_up:
                self.start()
            elif number > warm_up + 1 and self.total > seconds:
                return

    def end(self, name: str) -> None:
        """Wait for the GPU; add the time since the end of the previous lap to lap `name`."""
        synchronise(self.device)
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = now

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measurement, one line of `speakerlab bench`."""

    name: str
    ours: float
    unit: str
    note: str = ""

    def line(self) -> str:
        value = number(self.ours)
        line = f"{self.name:34}{value:>12} {self.unit:12} {self.note}"
        return line.rstrip()


def number(value: float | None) -> str:
    """Format a number with four significant digits, a count with all digits; None as ""."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    digits = 0
    if value:
        # The power of ten of the first digit; zero has none.
        exponent = math.floor(math.log10(abs(value)))
        digits = max(0, 3 - exponent)
    return f"{value:,.{digits}f}"
