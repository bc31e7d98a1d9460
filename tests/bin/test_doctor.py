"""`speakerlab doctor` on a healthy machine, and on one that is short of everything."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from refusals import refused
from tiny import CONFIG, copy_data

from speakerlab.bench.doctor import Plan, check_devices, connection, driver
from speakerlab.config.schema import load_config

SMALL_SHM = "mount -t tmpfs -o size=16m tmpfs /dev/shm"
FULL = "No space left on device"


def can_mount() -> bool:
    command = ["unshare", "-m", "sh", "-c", SMALL_SHM]
    return shutil.which("unshare") is not None and not subprocess.run(command).returncode


needs_mount = pytest.mark.skipif(not can_mount(), reason="needs root, to mount small disks")


def harmed(harm: str, words: list, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `words` where the shell command `harm` has changed mounts and limits."""
    command = ["unshare", "-m", "sh", "-c", f'{harm} && exec "$@"', "sh", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_healthy_machine_passes(run, data, settings, tmp_path):
    exp = tmp_path / "exps/new"
    found = run("-m", "speakerlab", "doctor", "--data", data, "--exp", exp, *settings).stdout
    lines = [line.split(maxsplit=1) for line in found.splitlines()]
    assert {level for level, _ in lines} <= {"ok", "warn"}  # a busy disk may be slow
    subjects = {"CPUs", "OMP_NUM_THREADS", "memory", "/dev/shm", "open files"}
    assert subjects | {str(exp), str(data)} <= {text.partition(":")[0] for _, text in lines}
    assert "gloo between 2 ranks" in found or "GPU 0" in found
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@needs_mount
def test_every_shortage_is_named(environment, data, settings, tmp_path):
    """16 MiB of shared memory, 8 MiB of disk, 200 open files, a recording that is gone."""
    exp, copy = tmp_path / "exp", copy_data(data, tmp_path / "data")
    exp.mkdir()
    (copy / "wav/spk0-0.wav").unlink()
    harm = f'{SMALL_SHM} && mount -t tmpfs -o size=8m tmpfs "{exp}" && ulimit -n 200'
    words = [sys.executable, "-m", "speakerlab", "doctor", "--exp", exp, "--data", copy]
    words += ["--num-workers", "64", *settings, "training.keep_checkpoints=1000"]
    done = harmed(harm, words, environment)
    assert done.returncode == 1, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    failed = "\n".join(text for level, text in lines if level == "fail")
    assert refused(failed, "/dev/shm", "of 64 data workers", "16 MiB", "--shm-size=")
    assert refused(failed, str(exp), FULL) and refused(failed, str(exp), "8 MiB")
    assert refused(failed, "open files", 200)
    assert "wav/spk0-0.wav: no such file" in failed
    assert len(failed.splitlines()) == 5 and refused(done.stderr, "doctor", 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    ("more", "visible", "refusal"),
    [
        ({"gpus": 4}, None, ("--gpus", "4 requested", "no GPU found")),
        ({}, "0,1", ("--gpus", "2 requested", "0,1", "no GPU found")),
        ({"settings": ["runtime.device=cuda"]}, None, ("runtime.device", "cuda", "no GPU found")),
        ({"settings": ["runtime.precision=bf16"]}, None, ("runtime.precision", "bf16")),
    ],
)
def test_gpus_that_training_would_miss_fail(monkeypatch, more, visible, refusal):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = load_config([Path(CONFIG)], more.pop("settings", []))
    plan, lines = Plan(config, Path(), None, more.get("gpus", 1), **more), list[str]()
    try:
        lines += [line.text for line in check_devices(plan) if line.level == "fail"]
    except ValueError as error:  # the command prints it as a failed check
        lines += [str(error)]
    assert len(lines) == 1 and refused(lines[0], *refusal)


def sleep() -> None:
    time.sleep(60)


def die() -> None:
    os.kill(os.getpid(), signal.SIGBUS)


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError("no way")
    sleep()


@pytest.mark.parametrize(
    ("work", "why"),
    [(sleep, "within 1 s"), (die, "SIGBUS"), (fail_on_rank_1, "rank 1 failed: RuntimeError: no")],
)
def test_ranks_that_cannot_communicate(work, why):
    line = connection(2, limit=1 if work is sleep else 100, work=work)
    assert line.level == "fail" and why in line.text


@pytest.mark.parametrize(
    ("num_gpus", "found", "error", "level", "values"),
    [
        (0, None, None, "ok", ["none found"]),
        (0, "535.1", AssertionError("not compiled"), "fail", ["not compiled", "CUDA build"]),
        (0, "535.1", RuntimeError("driver too\nold"), "fail", ["driver too old", "docker run"]),
        (0, "535.1", None, "fail", ["nvidia-smi"]),
        (2, "535.1", None, "ok", ["535.1", torch.__version__]),
    ],
)
def test_a_driver_and_a_torch_that_do_not_match(monkeypatch, num_gpus, found, error, level, values):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
    monkeypatch.setattr(torch.version, "cuda", None if "compiled" in str(error) else "13.0")
    line = driver(num_gpus, found)
    assert line.level == level and all(value in line.text for value in values)
    assert level == "ok" or ";" in line.text
