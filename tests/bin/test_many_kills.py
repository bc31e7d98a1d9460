"""Killed again and again, at any moment, a training still ends with the bits of an undisturbed one.

The short form is one process; the long one, 25 kills at 1, 2 and 3 ranks, prints its figures.
"""

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import Crew, crew_of, end_all, rows, step_of, wait_until_gone
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

OF_TIME = {"crops_per_second", "data_wait", "gpu_memory_mb"}
STEPS_PER_EPOCH = 4
SETTINGS = [
    "training.global_batch=12",  # for 1, 2 and 3 ranks
    "training.checkpoint_every_steps=2",
    "training.valid_every_epochs=2",
]
END_SECONDS = 60  # a dead rank has ended the run by then
START_SECONDS = {1: 4.0, 2: 6.0, 3: 9.0}  # about what a run needs to its first step
STEP_SECONDS = 0.1


@dataclass(frozen=True)
class Blow:
    """Who is killed (rank, torchrun, worker, or group: all there are) and when."""

    who: str
    when: str = "step"  # or "write", of a checkpoint, or "start", before the first step


@dataclass(frozen=True)
class Fate:
    """What a kill did: steps that must be done again, and how long the others lived on."""

    blow: Blow
    steps_lost: int
    seconds_to_end: float


EVERYWHERE = [Blow("rank"), Blow("rank"), Blow("worker"), Blow("group")]
EVERYWHERE += [Blow("rank", "write"), Blow("rank", "start")]
LONG = {
    1: [*EVERYWHERE, Blow("rank", "write"), Blow("group", "write")],
    2: [*EVERYWHERE, Blow("torchrun"), Blow("group", "write")],
    3: [*EVERYWHERE, Blow("torchrun"), Blow("torchrun", "write"), Blow("group", "write")],
}


