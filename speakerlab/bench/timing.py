"""Seconds of a call. In: what is to be called, and on which device. Out: seconds, block by block.

A GPU is waited for at the borders of a block and nowhere else.
"""

import time
from collections.abc import Callable

import torch

BLOCKS = 5


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def block_seconds(
    work: Callable[[], object], *, device: torch.device, seconds: float, least: int = 3
) -> list[float]:
    """Seconds of one call, measured over each of some blocks of calls, `seconds` in all.

    least: blocks that there are at least, however long they take. The first call, which takes
    memory and chooses kernels, does not count. The smallest is what the machine can do, the median
    what it does.
    """
    _time(work, 1, device)
    once = _time(work, 1, device)
    calls = max(1, round(seconds / BLOCKS / once))
    found = [once] if calls == 1 else []
    left = min(BLOCKS, max(least, round(seconds / (calls * once)))) - len(found)
    return found + [_time(work, calls, device) for _ in range(left)]


def _time(work: Callable[[], object], calls: int, device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronise(device)
    return (time.perf_counter() - start) / calls
