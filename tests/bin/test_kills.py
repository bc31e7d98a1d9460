"""Trainings killed in every place and at any moment: all end, and resume bit-identically.

What is killed is what users start: run.sh, torchrun, ranks, loader workers.
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

import pytest
import torch
from processes import Crew, crew_of, end_all, wait_for, wait_until_gone
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import checkpoints, copy_data, losses, rows, stage_3, weights

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
    """Who is killed (rank, torchrun, worker, or group: all there are) and when."""

    who: str
    when: str = "step"  # or "write", of a checkpoint, or "start", before the first step


EVERYWHERE = [Blow("rank"), Blow("rank"), Blow("worker"), Blow("group")]
EVERYWHERE += [Blow("rank", "write"), Blow("rank", "start")]
LONG = {
    1: [*EVERYWHERE, Blow("rank", "write"), Blow("group", "write")],
    2: [*EVERYWHERE, Blow("torchrun"), Blow("group", "write")],
    3: [*EVERYWHERE, Blow("torchrun"), Blow("torchrun", "write"), Blow("group", "write")],
}


def newest_step(exp: Path) -> int:
    return max((int(path.name.split("_")[1]) for path in checkpoints(exp)), default=0)


def last_step(exp: Path) -> int:
    return max(losses(exp), default=0)


def is_writing(exp: Path) -> bool:
    return any((exp / "checkpoints").glob(".step_*"))


class Harm:
    """One experiment that is killed and started again by the same command."""

    def __init__(
        self, exp: Path, command: list[str], environment: dict[str, str], *, ranks: int
    ) -> None:
        self.exp, self.command, self.environment = exp, command, environment
        self.ranks, self.random = ranks, random.Random(ranks)
        self.log = exp.parent / f"{exp.name}.log"  # of the present run

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(
                self.command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def strike(self, blow: Blow, at_step: int) -> None:
        """Start the run, kill someone at a step (or before), and wait until all are gone."""
        before = last_step(self.exp)
        run = self.start()
        try:
            if blow.when == "start":
                time.sleep(self.random.uniform(0.5, START_SECONDS[self.ranks]))
                self.kill(blow, run)
            else:
                self.wait_for(run, lambda: last_step(self.exp) >= max(at_step, before + 1))
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
        for pid in self.victims(blow, crew_of(self.exp), run):
            os.kill(pid, signal.SIGKILL)

    def victims(self, blow: Blow, crew: Crew, run: subprocess.Popen[bytes]) -> list[int]:
        """Whom to kill; before there is a rank, what was started."""
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
        writer = crew.ranks[0]

        def is_caught() -> bool:
            if not is_writing(self.exp):
                return False
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
        self, run: subprocess.Popen[bytes], is_true: Callable[[], bool], pause: float = 0.005
    ) -> None:
        wait_for(lambda: is_true() or run.poll() is not None, seconds=100, pause=pause)
        assert run.poll() is None, f"ended too early:\n{self.log.read_text()}"


def truncate_newest(exp: Path) -> tuple[Path, Path]:
    """Halve the largest file of the newest checkpoint; return that one and the one before."""
    *_, before, newest = checkpoints(exp)
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return newest, before


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
        return Harm(tmp_path / name, command, environment, ranks=ranks)

    return make


def assert_equal(cut: Harm, whole: Harm, *, num_steps: int) -> None:
    """Check for the same weights and rows, each step once and in order, in TensorBoard too."""
    assert weights(cut.exp) == weights(whole.exp)
    ours, theirs = (
        [{k: v for k, v in row.items() if k not in OF_TIME} for row in rows(harm.exp)]
        for harm in (cut, whole)
    )
    assert ours == theirs
    events = EventAccumulator(str(cut.exp / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == list(losses(cut.exp)) == list(range(1, num_steps + 1))


@pytest.mark.slow
@pytest.mark.timeout(900)  # up to eleven runs of several processes, on a busy machine
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_25_kills_in_all_and_a_truncated_checkpoint(ranks, harm):
    whole, cut = (harm(name, ranks=ranks, num_steps=96) for name in ("whole", "cut"))
    whole.finish()
    blows = cut.random.sample(LONG[ranks], k=len(LONG[ranks]))
    for blow, step in zip(blows, moments(len(blows), 96, cut.random)):
        cut.strike(blow, step)
    newest, before = truncate_newest(cut.exp)
    text = cut.finish()
    assert re.search(rf"{re.escape(str(newest))}\S*: ", text)
    assert f"resuming from step {int(before.name.split('_')[1])} of 96" in text
    assert_equal(cut, whole, num_steps=96)


@pytest.mark.slow
def test_a_killed_training_resumes_bit_identically(harm):
    whole, cut = (harm(name, ranks=1, num_steps=16) for name in ("whole", "cut"))
    whole.finish()
    for blow, step in ((Blow("rank"), 3), (Blow("rank", "write"), 9)):
        cut.strike(blow, step)
    assert "resuming from step" in cut.finish()
    assert_equal(cut, whole, num_steps=16)


@pytest.fixture(scope="module")
def killed(tmp_path_factory, data, settings) -> tuple[Path, list[str]]:
    """(experiment, stage 3 of egs/mini on it) for so long that only a kill ends it."""
    root = tmp_path_factory.mktemp("killed")
    copy = copy_data(data, root / "data")
    more = ("--nproc", "2", "training.num_epochs=4000")
    return root / "exp", stage_3(copy, root / "exp", settings, *more)


@pytest.mark.parametrize(
    "who",
    [
        "torchrun",
        *(pytest.param(who, marks=pytest.mark.slow) for who in ("group", "rank", "shell")),
    ],
)
def test_no_process_of_a_recipe_outlives_a_kill(who, killed, environment, tmp_path):
    exp, words = killed
    before, log = newest_step(exp), tmp_path / "log"
    with log.open("wb") as file:
        run = subprocess.Popen(
            words, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        # Past the next checkpoint, with ranks in the middle of their work.
        wait_for(lambda: newest_step(exp) > before and len(crew_of(exp).ranks) == 2, seconds=100)
        assert not before or f"resuming from step {before}" in log.read_text()
        crew = crew_of(exp)
        assert crew.launcher is not None
        kill = {
            "torchrun": partial(os.kill, crew.launcher),
            "group": partial(os.killpg, os.getpgid(crew.launcher)),
            "rank": partial(os.kill, crew.ranks[0]),
            "shell": partial(os.kill, run.pid),
        }
        kill[who](signal.SIGKILL)
        wait_until_gone(exp, seconds=5)
    finally:
        end_all(exp)
        run.wait()
