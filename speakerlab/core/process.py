"""CPUs and memory of a process, exit codes, and ending together with its parent."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:  # its import takes milliseconds, and few commands need it
    from concurrent.futures import Future

Item = TypeVar("Item")
Result = TypeVar("Result")

PARENT_VARIABLE = "SPEAKERLAB_PARENT"  # id of the process that started this one
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
# How often a training's launcher has started lost ranks again, and the last time from which step.
RESTARTS_VARIABLE = "SPEAKERLAB_RESTARTS"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PF_FORKNOEXEC = 0x40  # linux/sched.h
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h

# Exit codes of commands and run.sh, explained in docs/troubleshooting.md.
EXIT_INPUT = 1  # wrong input: one line for each error was printed
EXIT_NUMERIC = 3  # too many steps in a row without a finite gradient
EXIT_DIVERGED = 4  # the loss is finite and grows
# Out of memory; MEMORY_NOTE in the experiment has the micro-batch that did not fit.
EXIT_MEMORY = 5
EXIT_LOST = 6  # another rank or its host is gone; its own log has the error
# A rank has printed a traceback: the error is not one of the input. Its launcher exits with 1.
EXIT_CRASH = 7
EXIT_SIGNAL = 128  # plus the number of the signal on which the run saved and exited
EXIT_UNREAD = EXIT_SIGNAL + 13  # SIGPIPE: nobody reads the output, as after `| head`

MEMORY_NOTE = "out_of_memory"

# Trainings need fork, the signals of schedulers and the kernel's shared memory.
IS_LINUX = sys.platform == "linux"
LINUX_ONLY = "runs on Linux only (on Windows: in WSL 2)"
# How workers start. A fork inherits the model and the data, but libraries of macOS do not survive
# one, and Windows has none.
START_METHOD = "fork" if IS_LINUX else "spawn"


def existing_signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return those of the named signals that this system has; Windows has few."""
    return tuple(signal.Signals[name] for name in names if hasattr(signal, name))


# Signals that commands handle, because they save before they exit.
HANDLED_SIGNALS = existing_signals("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")


def was_forked() -> bool:
    """Return whether this process was forked, and has executed no other program since (Linux)."""
    try:
        text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The name of the program may have blanks; behind it are the state and six fields.
    _, _, behind_name = text.rpartition(")")
    flags = int(behind_name.split()[6])
    return bool(flags & PF_FORKNOEXEC)


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


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; elsewhere than on Linux, a thread."""
    if IS_LINUX:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    parent = multiprocessing.parent_process()
    if parent is not None:
        watch = threading.Thread(target=_end_with, args=[parent], daemon=True)
        watch.start()


def _end_with(parent: Any) -> None:
    """Wait until the parent has ended, then end this process."""
    parent.join()
    os._exit(EXIT_INPUT)


def die_with_launcher() -> None:
    """Die with the shell or torchrun that started this process; exit at once if it is already dead.

    Ranks under torchrun are in sessions of their own: nothing else would end them when torchrun
    is killed. A command typed by hand has no launcher and may outlive its shell (nohup).
    """
    # Remove the variable: it does not apply to the children of this process.
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None and TORCHRUN_VARIABLE not in os.environ:
        return
    die_with_parent()
    if parent is not None and os.getppid() != int(parent):
        leave(EXIT_INPUT)


def leave_on_ctrl_c() -> None:
    """Let Ctrl-C exit with one line and without an exception, unless it is ignored.

    An exception that is raised while torch is imported can abort the process in C++ code.
    """

    def stop(number: int, _frame: object) -> None:
        # Not through sys.stderr, which this may have interrupted.
        os.write(2, b"stopped by Ctrl-C\n")
        os._exit(EXIT_SIGNAL + number)

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)


def die_of_ctrl_c() -> Any:
    """Let SIGINT end this process at once unless it is ignored; return the previous handler.

    While a process waits for others in C++ code, Python's own handler does not run.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return handler


@contextmanager
def hold_ctrl_c() -> Iterator[None]:
    """Hold Ctrl-C back; processes that start within inherit this, and leave Ctrl-C to their parent.

    In a terminal every process gets it, and each one that is starting would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def let_ctrl_c_through() -> None:
    """End what a parent has held back with `hold_ctrl_c`."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def leave_signals_to_parent() -> None:
    """Ignore signals in a forked child, because its parent needs it until the state is saved."""
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)


def map_in_processes(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_workers: int,
    *,
    chunk: int = 1,
) -> Iterator[Result]:
    """Yield function(item) in order: `chunk` items per task, or in this process below 2 workers."""
    if num_workers < 2:
        yield from map(function, items)
        return
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(num_workers, initializer=die_with_parent)
    remaining = iter(items)
    # Not `pool.map`: it cancels its tasks, for which the executor prints a traceback after a kill.
    tasks: list[Future[list[Result]]] = []
    other_children = set(multiprocessing.active_children())
    try:
        with hold_ctrl_c():
            part = list(islice(remaining, chunk))
            while part:
                tasks.append(pool.submit(_apply, function, part))
                part = list(islice(remaining, chunk))
        for task in tasks:
            yield from task.result()
    except BaseException:
        # Ctrl-C, or an error: end at once, not after all items.
        for worker in set(multiprocessing.active_children()) - other_children:
            worker.kill()
        raise
    finally:
        pool.shutdown()


def _apply(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [function(item) for item in items]


def run_own_package() -> None:
    """Make child processes import this copy of the package.

    Without this, `python -m speakerlab` imports a folder of that name in the current directory,
    such as 3D-Speaker's.
    """
    this_file = Path(__file__).resolve()
    root = str(this_file.parents[2])
    python_path = os.environ.get("PYTHONPATH", "")
    search_path = python_path.split(os.pathsep)
    if root not in search_path:
        # Without empty entries, which would mean the current directory.
        folders = [folder for folder in [root, *search_path] if folder]
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    os.environ["PYTHONSAFEPATH"] = "1"


def start_again(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `speakerlab *arguments`; end its children and close its files."""
    # Restore the default handlers; ignored signals stay ignored.
    for number in HANDLED_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    sys.stdout.flush()
    sys.stderr.flush()
    run_own_package()
    # Let `execv` close the files of libraries, such as a GPU's: threads still read some of them.
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):  # the descriptor of listdir itself
            if int(name) > 2:
                os.set_inheritable(int(name), False)
    command = [sys.executable, "-m", "speakerlab", *arguments]
    os.execv(sys.executable, command)


def leave(code: int) -> NoReturn:
    """Exit now, with buffers flushed: gloo's threads sometimes abort at a regular exit."""
    for stream in (sys.stdout, sys.stderr):
        # The reader of a pipe may be gone, and nobody is left to hear of it.
        with suppress(OSError):
            stream.flush()
    os._exit(code)
