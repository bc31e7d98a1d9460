"""A side's loader workers, put to sleep while it is the other side's turn.

They read ahead: without this, what they catch up with would be taken from the other side's time.
They are stopped where they are, so that a turn begins as the one before it ended.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable

import torch

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, on the device too; the workers sleep before and after."""
    _tell_workers(signal.SIGCONT)
    _wait_for(device)
    start = time.perf_counter()
    work()
    _wait_for(device)
    seconds = time.perf_counter() - start
    _tell_workers(signal.SIGSTOP)
    return seconds


def tie_to_parent(_worker: int = 0) -> None:
    """Have a worker die with its process, also while it sleeps (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave() -> None:
    """End this process and its workers, which a regular exit would wait for."""
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(0)


def _tell_workers(number: signal.Signals) -> None:
    for worker in multiprocessing.active_children():
        if worker.pid is not None:
            os.kill(worker.pid, number)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
