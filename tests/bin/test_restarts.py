"""Trainings whose launcher starts lost ranks again end with the weights of undisturbed ones."""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import test_hosts
from processes import crew_of, end_all, processes_of, wait_for, wait_until_gone
from refusals import refuses
from tiny import cut, losses, read_json, stage_3, training_of, weights
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from speakerlab.bin import launch, train
from speakerlab.core import ctrl_c, process
from speakerlab.experiments import other_ranks
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.group import Group

RESTARTS = 3
NUM_STEPS = 48
STEPS_PER_EPOCH = 6
SETTINGS = (f"training.num_epochs={NUM_STEPS // STEPS_PER_EPOCH}",)
SECONDS = 200
START_SECONDS = 6.0  # about what ranks need to their first step


# Two hosts in network namespaces, and a copy of the data.
hosts = test_hosts.hosts
copy = test_hosts.copy


@pytest.fixture(scope="module")
def whole(tmp_path_factory, train_command, environment) -> Path:
    """An experiment of two ranks, whose launcher loses none."""
    exp = tmp_path_factory.mktemp("whole") / "exp"
    subprocess.run(
        train_command(exp, 2, *SETTINGS),
        env=environment,
        check=True,
        capture_output=True,
        timeout=SECONDS,
    )
    return exp


@pytest.fixture
def exp(tmp_path) -> Iterator[Path]:
    """The experiment of a test, whose processes are ended after it."""
    yield tmp_path / "exp"
    end_all(tmp_path / "exp")


@pytest.fixture
def start(train_command, environment, exp, tmp_path):
    """start("a.setting=1", restarts=3) -> a launcher of two ranks; its output goes to a log."""

    def start_launcher(*overrides: str, restarts: int, ranks: int = 2):
        command = train_command(exp, ranks, *SETTINGS, *overrides)
        # Behind `train`, because --set takes all that follows it.
        command[4:4] = ["--max-restarts", str(restarts)]
        with (tmp_path / "log").open("wb") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    return start_launcher


@pytest.fixture
def log(tmp_path) -> Callable[[], str]:
    return (tmp_path / "log").read_text


def last_step(exp: Path) -> int:
    return max(losses(exp), default=0)


def num_restarts(text: str) -> int:
    return len(re.findall(r"restart \d+ of", text))


@pytest.mark.parametrize(
    ("code", "others", "is_lost"),
    [
        (-signal.SIGKILL, [], True),
        (-signal.SIGBUS, [process.EXIT_INPUT], True),  # a consequence
        (-signal.SIGSEGV, [], True),
        (-signal.SIGTERM, [], False),  # before the rank could handle it
        (process.EXIT_LOST, [process.EXIT_LOST], True),
        (process.EXIT_LOST, [process.EXIT_INPUT], False),
        (process.EXIT_CRASH, [process.EXIT_INPUT], True),
        (process.EXIT_INPUT, [], False),
        (process.EXIT_NUMERIC, [], False),
        (process.EXIT_DIVERGED, [], False),
        (process.EXIT_MEMORY, [], False),
        (128 + signal.SIGUSR1, [], False),
        (99, [], True),
    ],
)
def test_which_ends_are_losses(code, others, is_lost, monkeypatch):
    monkeypatch.setattr(launch.Ranks, "first", dict(enumerate([code, *others])))
    assert launch.may_start_again(code) == is_lost


@pytest.mark.parametrize(("meets_again", "num_tries"), [(True, 3), (False, 1)])
def test_hosts_try_to_meet_until_they_have(meets_again, num_tries, monkeypatch):
    """The first host's old rendezvous is closed, and then gone."""
    ends = [
        launch.End(process.EXIT_LOST, "closed"),
        launch.End(process.EXIT_LOST, "gone"),
        launch.End(0, ""),
    ]
    tried = []

    def meet(_arguments: list[str]) -> launch.End:
        tried.append(ends[len(tried)])
        return tried[-1]

    monkeypatch.setattr(launch, "run_torchrun", meet)
    monkeypatch.setattr(launch, "CLOSING_SECONDS", 0)
    monkeypatch.setattr(launch.Ranks, "have_started", False)
    monkeypatch.setenv("PYTHONPATH", "")
    place = {"num_hosts": 2, "host": 0, "rendezvous": "127.0.0.1:1"}
    end = launch.run_ranks(["train"], num_ranks=1, meets_again=meets_again, **place)
    assert len(tried) == num_tries
    assert end == tried[-1]


