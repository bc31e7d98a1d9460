"""Names for the parts of a training step. In: a name. Out: a context, and its times if asked for.

Names are paths: what is in `step/forward` is also in `step`. torch's profiler shows them above the
operators; `timed` notes them without its cost. Both are off in a training.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from torch.autograd import profiler

NOTHING = nullcontext()


class Span(NamedTuple):
    """When a region was entered and left, of a clock that only runs forward."""

    name: str
    begin_seconds: float
    end_seconds: float


noted: list[Span] | None = None  # where regions are noted, while they are


def region(name: str) -> AbstractContextManager[object]:
    """A region of this name, where anybody looks; else nothing, for half a microsecond."""
    if profiler._is_profiler_enabled:  # noqa: SLF001 # to ask costs a thirtieth of an unseen range
        return profiler.record_function(name)
    return NOTHING if noted is None else _noting(name, noted)


@contextmanager
def timed() -> Iterator[list[Span]]:
    """Note the regions of this process meanwhile, those within others first."""
    global noted
    noted = spans = []
    try:
        yield spans
    finally:
        noted = None


@contextmanager
def _noting(name: str, spans: list[Span]) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        spans.append(Span(name, begin, time.perf_counter()))
