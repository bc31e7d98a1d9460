"""Several run.sh at once on the same folders: each finishes right, or one refuses in one line."""

import os
import signal
import subprocess
import time
from pathlib import Path
from shlex import quote

import pytest
from toy_recipe import Toy

WAITING = "{}: another run.sh prepares it; waiting for its end"
TO_STAGE_2 = "--stop-stage 2"


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path / 'a "b" #c ü')


class Crowd:
    """Runs of run.sh in the background; they write to files, and share the recorded commands."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self.gate = toy, toy.root / "gate"
        self.runs: list[subprocess.Popen[bytes]] = []
        toy.calls.write_text("")

    def start(self, options: str, **variables: str) -> None:
        """Start another run; stage 1 waits until the gate is there."""
        with (self.toy.root / f"log{len(self.runs)}").open("wb") as log:
            words = self.toy.words(options)
            environment = self.toy.variables(GATE=str(self.gate), **variables)
            how = {"env": environment, "stdout": log, "stderr": log, "start_new_session": True}
            self.runs.append(subprocess.Popen(words, **how))

    def log(self, number: int) -> str:
        return (self.toy.root / f"log{number}").read_text()

    def wait_for(self, number: int, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.log(number):
            assert time.monotonic() < deadline, self.log(number)
            time.sleep(0.05)

    def end(self) -> list[int]:
        """Open the gate; return the exit codes."""
        self.gate.touch()
        return [run.wait(60) for run in self.runs]

    def count(self, word: str) -> int:
        return sum(word in " ".join(call[2:]) for call in self.toy.recorded())


@pytest.fixture
def crowd(toy: Toy):
    crowd = Crowd(toy)
    yield crowd
    for run in crowd.runs:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def test_runs_that_start_together_prepare_and_pack_once(crowd: Crowd) -> None:
    waiting = WAITING.format(crowd.toy.data)
    crowd.start(TO_STAGE_2)
    crowd.wait_for(0, "stage 1: data directories")
    crowd.start(TO_STAGE_2)
    crowd.start(f"{TO_STAGE_2} --seed 1")
    for number in (1, 2):
        crowd.wait_for(number, waiting)
    assert crowd.end() == [0, 0, 0]
    assert "skipped" not in crowd.log(0).partition("stage 1")[2]
    for number in (1, 2):
        assert "stage 1: skipped, done with" in crowd.log(number)
        assert "stage 2: skipped, done with" in crowd.log(number)
    counts = [crowd.count(word) for word in ("prepare.py --data", " pack ", " check ")]
    assert counts == [1, 1, 2]


def test_another_corpus_waits_and_then_replaces_the_data(crowd: Crowd) -> None:
    crowd.start(f"{TO_STAGE_2} --corpus=/tmp --noise none --rirs none")
    crowd.wait_for(0, "stage 1: data directories")
    crowd.start(f"{TO_STAGE_2} --corpus=/usr --noise none --rirs none")
    crowd.wait_for(1, WAITING.format(crowd.toy.data))
    assert crowd.end() == [0, 0]
    kinds = [call[2].rpartition("/")[2] for call in crowd.toy.recorded()]
    with_corpus = [call for call in crowd.toy.recorded() if "--corpus" in call]
    corpora = [call[call.index("--corpus") + 1] for call in with_corpus]
    assert corpora == ["/tmp", "/usr"]
    assert kinds == ["prepare.py", "-m", "-m", "-m"] * 2, "neither began before the other's end"


def test_a_killed_run_lets_the_next_one_go_on(crowd: Crowd) -> None:
    crowd.start(TO_STAGE_2)
    crowd.wait_for(0, "stage 1: data directories")
    crowd.start(TO_STAGE_2)
    crowd.wait_for(1, WAITING.format(crowd.toy.data))
    os.killpg(crowd.runs[0].pid, signal.SIGKILL)
    assert crowd.end() == [-signal.SIGKILL, 0]
    assert "stage 2: took" in crowd.log(1)


def test_jobs_of_stage_2_do_not_wait_for_each_other_but_for_stage_1(crowd: Crowd) -> None:
    assert crowd.toy.run("--stop-stage 1").returncode == 0
    lock = crowd.toy.data / ".lock"
    script = "exec 9<>\"$1\"; python3 -c 'import fcntl; fcntl.flock(9, fcntl.{})'; echo; sleep 60"
    for kind, is_waiting in (("LOCK_SH", False), ("LOCK_EX", True)):
        words = ["bash", "-c", script.format(kind), "bash", str(lock)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as holder:
            assert holder.stdout is not None and holder.stdout.readline() == b"\n"
            crowd.start(f"--stage 2 {TO_STAGE_2} --job 1/2")
            if is_waiting:
                crowd.wait_for(1, WAITING.format(crowd.toy.data))
                assert crowd.count("--job") == 1
            else:
                assert crowd.runs[0].wait(60) == 0
            os.killpg(holder.pid, signal.SIGKILL)
    assert crowd.runs[1].wait(60) == 0
    assert crowd.count("--job") == 2


def test_data_that_another_user_has_prepared_need_no_lock(toy: Toy) -> None:
    assert toy.run(TO_STAGE_2).returncode == 0
    (toy.data / ".lock").unlink()
    (toy.data / ".lock").mkdir()  # opening it fails as without permission
    done = toy.run(TO_STAGE_2)
    assert done.returncode == 0 and "stage 2: skipped" in done.stdout
    done = toy.run(f"{TO_STAGE_2} --codec flac")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith(f"{toy.data}: cannot be written; ")


def test_one_environment_is_installed(toy: Toy) -> None:
    """Two runs without .venv: one installs it, the other waits and uses it."""
    venv, good = toy.root / ".venv", quote(f"{toy.path}/good")
    (toy.path / "python3").rename(toy.path / "good")
    fake = f"""#!/usr/bin/env bash
