"""Processes of an experiment, read from /proc: launcher, ranks, loader workers.

All of them are `speakerlab train`. A launcher has no RANK in its environment, but its children do.
"""

import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

TRAINING = "-m speakerlab train "


@dataclass(frozen=True)
class Process:
    """A living process."""

    pid: int
    parent: int
    line: str


@dataclass(frozen=True)
class Crew:
    """Process ids by their task; the launcher is None where one process trains alone."""

    launcher: int | None
    ranks: dict[int, int]
    workers: list[int]


def all_processes() -> Iterable[Process]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            # pid (name) state parent ...; the name may contain blanks and parentheses.
            fields = (folder / "stat").read_text().rpartition(") ")[2]
            state, parent, *_ = fields.split()
        except (OSError, UnicodeDecodeError):
            continue
        # A zombie has ended, and waits for its parent.
        if state != "Z":
            yield Process(int(folder.name), int(parent), line)


def processes_of(exp: Path) -> dict[int, Process]:
    """All whose command line names the experiment: run.sh, launcher, ranks and their workers."""
    processes = {}
    for process in all_processes():
        if str(exp) in process.line:
            processes[process.pid] = process
    return processes


def children_of(parent: int) -> list[int]:
    return [process.pid for process in all_processes() if process.parent == parent]


def crew_of(exp: Path) -> Crew:
    """Return who is who among the trainings of an experiment.

    The children of a launcher are ranks, and those of a rank are loader workers. A training that
    is no child of another one, and no launcher, is the only rank.
    """
    parent_of = {
        process.pid: process.parent
        for process in processes_of(exp).values()
        if TRAINING in process.line
    }
    numbers = {pid: rank_of(pid) for pid in parent_of}
    parents_of_ranks = set()
    for pid, number in numbers.items():
        if number is not None:
            parents_of_ranks.add(parent_of[pid])
    launchers = []
    others = []
    for pid, number in numbers.items():
        if number is None and pid in parents_of_ranks:
            launchers.append(pid)
        else:
            others.append(pid)
    ranks = {}
    workers = []
    for pid in others:
        if parent_of[pid] in others:
            workers.append(pid)
        else:
            ranks[numbers[pid] or 0] = pid
    return Crew(
        launcher=min(launchers, default=None),
        ranks=ranks,
        workers=sorted(workers),
    )


def rank_of(pid: int) -> int | None:
    """Return the RANK that a process was started with; None without it, or after its end."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    match = re.search(rb"(?:^|\0)RANK=(\d+)\0", variables)
    return int(match[1]) if match else None


def wait_for(
    condition: Callable[[], object], *, seconds: float = 60, pause: float = 0.01
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(pause)


def wait_until_gone(whom: Path | Collection[int], *, seconds: float) -> float:
    """Return the seconds until processes, or all of an experiment, were gone."""
    began = time.monotonic()

    def is_gone() -> bool:
        if isinstance(whom, Path):
            return not processes_of(whom)
        return not any(process.pid in whom for process in all_processes())

    wait_for(is_gone, seconds=seconds)
    return time.monotonic() - began


def end_all(exp: Path) -> None:
    """Kill what a test may have left behind."""
    for pid in processes_of(exp):
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
