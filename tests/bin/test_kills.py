"""Trainings killed in every place and at any moment: all end, and resume bit-identically.

What is killed is what users start: run.sh, the launcher, ranks, loader workers.
"""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Crew, crew_of, end_all, wait_for, wait_until_gone
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import checkpoints, copy_data, losses, rows, slow, stage_3, weights

from speakerlab.training.checkpoint import read_step

# Columns of metrics.jsonl that depend on the time and on the machine.
OF_TIME = {"crops_per_second", "data_wait", "gpu_memory_mb"}
STEPS_PER_EPOCH = 4
SETTINGS = [
    "training.global_batch=12",  # for 1, 2 and 3 ranks
    "training.checkpoint_every_steps=2",
    "training.valid_every_epochs=2",
    f"runtime.deterministic={str(torch.cuda.is_available()).lower()}",
]
END_SECONDS = 60  # a dead rank has ended the run by then
START_SECONDS = {1: 4.0, 2: 6.0, 3: 9.0}  # about what a run needs to its first step
STEP_SECONDS = 0.1


@dataclass(frozen=True)
class Blow:
    """Who is killed (rank, launcher, worker, or group: all there are) and when."""

    who: str
    when: str = "step"  # or "write", of a checkpoint, or "start", before the first step


EVERYWHERE = [
    Blow("rank"),
    Blow("rank"),
    Blow("worker"),
    Blow("group"),
    Blow("rank", "write"),
    Blow("rank", "start"),
]
# Number of ranks -> blows of the long test: 25 in all.
LONG = {
    1: [*EVERYWHERE, Blow("rank", "write"), Blow("group", "write")],
    2: [*EVERYWHERE, Blow("launcher"), Blow("group", "write")],
    3: [
        *EVERYWHERE,
        Blow("launcher"),
        Blow("launcher", "write"),
        Blow("group", "write"),
    ],
}


def newest_step(exp: Path) -> int:
    steps = [read_step(folder) for folder in checkpoints(exp)]
    return max(steps, default=0)


def last_step(exp: Path) -> int:
    return max(losses(exp), default=0)


def is_writing(exp: Path) -> bool:
    return any((exp / "checkpoints").glob(".step_*"))


