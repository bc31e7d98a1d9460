"""A training of which processes, files and disks fail, started again until it ends."""

import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from faults import Place, Struck
from processes import crew_of, processes_of
from tiny import checkpoints, rows
from world import Run, World

CODES = {0, 1, 4, 5, 6, 129, 130, 135, 137, 138, 143}  # docs/troubleshooting.md
MOST_FAULTS = 14  # of a round
PAUSE = (0.3, 8.0)  # seconds between two faults
GONE_SECONDS = 60.0
NOTICE_SECONDS = 60.0
STUCK_SECONDS = 240.0  # without an end or a new row
WAITING_SECONDS = (
    15.0  # of a host for another that ended: then the latter is started again
)


class Deviation(AssertionError):
    """The training did what it must not do."""


def check(condition: object, text: str) -> None:
    if not condition:
        raise Deviation(text)


@dataclass
class Tally:
    """What happened in all rounds."""

    faults: Counter[str] = field(default_factory=Counter)
    noticed: list[float] = field(
        default_factory=list
    )  # seconds from a kill to the run's end
    gone: list[float] = field(
        default_factory=list
    )  # seconds from there to its last process's
    lost_steps: list[int] = field(default_factory=list)
    ends: Counter[int] = field(default_factory=Counter)

    def print(self) -> None:
        for kind, count in sorted(self.faults.items()):
            print(f"{count:5d}  {kind}")
        print(f"{self.faults.total():5d}  faults; ends by exit code: {dict(self.ends)}")
        for name, values in (
            ("seconds until the run ended after a kill", self.noticed),
            ("seconds until its last process was gone", self.gone),
            ("steps lost", self.lost_steps),
        ):
            if values:
                print(
                    f"{name}: median {statistics.median(values):.1f}, most"
                    f" {max(values):.1f}"
                )


class Watch:
    """Times since the last new row, and since a host began to wait for another."""

    def __init__(self, step: int):
        self.step = step
        self.stepped_at = time.monotonic()
        self.waits_from = 0.0

    def look(
        self, step: int, now: float, *, is_disturbed: bool, is_waiting: bool
    ) -> bool:
        """Return whether a host has waited long; raise Deviation if no row is new for too long."""
        if step != self.step or is_disturbed or is_waiting:
            self.step = step
            self.stepped_at = now
        check(
            now - self.stepped_at < STUCK_SECONDS,
            f"no new row for {STUCK_SECONDS:.0f} s",
        )
        if is_disturbed or not is_waiting:
            self.waits_from = now
        return now - self.waits_from > WAITING_SECONDS


