"""What a process may use, and how it ends: with its parent, and with a known code."""

import ctypes
import os
import signal
import sys
from typing import NoReturn

PARENT_VARIABLE = "SPEAKERLAB_PARENT"  # process id of whoever started this one
PR_SET_PDEATHSIG = 1  # linux/prctl.h

EXIT_INPUT = 1  # wrong input: one line a fault was printed
EXIT_NUMERIC = 3  # too many steps in a row without a finite gradient
EXIT_MEMORY = 5  # out of memory; a smaller micro-batch would fit


def available_cpus() -> int:
    """CPUs this process may use, which in a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; leave at once if it already has.

    Ranks under torchrun are in sessions of their own: nothing else would end them when torchrun
    is killed. Linux only; elsewhere a rank ends at its next collective.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def check_parent() -> None:
    """Leave if the launcher named in the environment died before `die_with_parent` was called."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and os.getppid() != int(parent):
        leave(EXIT_INPUT)


def leave(code: int) -> NoReturn:
    """End now, buffers flushed. gloo's threads abort now and then at a regular interpreter exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
