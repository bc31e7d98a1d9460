"""Ranks that `speakerlab train` starts by itself, or is started as: all train the same model.

All train on 2 ranks for 6 steps. The fixture `two_ranks` starts each rank with its number in RANK
and WORLD_SIZE; every other way of starting must give the same weights, bit for bit.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import as_ranks, start_forked
from processes import crew_of, end_all, wait_for, wait_until_gone
from tiny import ROOT, losses, rows, weights

ONE_EPOCH = ("training.num_epochs=1", "runtime.micro_batch=4")
SECONDS = 120
# A host whose name nobody can resolve: its network has only 127.0.0.1.
NAMELESS = 'hostname no-such-host.invalid && ip link set lo up && exec "$@"'


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, train) -> Path:
    """An experiment of two ranks."""
    exp = tmp_path_factory.mktemp("two") / "exp"
    train(exp, *ONE_EPOCH, ranks=2)
    return exp


@pytest.fixture
def start(environment, tmp_path):
    """start(words, **variables) -> a process in another folder, whose output goes to a log."""
    started: list[subprocess.Popen[bytes]] = []
    # The folder has another package of the same name, which must not be imported.
    other = tmp_path / "other folder"
    package = other / "speakerlab/__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("raise SystemExit('another package')")

    def run(arguments: list[str], **variables: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(
                arguments,
                env={**environment, "PYTHONSAFEPATH": "1", **variables},
                cwd=other,
                stdout=log,
                stderr=log,
            )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def exp(tmp_path):
    """The experiment of a test, whose processes are ended after it."""
    yield tmp_path / "exp"
    end_all(tmp_path / "exp")


@pytest.fixture
def log(tmp_path):
    """log() -> what the processes of a test have written."""
    return (tmp_path / "log").read_text


def test_nproc_starts_the_ranks_from_any_folder(
    start, log, exp, train_command, two_ranks
):
    process = start(train_command(exp, 2, *ONE_EPOCH))

    def have_started() -> bool:
        return len(crew_of(exp).ranks) == 2 or process.poll() is not None

    wait_for(have_started, seconds=SECONDS)
    crew = crew_of(exp)
    assert crew.launcher == process.pid, log()
    assert set(crew.ranks) == {0, 1}, log()
    assert process.wait(SECONDS) == 0, log()
    assert weights(exp) == weights(two_ranks)
    assert losses(exp) == losses(two_ranks)
    assert "micro-batch 4 x 2 ranks" in log()
    assert "Traceback" not in log()
    wait_until_gone(exp, seconds=5)


def test_srun_forms_one_group_of_its_tasks(
    two_ranks, exp, environment, settings, tmp_path
):
    """Of each task, Slurm's variables only: no RANK, no address."""
    port = as_ranks(1)[0]["MASTER_PORT"]
    arguments = ["-m", "speakerlab", "train", "--exp", exp, *settings, *ONE_EPOCH]
    tasks = []
    for number in range(2):
        variables = {
            "SLURM_NTASKS": "2",
            "SLURM_NNODES": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number),
            "MASTER_PORT": port,
        }
        output = tmp_path / f"task{number}"
        task = start_forked(arguments, environment | variables, output)
        tasks.append(task)
    for task in tasks:
        task.join(SECONDS)
        assert task.exitcode == 0
    assert weights(exp) == weights(two_ranks)
    assert losses(exp) == losses(two_ranks)
    assert "step 6/6" in (tmp_path / "task0.err").read_text()
    assert "step" not in (tmp_path / "task1.err").read_text()


@pytest.mark.slow
def test_torchrun_starts_ranks(start, log, exp, settings, two_ranks):
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    options = ["--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "speakerlab", "train", "--exp", str(exp), *settings, *ONE_EPOCH]
    process = start([*torchrun, *options, *arguments])
    assert process.wait(SECONDS) == 0, log()
    assert weights(exp) == weights(two_ranks)
    assert losses(exp) == losses(two_ranks)


@pytest.mark.slow
def test_ranks_that_run_out_of_memory_are_started_again(start, log, exp, train_command):
    """Rank 1 has too little memory until the micro-batch is smaller."""
    variables = {
        "CHAOS_HARM": "full 1 4 1000",
        "CHAOS_TESTS": str(ROOT / "tests/bin"),
        "PYTHONPATH": f"{ROOT / 'tests/safety/harm'}:{ROOT}:{ROOT / 'tests'}",
    }
    overrides = ("training.checkpoint_every_steps=2", *ONE_EPOCH)
    process = start(train_command(exp, 2, *overrides), **variables)
    assert process.wait(SECONDS) == 0, log()
    retrying = "retrying with a smaller one"
    assert log().count(f"out of memory with a micro-batch of 4; {retrying}") == 1
    first, second = log().split(retrying)
    assert re.search(r"rank 1 on \S+: ended the run with exit code 5", first)
    assert "micro-batch 2 x 2 ranks x 2 accumulations (4 ran out of memory)" in second
    assert "resuming from step 4 of 6" in second
    assert "Traceback" not in log()
    steps = list(losses(exp))
    assert steps == list(range(1, 7))
    assert len(rows(exp, "train")) == 6
    wait_until_gone(exp, seconds=5)


@pytest.mark.slow
def test_a_host_name_that_does_not_resolve_delays_nothing(
    start, log, exp, train_command, two_ranks
):
    prefix = ["unshare", "--uts", "--net", "bash", "-c", NAMELESS, "bash"]
    has_tools = shutil.which("unshare") and shutil.which("ip")
    if os.geteuid() != 0 or not has_tools:
        pytest.skip("makes a network namespace, so needs root, ip and unshare")
    if subprocess.run([*prefix, "true"]).returncode != 0:
        pytest.skip("makes a network namespace, so needs root, ip and unshare")
    process = start([*prefix, *train_command(exp, 2, *ONE_EPOCH)])
    assert process.wait(SECONDS) == 0, log()
    assert weights(exp) == weights(two_ranks)
    assert "retrieve hostname" not in log()
    assert "no-such-host" not in log()
