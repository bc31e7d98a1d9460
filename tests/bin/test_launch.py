"""The launcher names the rank that ended a run, hands its code on, and passes signals on."""

import signal
import subprocess
import sys
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from speakerlab.bin import launch

RESUME = "run the same command again to go on from the last checkpoint"
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
STANDALONE = ["-m", "speakerlab.bin.launch", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("death", "code", "line"),
    [
        ("os.kill(os.getpid(), 7)", 135, "ended the run, got SIGBUS of process "),
        ("os._exit(3)", 3, "ended the run, got exit code 3 of process "),
    ],
)
def test_the_rank_that_died_first_is_named(run, tmp_path, death, code, line):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(what=RANK_1_DIES.format(death=death, patience=False)))
    done = run(*STANDALONE, script)
    assert done.returncode == code
    last = done.stderr.splitlines()[-1]
    assert last.startswith("rank 1 on ") and line in last
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ranks_that_ignore_their_end_are_gone_soon_after_one_was_killed(run, tmp_path):
    script = tmp_path / "ranks.py"
    death = RANK_1_DIES.format(death="os.kill(os.getpid(), 9)", patience=True)
    script.write_text(RANKS.format(what=death))
    began = time.monotonic()
    done = run(*STANDALONE, script)
    assert time.monotonic() - began < 25  # 10 of them patience; torchrun's own is 30
    assert done.returncode == 137
    assert done.stderr.splitlines()[-1].endswith(f"out-of-memory killer, see dmesg; {RESUME}")


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
    assert errors.splitlines()[-1] == f"stopped by SIGUSR1; {RESUME}"
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_a_host_that_finds_nobody_says_so(run, tmp_path):
    where = ["--rdzv-endpoint", "127.0.0.1:1", "--rdzv-conf", "is_host=0,timeout=1,read_timeout=1"]
    more = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", *where]
    done = run("-m", "speakerlab.bin.launch", *more, tmp_path / "never_run.py")
    assert done.returncode == 6
    last = done.stderr.splitlines()[-1]
    assert "lost, or did not find, the other hosts, got '" in last
    assert "see their output, and that HOST:PORT of --rdzv is open" in last


def failure(code: int, local_rank: int = 0) -> ProcessFailure:
    return ProcessFailure(local_rank, pid=42, exitcode=code, error_file="")


@pytest.mark.parametrize(
    ("code", "num_hosts", "parts"),
    [
        (-9, 1, ["got SIGKILL of process 42", "out-of-memory killer, see dmesg", RESUME]),
        (-7, 1, ["got SIGBUS", "/dev/shm (", " MiB free now) was full", "--shm-size=2g", RESUME]),
        (-11, 1, ["got SIGSEGV", RESUME]),
        (-6, 1, ["got SIGABRT", "a library gave up", RESUME]),
        (1, 1, ["got exit code 1", "what to mend stands above"]),
        (1, 2, ["what to mend stands above; it may also be that another host's rank ended first"]),
        (3, 1, ["got exit code 3", "nan_report.json", "lower training.lr"]),
        (4, 1, ["got exit code 4", "the loss grows: lower training.lr"]),
        (5, 1, ["got exit code 5", "out of memory: a smaller runtime.micro_batch"]),
        (6, 2, ["got exit code 6", "it lost another rank: that one's line, here or on its host"]),
        (9, 1, ["got exit code 9", RESUME]),
        (143, 1, ["stopped by SIGTERM; run the same command again"]),
        (138, 1, ["stopped by SIGUSR1; run the same command again"]),
    ],
)
def test_every_end_has_its_remedy(monkeypatch, code, num_hosts, parts):
    monkeypatch.setattr(launch.Ranks, "num_hosts", num_hosts)
    line = launch.verdict(3, failure(code))
    for part in parts:
        assert part in line
    assert line.startswith("stopped" if code > 128 else "rank 3 on ")
    assert "\n" not in line and ("another host's" in line) == (num_hosts == 2 and code == 1)


@pytest.mark.parametrize(
    ("codes", "told", "rank"),
    [
        ([-15, -9, -15], {0, 2}, 1),  # the others were told to end
        ([1, -9, 1], set(), 1),  # they had lost it before they were looked at
        ([6, 6, 3], set(), 2),
        ([-9, 3], {0}, 1),
        ([1, 1], set(), 0),
    ],
)
def test_the_cause_is_named_not_its_consequences(monkeypatch, codes, told, rank):
    monkeypatch.setattr(
        launch.Ranks, "first", {i: code for i, code in enumerate(codes) if i not in told}
    )
    failures = {10 + i: failure(code, i) for i, code in enumerate(codes)}
    assert launch.first_failure(failures) == 10 + rank
