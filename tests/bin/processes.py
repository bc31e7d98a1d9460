"""Who works for an experiment, read from /proc. In: its folder. Out: launcher, ranks, workers."""

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = r"-m speakerlab\.bin\.launch"
TRAINING = r"-m speakerlab(\.bin\.train| train) "


@dataclass(frozen=True)
class Process:
    """One living process whose command line names the experiment."""

    pid: int
    parent: int
    line: str


@dataclass(frozen=True)
class Crew:
    """Process ids by what they are for; the launcher is None where one process trains alone."""

    launcher: int | None
    ranks: dict[int, int]
    workers: list[int]


def processes_of(exp: Path) -> dict[int, Process]:
    """All that name the experiment: run.sh, torchrun, ranks and their loader workers."""
    found: dict[int, Process] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state, parent = (folder / "stat").read_text().rpartition(") ")[2].split()[:2]
        except (OSError, UnicodeDecodeError):
            continue
        if str(exp) in line and state != "Z":
            found[int(folder.name)] = Process(int(folder.name), int(parent), line)
    return found


def crew_of(exp: Path) -> Crew:
    """A rank is a training whose parent is none; what it forked are its loader workers."""
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
    """What torchrun told the process; 0 where there is no torchrun."""
    told = re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
    return int(told[1]) if told else 0


def wait_until_gone(exp: Path, *, seconds: float) -> float:
    """Seconds until nothing that names the experiment was left."""
    started_at = time.monotonic()
    while alive := processes_of(exp):
        waited = time.monotonic() - started_at
        assert waited < seconds, f"still alive after {waited:.0f} s: {alive}"
        time.sleep(0.05)
    return time.monotonic() - started_at


def end_all(exp: Path) -> None:
    """For the end of a test, however it ended."""
    for pid in processes_of(exp):
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue


def rows(exp: Path) -> list[dict[str, float | str]]:
    """Rows of metrics.jsonl; a last line that a kill cut, or that is being written, is left out."""
    path = exp / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def step_of(exp: Path) -> int:
    """The step of the last row of metrics.jsonl."""
    return int(rows(exp)[-1]["step"]) if rows(exp) else 0
