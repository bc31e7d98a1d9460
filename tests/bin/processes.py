"""Processes of an experiment, read from /proc: launcher, ranks, loader workers."""

import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = r"-m speakerlab launch"
TRAINING = r"-m speakerlab train "


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
            state, parent = (folder / "stat").read_text().rpartition(") ")[2].split()[:2]
        except (OSError, UnicodeDecodeError):
            continue
        if state != "Z":
            yield Process(int(folder.name), int(parent), line)


def processes_of(exp: Path) -> dict[int, Process]:
    """All whose command line names the experiment: run.sh, torchrun, ranks and their workers."""
    return {process.pid: process for process in all_processes() if str(exp) in process.line}


def children_of(parent: int) -> list[int]:
    return [process.pid for process in all_processes() if process.parent == parent]


def crew_of(exp: Path) -> Crew:
    """A rank is a training whose parent is none; its children are loader workers."""
    processes = processes_of(exp)
    launchers = [pid for pid, p in processes.items() if re.search(LAUNCHER, p.line)]
    training = {
        pid: p
        for pid, p in processes.items()
        if pid not in launchers and re.search(TRAINING, p.line)
    }
    ranks = {rank_of(pid): pid for pid, p in training.items() if p.parent not in training}
    workers = [pid for pid, p in training.items() if p.parent in training]
    return Crew(min(launchers, default=None), ranks, sorted(workers))


def rank_of(pid: int) -> int:
    """Return the RANK that torchrun gave to a process, 0 without torchrun."""
    found = re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
    return int(found[1]) if found else 0


def wait_for(condition: Callable[[], object], *, seconds: float = 60, pause: float = 0.01) -> None:
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
