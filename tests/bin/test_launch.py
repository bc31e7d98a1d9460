"""The launcher names the rank that ended a run, hands its code on, and passes signals on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import wait_for
from refusals import refuses
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from speakerlab.bin import launch
from speakerlab.core import system

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

    def launch_them(program: str, code: int) -> tuple[str, float]:
        script = tmp_path / "ranks.py"
        began = time.monotonic()
        script.write_text(RANKS.format(what=program))
        text = run(*STANDALONE, script, code=code).stderr
        seconds = time.monotonic() - began
        return text.splitlines()[-1], seconds

    return launch_them


@pytest.mark.parametrize(
    ("death", "code", "value"),
    [("os.kill(os.getpid(), 7)", 135, "SIGBUS"), ("os._exit(3)", 3, "exit code 3")],
)
def test_the_rank_that_died_first_is_named(launch_ranks, death, code, value):
    program = RANK_1_DIES.format(death=death, patience=False)
    line, _ = launch_ranks(program, code)
    assert line.startswith("rank 1 on ")
    assert value in line


@pytest.mark.slow
def test_ranks_that_ignore_signals_are_killed_soon_after_one_died(launch_ranks):
    program = RANK_1_DIES.format(death="os.kill(os.getpid(), 9)", patience=True)
    line, seconds = launch_ranks(program, 137)
    # The launcher waits for 10 s; torchrun would wait for 30 s.
    assert seconds < 25
    assert "out-of-memory" in line
    assert line.endswith(launch.RESUME)


def test_a_signal_reaches_the_ranks_and_a_second_does_not_cut_saving_short(
    environment, tmp_path
):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(what=SAVES))
    launcher = subprocess.Popen(
        [sys.executable, *STANDALONE, script],
        env={**environment, "SAVED": str(tmp_path / "saved")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    for _ in range(2):
        assert launcher.stdout.readline().startswith("ready")
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        launcher.send_signal(number)
        time.sleep(0.2)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGUSR1
    assert errors.splitlines()[-1] == f"stopped by SIGUSR1; {launch.RESUME}"
    # Each rank has received one signal when it has saved.
    for rank in (0, 1):
        assert (tmp_path / f"saved{rank}").read_text() == "1"


LAUNCH = [*STANDALONE, "never_run.py"]
TRAIN = ["-m", "speakerlab", "train", "--exp", "x", "--config", "eres2net"]


@pytest.mark.parametrize("arguments", [LAUNCH, TRAIN], ids=["launch", "train"])
def test_a_ctrl_c_while_torch_is_imported_is_one_line(environment, arguments, tmp_path):
    command = [sys.executable, *arguments]
    running = subprocess.Popen(
        command,
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
    )
    # The libraries are mapped early in the import.
    maps = Path(f"/proc/{running.pid}/maps")
    wait_for(lambda: "libtorch" in maps.read_text())
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGINT
    assert errors == b"stopped by Ctrl-C\n"


INTERRUPTED_RANKS = """
import os, signal
if "RANK" in os.environ:
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_a_ctrl_c_while_the_ranks_start_prints_no_traceback(environment, tmp_path):
    # Python imports this module before anything of ours.
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_RANKS)
    search_path = f"{tmp_path}:{environment['PYTHONPATH']}"
    settings = ["augment.noise_prob=0", "augment.room_prob=0"]
    finished = subprocess.run(
        [sys.executable, *TRAIN, "--nproc", "2", "--set", *settings],
        env={**environment, "PYTHONPATH": search_path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 128 + signal.SIGINT, finished.stderr
    assert "Traceback" not in finished.stderr
    assert "stopped by Ctrl-C" in finished.stderr
    assert finished.stderr.splitlines()[-1] == f"stopped by SIGINT; {launch.RESUME}"


@pytest.fixture
def asked(monkeypatch):
    """The options of torchrun, which is not started; the environment is restored after a test."""
    commands: list[list[str]] = []
    monkeypatch.setattr(launch, "run_torchrun", commands.append)
    for name in (
        "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
        "PYTHONPATH",
        "PYTHONSAFEPATH",
    ):
        # Setting it first makes monkeypatch restore it even if it is not set now.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return commands


def test_ranks_of_one_host_need_no_name_of_it(asked, monkeypatch):
    monkeypatch.setattr(system, "available_cpus", lambda: 9)
    launch.run_ranks(["train"], num_ranks=2)
    (command,) = asked
    assert command[:2] == ["--local-addr", "127.0.0.1"]
    assert command[2:6] == ["--nnodes", "1", "--nproc-per-node", "2"]
    assert command[6:9] == ["--max-restarts", "0", "--standalone"]
    assert command[9:] == ["-m", "speakerlab", "train"]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    # Each rank has its share of the CPUs.
    assert os.environ["OMP_NUM_THREADS"] == "4"
    root = Path(launch.__file__).parents[2]
    assert os.environ["PYTHONPATH"] == str(root)


def test_what_the_user_has_set_is_kept(asked, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    launch.run_ranks(["train"], num_ranks=2)
    assert os.environ["OMP_NUM_THREADS"] == "5"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    given = ["--standalone", "--local-addr=10.0.0.1", "script.py"]
    assert launch.add_local_address(given) == given


@pytest.mark.parametrize("host", [0, 1])
def test_several_hosts_meet_at_the_address_of_the_first(asked, host):
    place = {"num_hosts": 2, "host": host, "rendezvous": "127.0.0.1:29400"}
    launch.run_ranks(["train"], num_ranks=4, **place)
    (arguments,) = asked
    *pairs, _, package, command = arguments
    assert (package, command) == ("speakerlab", "train")
    assert "--standalone" not in arguments
    # Each option has one value.
    options = dict(zip(pairs[::2], pairs[1::2]))
    assert options["--nnodes"] == "2"
    assert options["--nproc-per-node"] == "4"
    assert options["--node-rank"] == str(host)
    assert options["--rdzv-endpoint"] == "127.0.0.1:29400"
    is_first_host = options["--rdzv-conf"].split(",")[0]
    assert is_first_host == f"is_host={1 - host}"
    assert options["--local-addr"] == "127.0.0.1"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_second_attempt_of_several_hosts_is_another_rendezvous():
    names = []
    for attempt in (1, 2):
        options = launch.join_hosts(0, "a:1", attempt=attempt)
        position = options.index("--rdzv-id")
        names.append(options[position + 1])
    assert names[0] != names[1]


def test_a_first_host_that_cannot_be_reached_is_named():
    with refuses("--rdzv", "no-such-host.invalid"):
        launch.join_hosts(1, "no-such-host.invalid:29400", attempt=1)


def test_a_host_that_finds_no_other_says_so(run, tmp_path):
    # Nobody listens at port 1.
    options = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:1",
        "--rdzv-conf",
        "is_host=0,timeout=1,read_timeout=1",
    ]
    script = tmp_path / "never_run.py"
    done = run("-m", "speakerlab", "launch", *options, script, code=6)
    last = done.stderr.splitlines()[-1]
    assert "other hosts" in last
    assert "--rdzv" in last


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
    for value in values:
        assert value in line
    # A code above 128 is the one of a stop by a signal.
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
    ended_by_themselves = {}
    failures = {}
    for local_rank, code in enumerate(codes):
        failures[10 + local_rank] = failure(code, local_rank)
        if local_rank not in stopped:
            ended_by_themselves[local_rank] = code
    monkeypatch.setattr(launch.Ranks, "first", ended_by_themselves)
    assert launch.first_failure(failures) == 10 + rank


def test_lost_hosts_have_a_reason():
    line = launch.lost_hosts(RendezvousTimeoutError())
    assert "not found: rendezvous timeout error; " in line
    line = launch.lost_hosts(RendezvousTimeoutError(" \n"))
    assert "not found: rendezvous timeout error; " in line
    line = launch.lost_hosts(RendezvousTimeoutError("the store\nis gone"))
    assert "not found: the store is gone; " in line
