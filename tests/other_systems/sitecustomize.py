"""Let Python programs on Linux believe that they run on Windows or macOS.

Python imports this module at its start, also in every child process, where its folder is in
PYTHONPATH. PRETENDED_SYSTEM is win32 or darwin: modules, functions, signals and constants that
Python lacks there are gone. Libraries in C are still those of Linux, so they are imported first:
many choose their files by the system.
"""

import ctypes
import importlib
import multiprocessing
import os
import select
import signal
import sys
import types
from typing import Any

SYSTEM = os.environ.get("PRETENDED_SYSTEM")

MODULES = {
    "darwin": (),
    "win32": (
        "fcntl",
        "grp",
        "pwd",
        "pty",
        "readline",
        "resource",
        "syslog",
        "termios",
    ),
}
FUNCTIONS = {
    "darwin": "sched_getaffinity sched_setaffinity posix_fadvise memfd_create",
    "win32": """chown confstr fork forkpty fchown getegid geteuid getgid getpgid getpgrp
        getpriority getuid initgroups killpg lchown mkfifo mknod openpty posix_fadvise
        posix_spawn posix_spawnp pread preadv pwrite pwritev register_at_fork sched_getaffinity
        sched_setaffinity sched_yield setpriority setsid setuid sysconf uname wait
        wait3 wait4 memfd_create O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_DSYNC O_SYNC""",
}
SIGNALS = {
    "darwin": "SIGCLD SIGPOLL SIGPWR SIGRTMIN SIGRTMAX",
    "win32": """SIGALRM SIGBUS SIGCHLD SIGCLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPOLL
        SIGPROF SIGPWR SIGQUIT SIGRTMAX SIGRTMIN SIGSTOP SIGSYS SIGTRAP SIGTSTP SIGTTIN
        SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ alarm
        pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait""",
}


# Of Python; they ask for the system when they are imported.
STANDARD = """asyncio concurrent.futures.process multiprocessing.heap uuid
multiprocessing.popen_spawn_posix multiprocessing.resource_tracker multiprocessing.synchronize"""
NOT_BLOCKING = 2  # of `msvcrt.locking`


def pretend(system: str) -> None:
    """Take away what Python lacks on a system, and set `sys.platform`."""
    libraries = os.environ.get("PRETENDED_IMPORTS", "")
    for name in f"{STANDARD} {libraries}".split():
        importlib.import_module(name)
    # Processes are spawned by Linux, which needs its signals for it.
    tracker = sys.modules["multiprocessing.resource_tracker"]
    vars(tracker)["signal"] = types.SimpleNamespace(**vars(signal))
    multiprocessing.set_start_method("spawn")
    if system == "win32":
        become_windows()
    for name in MODULES[system]:
        vars(sys)["modules"][name] = None
    names_of = {os: FUNCTIONS[system], signal: SIGNALS[system]}
    for module, names in names_of.items():
        for name in names.split():
            vars(module).pop(name, None)
    sys.platform = system


def become_windows() -> None:
    """Add what only Windows has, and change what is different there."""
    import fcntl

    def lock(file: int, mode: int, _num_bytes: int) -> None:
        assert mode == NOT_BLOCKING
        try:
            # Excludes every other open file, as on Windows.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PermissionError(13, "Permission denied") from error

    def open_library(name: str | None, *rest: Any, **options: Any) -> Any:
        if name is None:
            raise TypeError("Windows has no library without a name")
        return of_linux(name, *rest, **options)

    of_linux = ctypes.CDLL
    vars(ctypes)["CDLL"] = open_library
    msvcrt = types.ModuleType("msvcrt")
    vars(msvcrt).update(LK_NBLCK=NOT_BLOCKING, locking=lock)
    sys.modules["msvcrt"] = msvcrt
    vars(select).pop("poll")
    os.environ.setdefault("USERNAME", "user")


if SYSTEM:
    pretend(SYSTEM)