@dataclass
class Round:
    """A training of which some processes, files or disks fail until it ends."""

    world: World
    exp: Path
    harm: str
    draw: random.Random
    tally: Tally
    num_faults: int = 0
    standing: list[tuple[float, Struck]] = field(default_factory=list)  # until when
    damaged_rows: bool = False
    unrepaired: int = 0  # ends in a row

    def train(self) -> None:
        """Start the training until it ends by itself on each host."""
        runs = [
            self.world.start(self.exp, self.harm, host)
            for host in range(self.world.hosts)
        ]
        while True:
            before = self.last_step()
            killed = self.strike_until_ended(runs)
            if any(run.code is None for run in runs):
                self.interrupt_waiting(runs)
            if all(run.code is not None for run in runs):
                self.wait_until_gone()
            ended = [host for host, run in enumerate(runs) if run.code is not None]
            text = "\n".join(runs[host].text for host in ended)
            for host in ended:
                self.check_end(runs[host])
            if all(run.code == 0 for run in runs):
                break
            self.note_lost(before, text)
            self.unrepaired = 0 if killed or self.repair(text) else self.unrepaired + 1
            check(
                self.unrepaired < 4, f"4 ends that no message explains:\n{text[-3000:]}"
            )
            for host in ended:
                runs[host] = self.world.start(self.exp, self.harm, host)
        self.undo_all()

    def strike_until_ended(self, runs: Sequence[Run]) -> list[Struck]:
        """Strike while any host runs; return the kills of this run.

        Return also when a host, before its ranks have joined, waits for one that ended.
        """
        kills: list[Struck] = []
        kill_at = 0.0
        num_retries = 0
        watch = Watch(self.last_step())
        next_at = time.monotonic() + self.draw.uniform(*PAUSE)
        while any(run.code is None for run in runs):
            now = time.monotonic()
            self.undo_due(now)
            waits = any(run.code for run in runs) and not self.is_joined(runs)
            conditions = {"is_disturbed": self.is_disturbed, "is_waiting": waits}
            if watch.look(self.last_step(), now, **conditions):
                return kills
            if kills and retries_of(runs) > num_retries:
                kills = []  # the killed process had already run out of memory
            elif kills and self.is_disturbed:
                kill_at = now
            elif kills:
                is_late = now - kill_at > NOTICE_SECONDS and not waits
                check(
                    not is_late,
                    f"{kills[0].text}: unnoticed for {NOTICE_SECONDS:.0f} s",
                )
            elif now >= next_at and self.num_faults < MOST_FAULTS:
                next_at = now + self.draw.uniform(*PAUSE)
                if (
                    struck := self.strike([run.process.pid for run in runs])
                ) and struck.kills:
                    kills = [struck]
                    kill_at = time.monotonic()
                    num_retries = retries_of(runs)
            time.sleep(0.02)
        if kills:
            self.tally.noticed.append(time.monotonic() - kill_at)
        return kills

    def is_joined(self, runs: Sequence[Run]) -> bool:
        """Return whether ranks run that have found each other; rank 0 says so.

        A host that ran out of memory waits for the others again: they must join once more.
        """
        num_joins = len(re.findall(r"(?:training|resuming) from step", runs[0].text))
        num_retries = max(retries_of([run]) for run in runs)
        return num_joins > num_retries and bool(crew_of(self.exp).ranks)

    def interrupt_waiting(self, runs: Sequence[Run]) -> None:
        """Press Ctrl-C on a host that waits, or not: then the other joins it, unless it retries."""
        [run] = [run for run in runs if run.code is None]
        if "retrying" in run.text or self.draw.random() < 0.5:
            self.tally.faults["Ctrl-C while waiting"] += 1
            os.killpg(run.process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(GONE_SECONDS)
            check(
                run.code in (130, -signal.SIGINT), f"exit code {run.code} after Ctrl-C"
            )

    @property
    def is_disturbed(self) -> bool:
        """Return whether a fault stands that ends by itself, such as a frozen process."""
        return any(struck.seconds is not None for _, struck in self.standing)

    def strike(self, shells: list[int]) -> Struck | None:
        """Strike one fault that is possible now."""
        world = self.world
        place = Place(world.disk, self.exp, world.data, shells, world.cables)
        name = self.draw.choice(sorted(world.faults()))
        if not name.startswith("SIG") and not checkpoints(self.exp):
            return None  # a new training could not know that its data are wrong
        struck = world.faults()[name](place, self.draw)
        if struck is None:
            return None
        self.num_faults += 1
        self.tally.faults[name] += 1
        self.damaged_rows |= name == "damaged metrics"
        print(f"  step {self.last_step()}: {struck.text}", flush=True)
        if struck.seconds is not None or struck.path is not None:
            until = time.monotonic() + (
                1e9 if struck.seconds is None else struck.seconds
            )
            self.standing.append((until, struck))
        return struck

    def undo_due(self, now: float) -> None:
        for until, struck in self.standing[::-1]:  # a file may be damaged twice
            if now >= until:
                struck.undo()
                self.standing.remove((until, struck))

    def undo_all(self) -> None:
        self.undo_due(2e9)

    def wait_until_gone(self) -> None:
        began = time.monotonic()
        while left := processes_of(self.exp):
            now = time.monotonic()
            self.undo_due(now)
            lines = "; ".join(process.line[:200] for process in left.values())
            check(
                now - began < GONE_SECONDS, f"left after {GONE_SECONDS:.0f} s: {lines}"
            )
            time.sleep(0.02)
        self.tally.gone.append(time.monotonic() - began)

    def check_end(self, run: Run) -> None:
        """Check exit code and log of a host; a shell that a signal killed (< 0) says nothing."""
        code = run.code or 0
        text = run.text
        self.tally.ends[code] += 1
        is_silent = code < 0
        code = abs(code) + 128 * (code < 0)
        tail = text[-3000:]
        check(code in CODES, f"exit code {code} is not documented:\n{tail}")
        check("Traceback" not in text, f"a traceback:\n{tail}")
        if code and not is_silent:
            said = re.search(r"stage 3: (failed with exit code|stopped by)", text)
            check(said, f"exit code {code}, and no line that says why:\n{tail}")
        check(
            not (files := self.world.touched()), f"made outside the experiment: {files}"
        )

    def repair(self, text: str) -> bool:
        """Do what the messages of the last end ask for."""
        repaired = False
        for until, struck in self.standing[::-1]:
            if struck.path is not None and str(struck.path) in text:
                struck.undo()
                self.standing.remove((until, struck))
                repaired = True
        if "move it away" in text:
            shutil.rmtree(self.exp / "checkpoints")
            self.undo_all()  # a new training could not know that its data are wrong
            repaired = True
        return repaired

    def last_step(self) -> int:
        try:
            return max((row["step"] for row in rows(self.exp, "train")), default=0)
        except (ValueError, KeyError, OSError, UnicodeDecodeError):
            return 0  # a damaged row

    def note_lost(self, before: int, text: str) -> None:
        resumed = re.findall(r"resuming from step (\d+) of", text)
        if resumed and before >= int(resumed[-1]):
            self.tally.lost_steps.append(before - int(resumed[-1]))


def retries_of(runs: Sequence[Run]) -> int:
    return sum(run.text.count("retrying with a smaller one") for run in runs)