def test_a_crash_is_a_loss_and_ends_with_code_1(monkeypatch):
    """The code of the rank tells it from an input error; outside, all tracebacks are 1."""
    left = []
    monkeypatch.setattr(process, "leave", left.append)
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.delenv(process.RESTARTS_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="illegal"):
        train.leave(error, rank=1)  # no launcher started this process
    monkeypatch.setenv(process.RESTARTS_VARIABLE, "0 -1")
    with pytest.raises(RuntimeError, match="illegal"):
        train.leave(error, rank=1)  # the real `leave` does not return
    (code,) = left

    def fail(_arguments: list[str]) -> None:
        failure = ProcessFailure(1, pid=42, exitcode=code, error_file="")
        raise ChildFailedError("train", {1: failure})

    monkeypatch.setattr(launch.run, "main", fail)
    monkeypatch.setattr(ctrl_c, "die_of_ctrl_c", lambda: None)
    monkeypatch.setattr(launch.Ranks, "are_commands", True)
    monkeypatch.setattr(launch.Ranks, "first", {1: code})
    end = launch.run_torchrun([])
    assert end.code == process.EXIT_INPUT
    assert "rank 1" in end.lost
    assert end.line.startswith(end.lost)
    assert "traceback" in end.line


def test_hosts_that_never_met_are_not_lost(monkeypatch):
    def refuse(_arguments: list[str]) -> None:
        raise RendezvousClosedError

    monkeypatch.setattr(launch.run, "main", refuse)
    monkeypatch.setattr(ctrl_c, "die_of_ctrl_c", lambda: None)
    end = launch.run_torchrun([])
    assert end.code == process.EXIT_LOST
    assert not end.lost


