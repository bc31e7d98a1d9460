"""Processes of this host that share one work. In: what each does. Out: nothing, or why not.

They are forked from a process that has loaded what they need and computed nothing: neither threads
nor a GPU may be in use there. They die with it, and the first that fails ends the others.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

from speakerlab.core import process

SECONDS_BETWEEN_TICKS = 0.5


def context() -> BaseContext:
    """How they are started: forked where that is safe, so that nothing is loaded twice."""
    return multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def run_workers(
    work: Callable[[int], None], count: int, *, what: str, tick: Callable[[], None]
) -> None:
    """work(0), ..., work(count - 1), each in a process; `tick` is called now and then meanwhile.

    Raises what a worker raised (ValueError and OSError), and ValueError with one line, naming it,
    where one ended otherwise.
    """
    started: list[tuple[Any, Any]] = []  # process, where it tells its error
    try:
        for index in range(count):
            started.append(_start(work, index))
        running = list(started)
        while running:
            wait([worker.sentinel for worker, _ in running], SECONDS_BETWEEN_TICKS)
            tick()
            for index, (worker, told) in enumerate(started):
                if worker.exitcode:
                    raise _failure(worker, told, f"{what} {index + 1} of {count}")
            running = [pair for pair in running if pair[0].exitcode is None]
    finally:
        for worker, _ in started:
            worker.kill()
            worker.join()


def _start(work: Callable[[int], None], index: int) -> tuple[Any, Any]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    worker = context().Process(  # pyright: ignore[reportAttributeAccessIssue]
        target=_live, args=(work, index, sender, os.getpid())
    )
    worker.start()
    sender.close()
    return worker, receiver


def _live(work: Callable[[int], None], index: int, sender: Connection, parent: int) -> None:
    process.die_with_parent()
    process.leave_signals_to_parent()
    if os.getppid() != parent:  # died before it was watched
        process.leave(process.EXIT_INPUT)
    try:
        work(index)
    except (ValueError, OSError) as error:
        sender.send(error)
        process.leave(process.EXIT_INPUT)


def _failure(worker: Any, told: Any, name: str) -> Exception:
    with suppress(EOFError, OSError):
        if told.poll():
            return told.recv()
    code = worker.exitcode
    if code > 0:
        return ValueError(f"{name}: failed, got exit code {code}; what it printed is above")
    how = signal.Signals(-code).name
    hint = "; likely out of memory: use fewer processes" if code == -signal.SIGKILL else ""
    return ValueError(f"{name}: was killed, got {how} of process {worker.pid}{hint}")