class Harm:
    """One experiment that is killed and started again with the same words."""

    def __init__(
        self, exp: Path, command: list[str], environment: dict[str, str], *, ranks: int, seed: int
    ) -> None:
        self.exp, self.command, self.environment = exp, command, environment
        self.ranks, self.random = ranks, random.Random(seed)
        self.log = exp.parent / f"{exp.name}.log"  # of the run that is on

    def start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, *self.command]
        with self.log.open("wb") as log:
            return subprocess.Popen(
                words, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def strike(self, blow: Blow, at_step: int) -> Fate:
        """Start the run, kill someone of it at a step (or before), and wait until all are gone."""
        before = step_of(self.exp)
        run = self.start()
        try:
            if blow.when == "start":
                time.sleep(self.random.uniform(0.5, START_SECONDS[self.ranks]))
                self.kill(blow, run)
            else:
                self.wait_for(run, lambda: step_of(self.exp) >= max(at_step, before + 1))
                if blow.when == "write":
                    self.kill_in_write(blow, run)
                else:
                    time.sleep(self.random.uniform(0, STEP_SECONDS))
                    self.kill(blow, run)
            seconds = wait_until_gone(self.exp, seconds=END_SECONDS)
            assert run.wait() != 0, "the training ended before it was killed"
        finally:
            end_all(self.exp)
            run.wait()
        is_further = step_of(self.exp) > before
        lost = step_of(self.exp) - newest_step(self.exp) if is_further else 0
        return Fate(blow, max(0, lost), seconds)

    def finish(self) -> str:
        """Let the run go to its end; what it said."""
        run = self.start()
        try:
            assert run.wait(timeout=200) == 0, self.log.read_text()
        finally:
            end_all(self.exp)
        return self.log.read_text()

    def kill(self, blow: Blow, run: subprocess.Popen[bytes]) -> None:
        for pid in self.victims(blow, crew_of(self.exp), run):
            os.kill(pid, signal.SIGKILL)

    def victims(self, blow: Blow, crew: Crew, run: subprocess.Popen[bytes]) -> list[int]:
        """In the first moments there is no rank yet: then it is who was started."""
        if blow.who == "group":
            return [*filter(None, [crew.launcher]), *crew.ranks.values(), *crew.workers]
        chosen = {"torchrun": [crew.launcher or run.pid], "worker": crew.workers}.get(blow.who)
        if blow.who == "rank":
            writer = [crew.ranks[0]] if blow.when == "write" else list(crew.ranks.values())
            chosen = writer or [run.pid]
        assert chosen, f"no {blow.who} among {crew}"
        return [self.random.choice(chosen)]

    def kill_in_write(self, blow: Blow, run: subprocess.Popen[bytes]) -> None:
        """Stop rank 0 when an unfinished checkpoint is seen, and kill if it is still there."""
        crew = crew_of(self.exp)
        folder = self.exp / "checkpoints"
        writer = crew.ranks[0]

        def is_caught() -> bool:
            if not is_writing(folder):
                return False
            os.kill(writer, signal.SIGSTOP)
            time.sleep(0.01)
            if is_writing(folder):
                return True
            os.kill(writer, signal.SIGCONT)
            return False

        self.wait_for(run, is_caught, pause=0.0)
        for pid in self.victims(blow, crew, run):
            os.kill(pid, signal.SIGKILL)
        assert is_writing(folder)

    def wait_for(
        self, run: subprocess.Popen[bytes], is_true: Callable[[], bool], pause: float = 0.005
    ) -> None:
        deadline = time.monotonic() + 100
        while not is_true():
            assert run.poll() is None, f"ended too early:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(pause)


def is_writing(folder: Path) -> bool:
    return any(folder.glob(".step_*"))


def checkpoints_of(exp: Path) -> list[Path]:
    return sorted((exp / "checkpoints").glob("step_*"))


def newest_step(exp: Path) -> int:
    return max(map(step_in, checkpoints_of(exp)), default=0)


def step_in(checkpoint: Path) -> int:
    return int(checkpoint.name.split("_")[1])


def truncate_newest(exp: Path) -> tuple[Path, Path]:
    """Cut the largest file of the newest checkpoint in half; that one and the one before."""
    *_, before, newest = checkpoints_of(exp)
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return newest, before


def left_by(exp: Path) -> tuple[list[str], list[dict[str, float | str]]]:
    """What must not depend on kills: the weights, and the rows but for what is of time."""
    names = ("embedder", "head")
    files = [(exp / "model" / f"{name}.safetensors").read_bytes() for name in names]
    kept = [{k: v for k, v in row.items() if k not in OF_TIME} for row in rows(exp)]
    return [hashlib.sha256(data).hexdigest() for data in files], kept


def moments(count: int, num_steps: int, chance: random.Random) -> Iterator[int]:
    """Steps to kill at, spread over the run."""
    for number in range(count):
        yield round((number + chance.random()) * (num_steps - 4) / count) + 1


@pytest.fixture
def harm(tmp_path, train_command, environment) -> Callable[..., Harm]:
    """harm("cut", ranks=2, num_steps=16) -> an experiment of that name to be harmed."""

    def make(name: str, *, ranks: int, num_steps: int) -> Harm:
        settings = [*SETTINGS, f"training.num_epochs={num_steps // STEPS_PER_EPOCH}"]
        command = train_command(tmp_path / name, ranks, *settings)
        return Harm(tmp_path / name, command, environment, ranks=ranks, seed=ranks)

    return make


@pytest.mark.slow
def test_a_few_kills_and_a_truncated_checkpoint(harm):
    whole, cut = (harm(name, ranks=1, num_steps=16) for name in ("whole", "cut"))
    beside = whole.start()
    blows = [Blow("rank"), Blow("rank", "start"), Blow("worker"), Blow("rank", "write")]
    for blow, step in zip(blows, (3, 0, 6, 9)):
        cut.strike(blow, step)
    newest, before = truncate_newest(cut.exp)
    said = cut.finish()
    assert re.search(rf"{re.escape(str(newest))}\S*: is damaged.*; trying the one before", said)
    assert f"resuming from step {step_in(before)} of 16" in said
    assert beside.wait() == 0, whole.log.read_text()
    assert_equal(cut, whole, num_steps=16)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_25_kills_in_all(ranks, harm, capsys):
    whole, cut = (harm(name, ranks=ranks, num_steps=96) for name in ("whole", "cut"))
    whole.finish()
    started_at = time.monotonic()
    blows = cut.random.sample(LONG[ranks], k=len(LONG[ranks]))
    steps = moments(len(blows), 96, cut.random)
    fates = [cut.strike(blow, step) for blow, step in zip(blows, steps)]
    assert re.search(r"resuming from step [1-9]", cut.finish())
    assert_equal(cut, whole, num_steps=96)
    with capsys.disabled():
        print(figures(ranks, fates, time.monotonic() - started_at))


def assert_equal(cut: Harm, whole: Harm, *, num_steps: int) -> None:
    """The same weights and the same rows, each step once and in order, in TensorBoard too."""
    assert left_by(cut.exp) == left_by(whole.exp)
    trained = [row["step"] for row in rows(cut.exp) if row["kind"] == "train"]
    assert trained == list(range(1, num_steps + 1))
    events = EventAccumulator(str(cut.exp / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == trained


def figures(ranks: int, fates: list[Fate], seconds: float) -> str:
    """A line for the whole and one for each kind of kill."""
    lost = sum(fate.steps_lost for fate in fates)
    lines = [f"\n{ranks} ranks: {len(fates)} kills, {lost} steps lost, {seconds:.0f} s in all"]
    for blow, count in Counter(fate.blow for fate in fates).items():
        ended = max(fate.seconds_to_end for fate in fates if fate.blow == blow)
        again = sum(fate.steps_lost for fate in fates if fate.blow == blow)
        text = f"{count} x {blow.who} in a {blow.when}"
        lines.append(f"  {text:24}{again:3} steps lost, all gone after {ended:.1f} s at most")
    return "\n".join(lines)
