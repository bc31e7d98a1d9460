"""Trainings under random faults, started again by the same command until they end.

    python tests/chaos/chaos.py --minutes 60 --seed 0 [--ranks 2] [--hosts 2] [--work DIR]

A round is one training through run.sh, on packed audio with noise and rooms. Faults drawn from
(seed, round) strike it, several at once; after each end the same command is typed again, and what
its message asks for is repaired. Some rounds also have a NaN in fixed steps, or run out of memory.

Checked after every end: a documented exit code, one line that says why, no traceback, no process
left after 60 s, no file outside the experiment and the data. Checked at the end of a round: the
weights of the undisturbed training with the same NaN, bit for bit, and every row of metrics once.
(The weights may differ after running out of memory, which makes micro-batches smaller, and after a
roll-back, which returns to the last checkpoint: that of the last stop.)

Exits with 1 and the round's number if anything deviates; --round repeats that round alone. The
moments of faults depend on the clock, so a repetition strikes the same blows at other steps.
Mounts, and so full and read-only disks, and two hosts need root.
"""

import argparse
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in ("..", ".", "bin"))
from faults import Place, Struck
from processes import end_all, processes_of
from tiny import checkpoints, rows, weights
from world import World, build_world

CODES = {0, 1, 4, 5, 6, 129, 130, 135, 137, 138, 143}  # docs/troubleshooting.md
OF_TIME = {"crops_per_second", "data_wait", "gpu_memory_mb"}
HARMS = {  # of $CHAOS_HARM
    "": "none",
    "nan {last} 21 23": "NaN in steps 21 to 23",
    "inf-once {last} 31 60": "Inf in steps 31 to 60, so a roll-back",
    "full {last} 41 41": "out of memory in step 41",
}
MOST_FAULTS = 14  # of a round
PAUSE = (0.3, 8.0)  # seconds between two faults
GONE_SECONDS = 60.0
NOTICE_SECONDS = 60.0
STUCK_SECONDS = 240.0  # without an end or a new row


class Deviation(AssertionError):
    """The training did what it must not do."""


def check(condition: object, text: str) -> None:
    if not condition:
        raise Deviation(text)


@dataclass
class Tally:
    """What happened in all rounds."""

    faults: Counter[str] = field(default_factory=Counter)
    noticed: list[float] = field(default_factory=list)  # seconds from a kill to the run's end
    gone: list[float] = field(default_factory=list)  # seconds from there to its last process's
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
                print(f"{name}: median {statistics.median(values):.1f}, most {max(values):.1f}")


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

    def train(self) -> None:
        """Start the training until it ends by itself."""
        unrepaired = 0
        while True:
            before = self.last_step()
            started = self.world.start(self.exp, self.harm)
            killed = self.strike_until_ended(started)
            self.wait_until_gone()
            codes = [run.returncode for run, _ in started]
            texts = [log.read_text(errors="replace") for _, log in started]
            for code, text in zip(codes, texts):
                self.check_end(code, text)
            if all(code == 0 for code in codes):
                break
            self.note_lost(before, "\n".join(texts))
            unrepaired = 0 if killed or self.repair("\n".join(texts)) else unrepaired + 1
            check(unrepaired < 4, f"4 ends that no message explains:\n{texts[0][-3000:]}")
        self.undo_all()

    def strike_until_ended(self, started: list[tuple[Any, Path]]) -> list[Struck]:
        """Strike while any host runs; return the kills of this run."""
        runs = [run for run, _ in started]
        kills: list[Struck] = []
        kill_at = first_end = 0.0
        row_at, row = time.monotonic(), self.last_step()
        next_at = time.monotonic() + self.draw.uniform(*PAUSE)
        while any(run.poll() is None for run in runs):
            now = time.monotonic()
            self.undo_due(now)
            step = self.last_step()
            if step != row or self.is_disturbed:
                row, row_at = step, now
            check(now - row_at < STUCK_SECONDS, f"no new row for {STUCK_SECONDS:.0f} s")
            if any(run.poll() is not None for run in runs):
                first_end = first_end or now
                if self.is_disturbed:
                    first_end = now
                check(now - first_end < 3 * GONE_SECONDS, "one host ended, the other did not")
            if kills and self.is_disturbed:
                kill_at = now
            elif kills:
                seconds = now - kill_at
                check(seconds < NOTICE_SECONDS, f"{kills[0].text}: unnoticed for {seconds:.0f} s")
            elif now >= next_at and self.num_faults < MOST_FAULTS:
                next_at = now + self.draw.uniform(*PAUSE)
                if (struck := self.strike([run.pid for run in runs])) and struck.kills:
                    kills, kill_at = [struck], time.monotonic()
            time.sleep(0.02)
        if kills:
            self.tally.noticed.append(time.monotonic() - kill_at)
        return kills

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
            until = time.monotonic() + (1e9 if struck.seconds is None else struck.seconds)
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
            check(now - began < GONE_SECONDS, f"left after {GONE_SECONDS:.0f} s: {lines}")
            time.sleep(0.02)
        self.tally.gone.append(time.monotonic() - began)

    def check_end(self, code: int, text: str) -> None:
        """Check exit code and log of a host; a shell that a signal killed (< 0) says nothing."""
        self.tally.ends[code] += 1
        is_silent, code = code < 0, abs(code) + 128 * (code < 0)
        tail = text[-3000:]
        check(code in CODES, f"exit code {code} is not documented:\n{tail}")
        check("Traceback" not in text, f"a traceback:\n{tail}")
        if code and not is_silent:
            refused = code == 1 and ": refused" in tail  # before stage 3
            said = refused or re.search(r"stage 3: failed with exit code|stopped by", text)
            check(said, f"exit code {code}, and no line says that stage 3 ended:\n{tail}")
        check(not (files := self.world.touched()), f"made outside the experiment: {files}")

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


