"""Exit codes and signals of a process; ending together with its parent, and starting again."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from speakerlab.core.system import IS_LINUX

PARENT_VARIABLE = "SPEAKERLAB_PARENT"  # id of the process that started this one
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
# How often a training's launcher has started lost ranks again, and the last time from which step.
RESTARTS_VARIABLE = "SPEAKERLAB_RESTARTS"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PF_FORKNOEXEC = 0x40  # linux/sched.h

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


def leave_signals_to_parent() -> None:
    """Ignore signals in a forked child, because its parent needs it until the state is saved."""
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)


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
