"""kill -9 in every place, through run.sh: nobody outlives it, and the next stage 3 goes on."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Crew, crew_of, end_all, wait_until_gone
from stage_3 import prepared, stage_3


def kill_torchrun(crew: Crew, shell: int) -> None:
    assert crew.launcher is not None
    os.kill(crew.launcher, signal.SIGKILL)


def kill_group(crew: Crew, shell: int) -> None:
    assert crew.launcher is not None
    os.killpg(os.getpgid(crew.launcher), signal.SIGKILL)


def kill_one_rank(crew: Crew, shell: int) -> None:
    os.kill(crew.ranks[0], signal.SIGKILL)


def kill_shell(crew: Crew, shell: int) -> None:
    os.kill(shell, signal.SIGKILL)


def newest(checkpoints: Path) -> str:
    return max((path.name for path in checkpoints.glob("step_*")), default="none")


@pytest.fixture(scope="module")
def exp(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("killed") / "exp"


@pytest.fixture(scope="module")
def words(data, settings, tmp_path_factory, exp) -> list[str]:
    """stage 3 of egs/mini on the tiny corpus, for so long that only a kill ends it."""
    copy = prepared(data, tmp_path_factory.mktemp("data") / "data")
    return stage_3(copy, exp, settings, "--nproc", "2", "training.num_epochs=4000")


def start(words: list[str], environment: dict[str, str], wanted: str) -> subprocess.Popen[str]:
    """Start a run and wait for a line of its log."""
    run = subprocess.Popen(
        words, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stderr is not None
    seen = ""
    for line in run.stderr:
        seen += line
        if re.search(wanted, line):
            return run
    raise AssertionError(f"no line like {wanted!r} in:\n{seen}")


@pytest.mark.parametrize(
    "kill",
    [
        kill_torchrun,
        pytest.param(kill_group, marks=pytest.mark.slow),
        pytest.param(kill_one_rank, marks=pytest.mark.slow),
        pytest.param(kill_shell, marks=pytest.mark.slow),
    ],
)
def test_nobody_outlives_a_kill(
    kill: Callable[[Crew, int], None],
    words: list[str],
    environment: dict[str, str],
    exp: Path,
) -> None:
    is_first = newest(exp / "checkpoints") == "none"
    run = start(
        words, environment, r"step \d*[02468]/" if is_first else r"resuming from step [1-9]"
    )
    try:
        # Past the next checkpoint, with ranks in the middle of their work.
        checkpoints = exp / "checkpoints"
        before = newest(checkpoints)
        deadline = time.monotonic() + 60
        while newest(checkpoints) == before:
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.02)
        crew = crew_of(exp)
        assert len(crew.ranks) == 2
        kill(crew, run.pid)
        wait_until_gone(exp, seconds=5)
    finally:
        end_all(exp)
        run.wait()