@pytest.fixture
def options(monkeypatch):
    """options("--max-restarts", "2") -> the parsed options of a training on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    return lambda *arguments: train.parse(
        ["--exp", "exp", "--config", "campplus_tiny", *arguments]
    )


def test_restarts_are_counted_across_processes(options, tmp_path, monkeypatch, caplog):
    """Each restart is a new process, which has the environment of the one before."""
    args = options("--max-restarts", "2")
    args.exp = tmp_path
    started = []
    monkeypatch.setattr(process, "start_again", started.append)
    monkeypatch.setenv(process.RESTARTS_VARIABLE, "0 -1")
    for step in (4, 8, 8):
        (tmp_path / f"checkpoints/step_{step:08}").mkdir(parents=True, exist_ok=True)
        restarts = train.Restarts.of_this_command()
        train.start_lost_again(args, ["--exp", "exp"], restarts, "rank 1: SIGKILL")
    assert started == [["train", "--exp", "exp"]] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1: SIGKILL; restart 1 of 2, from step 4",
        "rank 1: SIGKILL; restart 2 of 2, from step 8",
        "--max-restarts: all 2 are used, no new checkpoint since the last, from step 8",
    ]


def test_ranks_of_another_program_are_not_started_again(options):
    args = options("--max-restarts", "2")
    group = Group("torchrun", 0, 2, 0, 2, "127.0.0.1", 29400)
    with refuses("--max-restarts", "torchrun", "leave the option out"):
        train.check_group(args, group)


def test_the_command_of_several_hosts_continues_on_one(options):
    assert options("--nnodes", "1", "--node-rank", "0", "--rdzv", "a:1").nnodes == 1
    assert options().nnodes == 1
    with refuses("--node-rank", "1", "from 0 to 0"):
        options("--nnodes", "1", "--node-rank", "1", "--rdzv", "a:1")


@pytest.mark.parametrize(
    ("earlier", "world_size", "bn_batch", "micro_batch"),
    [
        ((2, 16, 16), 1, None, 16),  # the micro-batch of the lost ranks, twice
        ((1, 32, 32), 2, None, 32),
        ((4, 8, 32), 2, 32, 16),  # four ranks shared statistics, now two do
        ((4, 8, 32), 1, 32, 32),
        ((8, 8, 64), 2, 64, "auto"),  # no two ranks of 32 crops share statistics
    ],
)
def test_batchnorm_sees_what_it_saw(
    earlier, world_size, bn_batch, micro_batch, make_config
):
    bn_setting = "null" if bn_batch is None else bn_batch
    config = make_config("training.global_batch=64", f"training.bn_batch={bn_setting}")
    plan = other_ranks.EarlierPlan(*earlier)
    kept = other_ranks.keep_bn_batch(config, plan, world_size)
    assert kept.runtime.micro_batch == micro_batch


def test_a_configured_micro_batch_stays_and_a_change_of_batchnorm_is_a_warning(
    make_config, caplog
):
    config = make_config("training.global_batch=64", "runtime.micro_batch=64")
    earlier = other_ranks.EarlierPlan(2, 16, 16)
    assert other_ranks.keep_bn_batch(config, earlier, 1) is config
    plan = BatchPlan(micro_batch=64, accumulation=1, world_size=1, reason="")
    other_ranks.log_other_ranks(config, earlier, plan)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "BatchNorm sees 64 crops instead of 16" in record.getMessage()


def test_ranks_that_do_not_divide_the_batch_are_refused(make_config):
    config = make_config("training.global_batch=64")
    earlier = other_ranks.EarlierPlan(2, 16, 16)
    with refuses("training.global_batch", "64", "3 ranks", "63 and 66"):
        other_ranks.keep_bn_batch(config, earlier, 3)


ONE_EPOCH = "training.num_epochs=1"


def test_a_training_of_two_ranks_continues_on_one(train, tmp_path):
    """`auto` alone would give one rank micro-batches of 8, and BatchNorm other statistics."""
    two = tmp_path / "two"
    train(two, ONE_EPOCH, ranks=2)
    one = cut(two, tmp_path / "one")
    text = train(one, ONE_EPOCH).stderr
    assert "resuming from step 2 of 6" in text
    assert (
        "resumes on 1 rank instead of 2: micro-batch 4 x 2 accumulations instead of 4 x 1;"
        " BatchNorm sees 4 crops as before"
    ) in text
    assert losses(one) == pytest.approx(losses(two), rel=1e-4)
    assert read_json(one / "run.json")["world_size"] == 1

    # Also when it resumes once more, on the one rank.
    again = cut(one, tmp_path / "again")
    text = train(again, ONE_EPOCH).stderr
    assert "auto is 4 in this run" in text
    assert weights(again) == weights(one)
    assert losses(again) == losses(one)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "num_kills"), [(0, 3), (1, 3), (2, 2), (3, 2)])
def test_ten_kills_in_all_leave_no_trace(seed, num_kills, start, exp, log, whole):
    """In each of `num_kills` parts of the run, a rank is killed at a random step, or before one."""
    chance = random.Random(seed)
    launcher = start(restarts=RESTARTS)
    part = NUM_STEPS // num_kills
    for number in range(num_kills):
        first = number * part
        # Before the end of the part, so that a fast machine has steps left to kill.
        latest = first + part // 2
        target = first + chance.randrange(part // 2)
        pause = chance.uniform(0, 0.3)
        # Some ranks are killed while they start.
        if chance.random() < 0.3:
            target = 0
            pause = chance.uniform(0, START_SECONDS)

        def is_due(target=target, number=number) -> bool:
            has_ended = launcher.poll() is not None
            is_there = len(crew_of(exp).ranks) == 2
            has_restarted = num_restarts(log()) == number
            return has_ended or (
                is_there and has_restarted and last_step(exp) >= target
            )

        wait_for(is_due, seconds=SECONDS)
        kill_time = time.monotonic() + pause

        def is_late(kill_time=kill_time, latest=latest) -> bool:
            return time.monotonic() >= kill_time or last_step(exp) >= latest

        wait_for(is_late, seconds=SECONDS)
        rank, victim = chance.choice(sorted(crew_of(exp).ranks.items()))
        os.kill(victim, signal.SIGKILL)
        lost = rf"rank {rank} on \S+: .*SIGKILL.*; restart {number + 1} of {RESTARTS}, "

        def is_restarted(lost=lost) -> bool:
            return re.search(lost, log()) is not None or launcher.poll() is not None

        wait_for(is_restarted, seconds=SECONDS)
        assert re.search(lost, log()), log()
    assert launcher.wait(SECONDS) == 0, log()
    assert num_restarts(log()) == num_kills
    assert weights(exp) == weights(whole)
    assert losses(exp) == losses(whole)
    assert "Traceback" not in log()
    wait_until_gone(exp, seconds=5)


@pytest.mark.slow
def test_used_up_restarts_end_with_the_reason_and_todays_code(start, exp, log):
    """The only rank is killed twice, the second time before a new checkpoint."""
    launcher = start(restarts=1, ranks=1)

    def rank() -> int | None:
        pid = crew_of(exp).ranks.get(0)
        # A launcher without ranks is taken for a training of one process.
        return None if pid == launcher.pid else pid

    wait_for(lambda: rank() and last_step(exp) > 3, seconds=SECONDS)
    for number in range(2):
        # The second time before the first step.
        wait_for(lambda number=number: rank() and num_restarts(log()) == number)
        os.kill(rank() or 0, signal.SIGKILL)
        wait_for(lambda: not rank(), seconds=SECONDS)
    assert launcher.wait(SECONDS) == 128 + signal.SIGKILL, log()
    assert re.search(r"rank 0 on .* SIGKILL .*; restart 1 of 1, from step \d+\n", log())
    *_, used_up, last = log().splitlines()
    assert "--max-restarts: all 1 are used, no new checkpoint since the last" in used_up
    assert "SIGKILL" in last
    assert last.endswith(launch.RESUME)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "text"),
    [(signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGHUP, 129, "SIGHUP")],
)
def test_a_stop_by_the_user_is_no_loss(number, code, text, start, exp, log):
    launcher = start(restarts=RESTARTS)
    wait_for(lambda: last_step(exp) > 3, seconds=SECONDS)
    launcher.send_signal(number)
    assert launcher.wait(SECONDS) == code, log()
    assert text in log().splitlines()[-1]
    assert num_restarts(log()) == 0


@pytest.mark.slow
def test_an_input_error_is_no_loss(start, log, exp):
    """Found by the ranks, not by the launcher: the crops of a step do not divide."""
    launcher = start("runtime.micro_batch=3", restarts=RESTARTS)
    assert launcher.wait(SECONDS) == process.EXIT_INPUT, log()
    assert "runtime.micro_batch" in log()
    assert num_restarts(log()) == 0


@pytest.fixture
def start_host(hosts, copy, settings, environment, exp):
    """start_host(1) -> the training on that host, which restarts lost ranks."""

    def start_on(number: int) -> subprocess.Popen[bytes]:
        address = f"{hosts[0].address}:{test_hosts.PORT}"
        place = ("--nnodes", "2", "--node-rank", str(number), "--rdzv", address)
        restarts = ("--max-restarts", str(RESTARTS))
        recipe = stage_3(copy, exp, settings, *place, *restarts, *SETTINGS)
        return hosts[number].start(training_of(recipe), environment)

    return start_on


@pytest.fixture
def of_one_host(copy, settings, run, exp) -> Path:
    """The experiment of two ranks of one host, of which none is lost."""
    on_one_host = exp.with_name("one")
    recipe = stage_3(copy, on_one_host, settings, *SETTINGS)
    _, *arguments = training_of(recipe)
    run(*arguments, ranks=2)
    return on_one_host


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["rank 1", "host 1", "host 0"])
def test_two_hosts_meet_again_after_one_was_lost(
    victim, hosts, start_host, exp, of_one_host
):
    """A killed rank is started again by its launcher, a killed launcher by hand."""
    runs = [start_host(0), start_host(1)]
    wait_for(lambda: last_step(exp) >= 4, seconds=SECONDS)
    kind, name = victim.split()
    number = int(name)
    pid = crew_of(exp).ranks[number]
    if kind == "host":
        launcher = processes_of(exp)[pid].parent
        os.kill(launcher, signal.SIGKILL)
        wait_until_gone([pid, launcher], seconds=10)
        runs[number].wait(10)
        runs[number] = start_host(number)
    else:
        os.kill(pid, signal.SIGKILL)
    for run in runs:
        run.wait(SECONDS)
    logs = [host.log.read_text() for host in hosts]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(logs)
    assert weights(exp) == weights(of_one_host)
    assert losses(exp) == losses(of_one_host)
    other = logs[1 - number]
    assert f"restart 1 of {RESTARTS}, from step" in other
    assert "waits up to 10 minutes for all 2 hosts" in other
    if kind == "rank":
        assert re.search(r"rank 1 on host1\S*: .*SIGKILL .*; restart 1 of 3", logs[1])
    assert "Traceback" not in "".join(logs)
    wait_until_gone(exp, seconds=5)
