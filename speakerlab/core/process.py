"""CPUs and memory of a process, exit codes, and ending together with its parent."""

import ctypes
import os
import pwd
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

PARENT_VARIABLE = "SPEAKERLAB_PARENT"  # process id of whoever started this one
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h

# Exit codes of commands and run.sh, explained in docs/troubleshooting.md.
EXIT_INPUT = 1  # wrong input: one line for each error was printed
EXIT_NUMERIC = 3  # too many steps in a row without a finite gradient
EXIT_DIVERGED = 4  # the loss is finite and grows
EXIT_MEMORY = 5  # out of memory; exp/out_of_memory has the micro-batch that did not fit
EXIT_LOST = 6  # another rank or its host is gone; its own log has the error
EXIT_SIGNAL = 128  # plus the number of the signal on which the run saved and exited


def available_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs this process may use, at most its cgroup's quota.

    A quota of 2.5 counts as 2: a process with more threads than its quota is put to sleep for part
    of each period. `root` is where `proc` and `sys` lie.
    """
    return max(1, int(min([len(os.sched_getaffinity(0)), *_cpu_quotas(root)])))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the limits on CPUs of the cgroups (version 2) around this process."""
    try:
        inside = (root / "proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    except OSError:  # not Linux
        return
    # A container sees its own cgroup at the root of the mount, not at its path outside.
    for folder in (Path(inside), *Path(inside).parents):
        try:
            quota, period = (root / "sys/fs/cgroup" / folder / "cpu.max").read_text().split()
            yield int(quota) / int(period)
        except (OSError, ValueError):  # no such file, or "max"
            continue


def keep_freed_memory() -> None:
    """Keep freed memory in this process, because each step reuses it.

    glibc returns large blocks to the kernel at once, which then clears every page at each step:
    up to a third of a training step's time on a CPU. Without glibc, nothing changes.
    """
    glibc = ctypes.CDLL(None)
    if hasattr(glibc, "mallopt"):
        glibc.mallopt(M_MMAP_MAX, 0)  # no separate block for a large request
        glibc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def name_user() -> None:
    """Name a user who is not in /etc/passwd, as in some containers, because torch asks for it."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", str(os.getuid()))
        os.environ.setdefault("HOME", "/")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_launcher() -> None:
    """Die with the shell or torchrun that started this process; exit at once if it is already dead.

    Ranks under torchrun are in sessions of their own: nothing else would end them when torchrun
    is killed. A command typed by hand has no launcher and may outlive its shell (nohup).
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None and TORCHRUN_VARIABLE not in os.environ:
        return
    die_with_parent()
    if parent is not None and os.getppid() != int(parent):
        leave(EXIT_INPUT)


def die_of_ctrl_c() -> Any:
    """Let SIGINT end this process at once unless it is ignored; return the handler until now.

    While a process waits for others in C++ code, Python's own handler does not run.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return handler


def leave_signals_to_parent() -> None:
    """Ignore signals in a forked child, which its parent needs until it has saved."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)


def map_in_processes(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int, *, chunk: int = 1
) -> Iterator[Result]:
    """Yield function(item) in order: `chunk` items per task, or in this process below 2 workers."""
    if num_workers < 2:
        yield from map(function, items)
        return
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(num_workers, initializer=die_with_parent) as pool:
        yield from pool.map(function, items, chunksize=chunk)


def leave(code: int) -> NoReturn:
    """Exit now, with buffers flushed: gloo's threads sometimes abort at a regular exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
