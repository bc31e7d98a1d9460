"""kill -9 in every place, through run.sh: nobody outlives it, and the next stage 3 goes on."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Processes = dict[int, str]  # process id -> command line


def processes_of(exp: Path) -> Processes:
    """All that mention the experiment: run.sh, torchrun, ranks and their loader workers."""
    found: Processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (folder / "stat").read_text().rpartition(") ")[2][0]
        except (OSError, UnicodeDecodeError):
            continue
        if str(exp) in line and state != "Z":
            found[int(folder.name)] = line
    return found


def pick(processes: Processes, pattern: str) -> int:
    """The oldest process whose command line matches."""
    return min(pid for pid, line in processes.items() if re.search(pattern, line))


RANK, TORCHRUN, SHELL = r"-m speakerlab\.bin\.train", r"speakerlab\.bin\.launch", r"run\.sh"
PLAIN_RANK = r"python\S* -u -m speakerlab\.bin\.train"


def kill_torchrun(processes: Processes, shell: int) -> None:
    os.kill(pick(processes, TORCHRUN), signal.SIGKILL)


def kill_group(processes: Processes, shell: int) -> None:
    os.killpg(os.getpgid(pick(processes, TORCHRUN)), signal.SIGKILL)


def kill_one_rank(processes: Processes, shell: int) -> None:
    os.kill(pick(processes, PLAIN_RANK), signal.SIGKILL)


def kill_shell(processes: Processes, shell: int) -> None:
    os.kill(shell, signal.SIGKILL)


def newest(checkpoints: Path) -> str:
    return max((path.name for path in checkpoints.glob("step_*")), default="none")


@pytest.fixture(scope="module")
def exp(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("killed") / "exp"


@pytest.fixture(scope="module")
def words(data, settings, tmp_path_factory, exp) -> list[str]:
    """stage 3 of egs/mini on the tiny corpus, for so long that only a kill ends it."""
    copy = tmp_path_factory.mktemp("data") / "data"
    shutil.copytree(data, copy)
    for marker in (".stage1", ".stage2"):
        (copy / marker).touch()
    values = [value for value in settings[3:] if not value.startswith("data.dir=")]
    return [
        *("bash", str(ROOT / "egs" / "mini" / "run.sh"), "--stage", "3", "--stop-stage", "3"),
        *("--model", "campplus_tiny", "--data", str(copy), "--exp", str(exp), "--nproc", "2"),
        *("--set", *values, "training.num_epochs=4000"),
    ]


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


@pytest.mark.parametrize("kill", [kill_torchrun, kill_group, kill_one_rank, kill_shell])
def test_nobody_outlives_a_kill(
    kill: Callable[[Processes, int], None],
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
        processes = processes_of(exp)
        assert sum(bool(re.search(PLAIN_RANK, line)) for line in processes.values()) >= 2
        kill(processes, run.pid)
        deadline = time.monotonic() + 5
        while alive := processes_of(exp):
            assert time.monotonic() < deadline, f"still alive after 5 s: {alive}"
            time.sleep(0.05)
    finally:
        for pid in processes_of(exp):
            os.kill(pid, signal.SIGKILL)
        run.wait()