def is_comparable(harm: str) -> bool:
    """Return whether the weights do not depend on when the training was stopped.

    A roll-back returns to the last checkpoint, which may be of a stop.
    """
    return not harm.startswith(("full", "inf-once"))


def comparable(exp: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in OF_TIME} for row in rows(exp)]


def play(world: World, seed: int, number: int, whole: Mapping[str, Path], tally: Tally) -> None:
    """Play a round, and compare it with the undisturbed training."""
    draw = random.Random(f"{seed} {number}")
    harm = draw.choice(["", *HARMS])
    exp = world.disk / f"round{number}"
    exp.mkdir()
    print(f"round {number}: {HARMS[harm]}", flush=True)
    one = Round(world, exp, harm, draw, tally)
    try:
        one.train()
        found = [] if one.damaged_rows else comparable(exp)
        if not is_comparable(harm):
            trained = [row for row in found if row["kind"] == "train"]
            steps = [row["step"] for row in trained]
            check(not steps or steps == list(range(1, 241)), "rows are missing or double")
            attempt = int(harm.startswith("inf-once"))
            check(not trained or trained[-1]["attempt"] == attempt, "another number of roll-backs")
        else:
            check(weights(exp) == weights(whole[harm]), "other weights than undisturbed")
            check(not found or found == comparable(whole[harm]), "other rows than undisturbed")
    finally:
        one.undo_all()
        end_all(exp)
    shutil.rmtree(exp)


def undisturbed(world: World) -> dict[str, Path]:
    """Return the training of each harm, without faults."""
    found = {}
    for harm in HARMS:
        if not is_comparable(harm):
            continue
        exp = world.root / f"whole{len(found)}"
        for run, log in world.start(exp, harm):
            check(run.wait(900) == 0, log.read_text())
        found[harm] = exp
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add: Any = parser.add_argument
    add("--minutes", type=float, default=3, help="no round begins after these (3)")
    add("--seed", type=int, default=0)
    add("--ranks", type=int, default=1, help="of each host (1)")
    add("--hosts", type=int, default=1, choices=(1, 2), help="network namespaces (1)")
    add("--round", type=int, help="play this round alone")
    add("--work", type=Path, help="an empty or absent folder; kept (a temporary one)")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="chaos-"))
    tally, began = Tally(), time.monotonic()
    with build_world(work.resolve(), options.ranks, options.hosts) as world:
        whole = undisturbed(world)
        number = options.round or 0
        while True:
            try:
                play(world, options.seed, number, whole, tally)
            except Deviation as error:
                tally.print()
                sys.exit(f"seed {options.seed}, round {number}: {error}")
            number += 1
            if options.round is not None or time.monotonic() - began > 60 * options.minutes:
                break
    tally.print()
    if options.work is None:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
