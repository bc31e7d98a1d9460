"""Where the time of a chain goes: its hops' functions, timed while a `with` lasts."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Hop = tuple[str, Any, str]  # name, the module or class that has the function, the function's name
IO = Path("/proc/self/io")


class Stopwatch:
    """Seconds and calls of each hop; what a hop within a hop takes counts for the inner one."""

    def __init__(self) -> None:
        self.seconds, self.calls = defaultdict[str, float](float), Counter[str]()
        self._inner: list[float] = []

    @contextmanager
    def watching(self, hops: Sequence[Hop]) -> Iterator[None]:
        """Puts a timed function in the place of each, and the old ones back."""
        old = [(owner, name, vars(owner)[name]) for _, owner, name in hops]
        for hop, owner, name in hops:
            setattr(owner, name, self.timed(hop, vars(owner)[name]))
        try:
            yield
        finally:
            for owner, name, function in old:
                setattr(owner, name, function)

    def timed(self, hop: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[hop] += took - self._inner.pop()
                self.calls[hop] += 1
                if self._inner:
                    self._inner[-1] += took

        return timed


def bytes_read() -> int | None:
    """Bytes that this process has read so far, from a cache or not; None where no system says."""
    if not IO.exists():
        return None
    return int(IO.read_text().split("rchar: ")[1].split()[0])
