"""What a process may use, and how it ends: with its parent, and with a known code."""

import ctypes
import os
import signal
import sys
from typing import NoReturn

PARENT_VARIABLE = "SPEAKERLAB_PARENT"  # process id of whoever started this one
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
PR_SET_PDEATHSIG = 1  # linux/prctl.h

EXIT_INPUT = 1  # wrong input: one line a fault was printed
EXIT_NUMERIC = 3  # too many steps in a row without a finite gradient


def available_cpus() -> int:
    """CPUs this process may use, which in a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_launcher() -> None:
    """Die with the shell or torchrun that started this process; leave at once if it already has.

    Ranks under torchrun are in sessions of their own: nothing else would end them when torchrun
    is killed. A command typed by hand has no launcher and may outlive its shell (nohup).
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None and TORCHRUN_VARIABLE not in os.environ:
        return
    die_with_parent()
    if parent is not None and os.getppid() != int(parent):
        leave(EXIT_INPUT)


def leave(code: int) -> NoReturn:
    """End now, buffers flushed. gloo's threads abort now and then at a regular interpreter exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
