"""The launcher names the rank that ended a run, hands its code on, and passes signals on."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import wait_for
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from speakerlab.bin import launch

RANKS = """
import os, signal, sys, time
rank, got = int(os.environ["RANK"]), []
for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), lambda number, frame: got.append(number))
os.write(1, b"ready %d\\n" % os.getpid())  # in one piece, beside the other rank
{what}
"""
RANK_1_DIES = """
if rank == 1:
    {death}
while {patience} or not got:
    time.sleep(0.05)
os._exit(0)
"""
SAVES = """
while not got:
    time.sleep(0.05)
time.sleep(1)
open(os.environ["SAVED"] + str(rank), "w").write(str(len(got)))
os._exit(128 + got[0])
"""
STANDALONE = ["-m", "speakerlab", "launch", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def launch_ranks(run, tmp_path):
    """launch_ranks(what they do, code) -> (the last line that the launcher wrote, seconds)."""

    def launch_them(what: str, code: int) -> tuple[str, float]:
        script, began = tmp_path / "ranks.py", time.monotonic()
        script.write_text(RANKS.format(what=what))
        text = run(*STANDALONE, script, code=code).stderr
        return text.splitlines()[-1], time.monotonic() - began

    return launch_them


@pytest.mark.parametrize(
    ("death", "code", "value"),
    [("os.kill(os.getpid(), 7)", 135, "SIGBUS"), ("os._exit(3)", 3, "exit code 3")],
)
def test_the_rank_that_died_first_is_named(launch_ranks, death, code, value):
    line, _ = launch_ranks(RANK_1_DIES.format(death=death, patience=False), code)
    assert line.startswith("rank 1 on ") and value in line


@pytest.mark.slow
def test_ranks_that_ignore_signals_are_killed_soon_after_one_died(launch_ranks):
    line, seconds = launch_ranks(
        RANK_1_DIES.format(death="os.kill(os.getpid(), 9)", patience=True), 137
    )
    assert seconds < 25  # 10 of them patience; torchrun's own is 30
    assert "out-of-memory" in line and line.endswith(launch.RESUME)


def test_a_signal_reaches_the_ranks_and_a_second_does_not_cut_saving_short(environment, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(what=SAVES))
    process = subprocess.Popen(
        [sys.executable, *STANDALONE, script],
        env={**environment, "SAVED": str(tmp_path / "saved")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline().startswith("ready")
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.2)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1
    assert errors.splitlines()[-1] == f"stopped by SIGUSR1; {launch.RESUME}"
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


@pytest.mark.parametrize("words", [STANDALONE, ["-m", "speakerlab", "train"]])
def test_a_ctrl_c_while_torch_is_imported_is_one_line(environment, words, tmp_path):
    more = (
        [tmp_path / "never_run.py"]
        if words is STANDALONE
        else ["--exp", "x", "--config", "eres2net"]
    )
    command = [sys.executable, *words, *more]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE)
    maps = Path(f"/proc/{process.pid}/maps")
    wait_for(lambda: "libtorch" in maps.read_text())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGINT, b"stopped by Ctrl-C\n")


def test_a_host_that_finds_no_other_says_so(run, tmp_path):
    where = ["--rdzv-endpoint", "127.0.0.1:1", "--rdzv-conf", "is_host=0,timeout=1,read_timeout=1"]
    more = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", *where]
    text = run("-m", "speakerlab", "launch", *more, tmp_path / "never_run.py", code=6).stderr
    last = text.splitlines()[-1]
    assert "other hosts" in last and "--rdzv" in last


def failure(code: int, local_rank: int = 0) -> ProcessFailure:
    return ProcessFailure(local_rank, pid=42, exitcode=code, error_file="")


@pytest.mark.parametrize(
    ("code", "values"),
    [
        (-9, ["SIGKILL", "process 42", "out-of-memory", launch.RESUME]),
        (-7, ["SIGBUS", "/dev/shm", "--shm-size=2g", launch.RESUME]),
        (-11, ["SIGSEGV", launch.RESUME]),
        (-6, ["SIGABRT", launch.RESUME]),
        (1, ["exit code 1", "several hosts"]),
        (3, ["exit code 3", "nan_report.json", "training.lr"]),
        (4, ["exit code 4", "training.lr"]),
        (5, ["exit code 5", "out of memory", "runtime.micro_batch"]),
        (6, ["exit code 6", "another rank"]),
        (9, ["exit code 9", launch.RESUME]),
        (143, ["stopped by SIGTERM", launch.RESUME]),
        (138, ["stopped by SIGUSR1", launch.RESUME]),
    ],
)
def test_every_end_has_its_remedy(code, values):
    line = launch.verdict(3, failure(code))
    assert all(value in line for value in values), line
    assert line.startswith("stopped" if code > 128 else "rank 3 on ")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("codes", "stopped", "rank"),
    [
        ([-15, -9, -15], {0, 2}, 1),  # the launcher ended the others
        ([1, -9, 1], set(), 1),  # they ended by themselves
        ([6, 6, 3], set(), 2),
        ([-9, 3], {0}, 1),
        ([1, 1], set(), 0),
    ],
)
def test_the_cause_is_named_not_its_consequences(monkeypatch, codes, stopped, rank):
    monkeypatch.setattr(
        launch.Ranks, "first", {i: code for i, code in enumerate(codes) if i not in stopped}
    )
    failures = {10 + i: failure(code, i) for i, code in enumerate(codes)}
    assert launch.first_failure(failures) == 10 + rank
