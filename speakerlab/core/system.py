"""What the system gives a process: its kind, CPUs, freed memory and the name of the user."""

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h

# Trainings need fork, the signals of schedulers and the kernel's shared memory.
IS_LINUX = sys.platform == "linux"
LINUX_ONLY = "runs on Linux only (on Windows: in WSL 2)"
# How workers start. A fork inherits the model and the data, but libraries of macOS do not survive
# one, and Windows has none.
START_METHOD = "fork" if IS_LINUX else "spawn"


def limit_spinning() -> None:
    """Have waiting OpenMP threads spin briefly only; their library reads this when it is loaded.

    By default they slow training tenfold while other processes use the cores.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def available_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs that this process may use, at most its cgroup's quota.

    A quota of 2.5 counts as 2: a process with more threads than its quota is put to sleep for part
    of each period. `root` is where `proc` and `sys` lie.
    """
    num_allowed = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # on Linux
        num_allowed = len(os.sched_getaffinity(0))
    quotas = list(_cpu_quotas(root))
    limit = min([num_allowed, *quotas])
    return max(1, int(limit))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the limits on CPUs of the cgroups (version 2) around this process."""
    try:
        cgroups = (root / "proc/self/cgroup").read_text()
    except OSError:  # not Linux
        return
    _, _, path_of_cgroup = cgroups.rpartition("0::/")
    inside = Path(path_of_cgroup.strip())
    # In a container, its own cgroup is at the root of the mount, not at its path outside.
    for folder in (inside, *inside.parents):
        cpu_max = root / "sys/fs/cgroup" / folder / "cpu.max"
        try:
            quota, period = cpu_max.read_text().split()  # microseconds
            yield int(quota) / int(period)
        except (OSError, ValueError):  # no such file, or "max"
            continue


def is_on_wsl(root: Path = Path("/")) -> bool:
    """Return whether this is Linux on Windows (WSL); `root` is where `proc` and `dev` lie."""
    # The device of its GPUs, also in containers and with a kernel of the user's own.
    if (root / "dev/dxg").exists():
        return True
    try:
        release = (root / "proc/sys/kernel/osrelease").read_text()
    except OSError:  # not Linux
        return False
    return "microsoft" in release.lower()


def keep_freed_memory() -> None:
    """Keep freed memory in this process, because each step reuses it.

    glibc returns large blocks to the kernel at once, which then clears every page at each step:
    up to a third of a training step's time on a CPU. Without glibc, nothing changes.
    """
    if not IS_LINUX:
        return
    glibc = ctypes.CDLL(None)
    if hasattr(glibc, "mallopt"):
        glibc.mallopt(M_MMAP_MAX, 0)  # no separate block for a large request
        glibc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Return the free memory between the blocks in use to the kernel; without glibc, nothing."""
    if not IS_LINUX:
        return
    glibc = ctypes.CDLL(None)
    if hasattr(glibc, "malloc_trim"):
        glibc.malloc_trim(0)


def name_user() -> None:
    """Set USER and HOME, which torch reads, if the user is not in /etc/passwd (some containers)."""
    try:
        import pwd
    except ModuleNotFoundError:  # on Windows, where the user always has a name
        return
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        user_id = str(os.getuid())
        os.environ.setdefault("USER", user_id)
        os.environ.setdefault("HOME", "/")