if [[ $1 == -c && $2 == *flock* ]]; then exec {good} "$@"; fi
if [[ $* == *common/options.py* ]]; then exec {good} "$@"; fi
if [[ $* == "-m venv "* ]]; then
  echo venv >>"$CALLS.venv"
  while [[ ! -e {quote(f"{toy.root}/gate")} ]]; do sleep 0.05; done
  mkdir -p "$3/bin" && cp {good} "$3/bin/python" && exit
fi
[[ $1 == -c && $2 != *distributions* ]]
"""
    (toy.path / "python3").write_text(fake)
    (toy.path / "python3").chmod(0o755)
    crowd = Crowd(toy)
    crowd.start("--stop-stage 0")
    crowd.wait_for(0, "env: installing")
    crowd.start("--stop-stage 0")
    crowd.wait_for(1, f"env: another process installs {venv}; waiting for its end")
    assert crowd.end() == [0, 0], crowd.log(0) + crowd.log(1)
    assert Path(f"{toy.calls}.venv").read_text() == "venv\n"
    assert crowd.count("pip install") == 1


@pytest.mark.parametrize("option", ["corpus", "data", "exp"])
@pytest.mark.parametrize("name", ["a\nb", os.fsdecode(b"a\xff"), "\x1b[31m"])
def test_a_path_that_no_table_can_hold_is_refused(toy: Toy, option: str, name: str) -> None:
    words = [*toy.words(TO_STAGE_2), f"--{option}", str(toy.root / name)]
    done = subprocess.run(words, env=toy.variables(), capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"--{option}: ") and "one line of UTF-8" in line
    assert not toy.data.exists()


def test_odd_paths_reach_the_commands_as_they_are(toy: Toy) -> None:
    toy.data, toy.exp = Path("-d 'x' $(touch pwned) [y]{z}"), Path("-e*?;#")
    words = [*toy.words("--stop-stage 3")[:-4], f"--data={toy.data}", f"--exp={toy.exp}"]
    folder = toy.root / "-cwd\\n"
    folder.mkdir()
    environment = {**toy.variables(), "DATA": str(folder / toy.data)}
    toy.calls.write_text("")
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (training,) = [call for call in toy.recorded() if call[4] == "train"]
    assert training[6] == str(folder / toy.exp)
    assert f"data.dir={folder / toy.data}" in training
    assert sorted(path.name for path in folder.iterdir()) == sorted([str(toy.data), str(toy.exp)])
