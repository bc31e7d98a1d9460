"""Seconds of work on a device, and rows of measurements.

Imports nothing of the package, since the benchmarks load this file in a peer's process, too, and
torch only for a GPU, since it would count in the memory of what does not use it.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

BLOCKS = 5
T = TypeVar("T")


def synchronise(device: "torch.device | str") -> None:
    """Wait until a GPU has finished its work; a CPU always has."""
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def seconds_of(
    work: Callable[[], object], device: "torch.device | str", *, calls: int = 1
) -> float:
    """Return the mean seconds of a call."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronise(device)
    return (time.perf_counter() - start) / calls


def block_seconds(
    work: Callable[[], object], *, device: "torch.device", seconds: float, least: int = 3
) -> list[float]:
    """Return the mean seconds of a call in each of up to five blocks of calls, `seconds` in all.

    least: the minimum number of blocks. The first call warms up and is not counted.
    """
    seconds_of(work, device)
    once = seconds_of(work, device)
    calls = max(1, round(seconds / BLOCKS / once))
    found = [once] if calls == 1 else []
    left = min(BLOCKS, max(least, round(seconds / (calls * once)))) - len(found)
    return found + [seconds_of(work, device, calls=calls) for _ in range(left)]


class Laps:
    """Seconds by name, each from the end of the previous lap, over `count` repetitions."""

    def __init__(self, device: "torch.device") -> None:
        self.device = device
        self.start()

    def start(self) -> None:
        """Forget earlier laps."""
        self.seconds, self.count = defaultdict[str, float](float), 0
        self.last = time.perf_counter()

    def repeat(self, items: Iterable[T], *, warm_up: int, seconds: float) -> Iterator[T]:
        """Yield items until those after `warm_up` have taken so many seconds, at least two."""
        for number, item in enumerate(items, 1):
            yield item
            self.count += 1
            if number == warm_up:
                self.start()
            elif number > warm_up + 1 and self.total > seconds:
                return

    def end(self, name: str) -> None:
        """End a lap, with the GPU's work done."""
        synchronise(self.device)
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = now

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement, a line of `speakerlab bench`."""

    name: str
    ours: float
    unit: str
    note: str = ""

    def line(self) -> str:
        return f"{self.name:34}{number(self.ours):>12} {self.unit:12} {self.note}".rstrip()


def number(value: float | None) -> str:
    """Format a number with four significant digits, a count with all; None is empty."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"