class Harm:
    """One experiment that is killed and started again by the same command."""

    def __init__(
        self, exp: Path, command: list[str], environment: dict[str, str], *, ranks: int
    ) -> None:
        self.exp = exp
        self.command = command
        self.environment = environment
        self.ranks = ranks
        self.random = random.Random(ranks)
        self.log = exp.parent / f"{exp.name}.log"  # of the present run

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(
                self.command,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def strike(self, blow: Blow, at_step: int) -> None:
        """Start the run, kill someone at a step (or before), and wait until all are gone."""
        # A run that was killed before must first do a new step.
        target = max(at_step, last_step(self.exp) + 1)
        run = self.start()
        try:
            if blow.when == "start":
                pause = self.random.uniform(0.5, START_SECONDS[self.ranks])
                time.sleep(pause)
                self.kill(blow, run)
            else:
                self.wait_for(run, lambda: last_step(self.exp) >= target)
                if blow.when == "write":
                    self.kill_in_write(blow, run)
                else:
                    time.sleep(self.random.uniform(0, STEP_SECONDS))
                    self.kill(blow, run)
            wait_until_gone(self.exp, seconds=END_SECONDS)
            assert run.wait() != 0, "the training ended before it was killed"
        finally:
            end_all(self.exp)
            run.wait()

    def finish(self) -> str:
        """Let the run end by itself; return what it wrote."""
        run = self.start()
        try:
            assert run.wait(timeout=200) == 0, self.log.read_text()
        finally:
            end_all(self.exp)
        return self.log.read_text()

    def kill(self, blow: Blow, run: subprocess.Popen[bytes]) -> None:
        crew = crew_of(self.exp)
        for pid in self.victims(blow, crew, run):
            os.kill(pid, signal.SIGKILL)

    def victims(
        self, blow: Blow, crew: Crew, run: subprocess.Popen[bytes]
    ) -> list[int]:
        """Whom to kill; before there is a rank, what was started."""
        if blow.who == "group":
            launchers = [] if crew.launcher is None else [crew.launcher]
            return [*launchers, *crew.ranks.values(), *crew.workers]
        if blow.who == "launcher":
            candidates = [crew.launcher or run.pid]
        elif blow.who == "worker":
            candidates = crew.workers
        elif blow.when == "write":
            # Rank 0 writes the checkpoints.
            candidates = [crew.ranks[0]]
        else:
            candidates = list(crew.ranks.values()) or [run.pid]
        assert candidates, f"no {blow.who} among {crew}"
        return [self.random.choice(candidates)]

    def kill_in_write(self, blow: Blow, run: subprocess.Popen[bytes]) -> None:
        """Stop rank 0 when an unfinished checkpoint is seen, and kill if it is still there."""
        crew = crew_of(self.exp)
        writer = crew.ranks[0]

        def is_caught() -> bool:
            if not is_writing(self.exp):
                return False
            # The checkpoint may have been finished before the signal arrived.
            os.kill(writer, signal.SIGSTOP)
            time.sleep(0.01)
            if is_writing(self.exp):
                return True
            os.kill(writer, signal.SIGCONT)
            return False

        self.wait_for(run, is_caught, pause=0.0)
        for pid in self.victims(blow, crew, run):
            os.kill(pid, signal.SIGKILL)
        assert is_writing(self.exp)

    def wait_for(
        self,
        run: subprocess.Popen[bytes],
        is_true: Callable[[], bool],
        pause: float = 0.005,
    ) -> None:
        def has_ended() -> bool:
            return run.poll() is not None

        wait_for(lambda: is_true() or has_ended(), seconds=100, pause=pause)
        assert run.poll() is None, f"ended too early:\n{self.log.read_text()}"


def truncate_newest(exp: Path) -> tuple[Path, Path]:
    """Halve the largest file of the newest checkpoint; return that one and the one before."""
    *_, before, newest = checkpoints(exp)
    sizes = {path: path.stat().st_size for path in newest.iterdir()}
    largest = max(sizes, key=sizes.__getitem__)
    os.truncate(largest, sizes[largest] // 2)
    return newest, before


def moments(count: int, num_steps: int, chance: random.Random) -> Iterator[int]:
    """Steps to kill at, spread over the run."""
    for number in range(count):
        # Somewhere in one of `count` equal parts, and never in the last steps.
        position = (number + chance.random()) * (num_steps - 4) / count
        yield round(position) + 1


@pytest.fixture
def harm(tmp_path, train_command, environment) -> Callable[..., Harm]:
    """harm("cut", ranks=2, num_steps=16) -> an experiment of that name to be harmed."""

    def make(name: str, *, ranks: int, num_steps: int) -> Harm:
        exp = tmp_path / name
        num_epochs = num_steps // STEPS_PER_EPOCH
        settings = [*SETTINGS, f"training.num_epochs={num_epochs}"]
        command = train_command(exp, ranks, *settings)
        return Harm(exp, command, environment, ranks=ranks)

    return make


def rows_without_time(exp: Path) -> list[dict[str, Any]]:
    all_rows = rows(exp)
    for row in all_rows:
        for name in OF_TIME & row.keys():
            del row[name]
    return all_rows


def assert_equal(cut: Harm, whole: Harm, *, num_steps: int) -> None:
    """Check for the same weights and rows, each step once and in order, in TensorBoard too."""
    expected = weights(whole.exp)
    assert weights(cut.exp) == expected
    expected = rows_without_time(whole.exp)
    assert rows_without_time(cut.exp) == expected

    # A size of 0 keeps all events.
    folder = str(cut.exp / "tensorboard")
    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == list(range(1, num_steps + 1))
    assert list(losses(cut.exp)) == steps


@pytest.mark.slow
@pytest.mark.timeout(900)  # up to eleven runs of several processes, on a busy machine
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_25_kills_in_all_and_a_truncated_checkpoint(ranks, harm):
    whole = harm("whole", ranks=ranks, num_steps=96)
    cut = harm("cut", ranks=ranks, num_steps=96)
    whole.finish()
    num_blows = len(LONG[ranks])
    blows = cut.random.sample(LONG[ranks], k=num_blows)
    steps = moments(num_blows, 96, cut.random)
    for blow, step in zip(blows, steps):
        cut.strike(blow, step)

    newest, before = truncate_newest(cut.exp)
    text = cut.finish()
    assert re.search(rf"{re.escape(str(newest))}\S*: ", text)
    step = read_step(before)
    assert f"resuming from step {step} of 96" in text
    assert_equal(cut, whole, num_steps=96)


@pytest.mark.slow
def test_a_killed_training_resumes_bit_identically(harm):
    whole = harm("whole", ranks=1, num_steps=16)
    cut = harm("cut", ranks=1, num_steps=16)
    whole.finish()
    cut.strike(Blow("rank"), 3)
    cut.strike(Blow("rank", "write"), 9)
    assert "resuming from step" in cut.finish()
    assert_equal(cut, whole, num_steps=16)


@pytest.fixture(scope="module")
def killed(tmp_path_factory, data, settings) -> tuple[Path, list[str]]:
    """(experiment, stage 3 of egs/mini on it) for so long that only a kill ends it."""
    root = tmp_path_factory.mktemp("killed")
    copy = copy_data(data, root / "data")
    overrides = ("--nproc", "2", "training.num_epochs=4000")
    exp = root / "exp"
    return exp, stage_3(copy, exp, settings, *overrides)


VICTIMS = [
    "launcher",
    slow("group"),
    slow("rank"),
    slow("shell"),
]


@pytest.mark.parametrize("who", VICTIMS)
def test_no_process_of_a_recipe_outlives_a_kill(who, killed, environment, tmp_path):
    exp, arguments = killed
    before = newest_step(exp)
    log = tmp_path / "log"
    with log.open("wb") as file:
        run = subprocess.Popen(
            arguments,
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )

    def is_in_the_middle() -> bool:
        # Past the next checkpoint, with ranks in the middle of their work.
        has_new_checkpoint = newest_step(exp) > before
        return has_new_checkpoint and len(crew_of(exp).ranks) == 2

    try:
        wait_for(is_in_the_middle, seconds=100)
        assert not before or f"resuming from step {before}" in log.read_text()
        crew = crew_of(exp)
        assert crew.launcher is not None
        kill = {
            "launcher": partial(os.kill, crew.launcher),
            "group": partial(os.killpg, os.getpgid(crew.launcher)),
            "rank": partial(os.kill, crew.ranks[0]),
            "shell": partial(os.kill, run.pid),
        }
        kill[who](signal.SIGKILL)
        wait_until_gone(exp, seconds=5)
    finally:
        end_all(exp)
        run.wait()
