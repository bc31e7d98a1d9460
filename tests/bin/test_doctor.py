"""`speakerlab doctor` on a healthy machine, and on one that is short of everything."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from refusals import refused
from tiny import CONFIG, copy_data

from speakerlab.bench.doctor import Plan, check_devices, connection, driver, software
from speakerlab.config.schema import load_config

SMALL_SHM = "mount -t tmpfs -o size=16m tmpfs /dev/shm"
FULL = "No space left on device"


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "sh", "-c", SMALL_SHM]
    return subprocess.run(command).returncode == 0


# Small disks are mounted, which needs root.
needs_mount = pytest.mark.skipif(
    not can_mount(), reason="needs root, to mount small disks"
)


def harmed(
    harm: str, arguments: list, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `words` where the shell command `harm` has changed mounts and limits."""
    shell = ["unshare", "-m", "sh", "-c", f'{harm} && exec "$@"', "sh"]
    command = [*shell, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_healthy_machine_passes(run, data, settings, tmp_path):
    exp = tmp_path / "exps/new"
    doctor = ("-m", "speakerlab", "doctor", "--data", data, "--exp", exp)
    printed = run(*doctor, *settings).stdout
    subjects = set()
    for line in printed.splitlines():
        level, text = line.split(maxsplit=1)
        # A busy disk may be slow.
        assert level in ("ok", "warn")
        subjects.add(text.partition(":")[0])
    checks = {"CPUs", "OMP_NUM_THREADS", "memory", "/dev/shm", "open files"}
    assert checks | {str(exp), str(data)} <= subjects
    assert "gloo between 2 ranks" in printed or "GPU 0" in printed
    # Nothing is left behind.
    assert list(tmp_path.iterdir()) == []


@needs_mount
@pytest.mark.slow
def test_every_shortage_is_named(environment, data, settings, tmp_path):
    """16 MiB of shared memory, 8 MiB of disk, 200 open files, a recording that is gone."""
    exp = tmp_path / "exp"
    copy = copy_data(data, tmp_path / "data")
    exp.mkdir()
    (copy / "wav/spk0-0.wav").unlink()
    harm = f'{SMALL_SHM} && mount -t tmpfs -o size=8m tmpfs "{exp}" && ulimit -n 200'
    doctor = [sys.executable, "-m", "speakerlab", "doctor"]
    options = ["--exp", exp, "--data", copy, "--num-workers", "64", *settings]
    arguments = [*doctor, *options, "training.keep_checkpoints=1000"]
    done = harmed(harm, arguments, environment)
    assert done.returncode == 1, done.stderr

    failures = []
    for line in done.stdout.splitlines():
        level, text = line.split(maxsplit=1)
        if level == "fail":
            failures.append(text)
    failed = "\n".join(failures)
    assert refused(failed, "/dev/shm", "of 64 data workers", "16 MiB", "--shm-size=")
    assert refused(failed, str(exp), FULL)
    assert refused(failed, str(exp), "8 MiB")
    assert refused(failed, "open files", 200)
    assert "wav/spk0-0.wav: no such file" in failed
    assert len(failures) == 5
    assert refused(done.stderr, "doctor", 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    ("changes", "visible", "refusal"),
    [
        ({"gpus": 4}, None, ("--gpus", "4 requested", "no GPU found")),
        ({}, "0,1", ("--gpus", "2 requested", "0,1", "no GPU found")),
        (
            {"settings": ["runtime.device=cuda"]},
            None,
            ("runtime.device", "cuda", "no GPU found"),
        ),
        ({"settings": ["runtime.precision=bf16"]}, None, ("runtime.precision", "bf16")),
    ],
)
def test_gpus_that_training_would_miss_fail(monkeypatch, changes, visible, refusal):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = changes.pop("settings", [])
    config = load_config([Path(CONFIG)], settings)
    plan = Plan(config, Path(), None, changes.get("gpus", 1), **changes)
    # The command prints a ValueError as a failed check.
    try:
        failed = [line.text for line in check_devices(plan) if line.level == "fail"]
    except ValueError as error:
        failed = [str(error)]
    (text,) = failed
    assert refused(text, *refusal)


@pytest.mark.parametrize(
    ("torch_version", "torchaudio_version", "fix"),
    [
        ("2.11.0+cu130", "2.11.0+cu130", ""),
        # torchaudio 2.11 runs with any later torch.
        ("2.14.1+cu132", "2.11.0+cu130", ""),
        ("2.14.1", "2.11.1", ""),
        ("2.15.0a0+git12ab", "2.11.0", ""),
        ("3.0.0", "2.11.0", ""),
        ("2.10.0+cu128", "2.10.1", ""),
        ("2.10.0+cu128", "2.9.0", 'pip install "torchaudio==2.10.*"'),
        ("2.10.0", "2.11.0", 'pip install "torchaudio==2.10.*"'),
        ("2.11.0", "2.10.0", 'pip install "torchaudio==2.11.0"'),
        ("2.14.1", "2.9.1", 'pip install "torchaudio==2.11.0"'),
        # torchaudio is not needed
        ("2.14.1", None, ""),
    ],
)
def test_torchaudio_beside_torch(monkeypatch, torch_version, torchaudio_version, fix):
    torchaudio = None
    if torchaudio_version is not None:
        torchaudio = ModuleType("torchaudio")
        torchaudio.__version__ = torchaudio_version
    monkeypatch.setitem(sys.modules, "torchaudio", torchaudio)
    monkeypatch.setattr(torch, "__version__", torch_version)
    line, _ = software(Mock())
    assert f"torch {torch_version}" in line.text
    if torchaudio_version is not None:
        assert f"torchaudio {torchaudio_version}" in line.text
    assert line.level == ("warn" if fix else "ok")
    assert fix in line.text


@pytest.mark.parametrize(
    "error",
    [
        "OSError('undefined symbol: x')",
        "RuntimeError('compiled with different\\nCUDA versions')",
        "ImportError('a library')",
    ],
)
def test_a_torchaudio_that_cannot_be_imported_is_one_line(monkeypatch, tmp_path, error):
    (tmp_path / "torchaudio.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchaudio", raising=False)
    line, _ = software(Mock())
    assert line.level == "warn"
    assert "torchaudio cannot be imported (" in line.text
    assert "or uninstall it" in line.text
    assert "\n" not in line.text


def test_a_card_without_kernels_fails_in_one_line(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    config = load_config([Path(CONFIG)], [])
    lines = list(check_devices(Plan(config, Path(), None, 1)))
    assert [line.level for line in lines] == ["ok", "fail"]
    line = lines[1].text
    assert refused(line, "GPU 0", "Tesla V100 (sm_70)", "sm_75 sm_80", "whl/cu126")


# Module of a rank -> its code, and a part of the finding.
RANKS = {
    "sleeping": ("import time; time.sleep(60)", "within 3 s"),
    "dying": ("import os; os.kill(os.getpid(), 7)", "SIGBUS"),
    "failing": (
        (
            "import os, time; int(os.environ['RANK']) or time.sleep(60); raise"
            " RuntimeError('no way')"
        ),
        "RuntimeError: no way",
    ),
}


@pytest.mark.parametrize("module", RANKS)
def test_ranks_that_cannot_communicate(module, tmp_path, monkeypatch):
    code, problem = RANKS[module]
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    limit = 3 if module == "sleeping" else 100
    line = connection(2, limit=limit, module=module)
    assert line.level == "fail", line.text
    assert problem in line.text, line.text


@pytest.mark.parametrize(
    ("num_gpus", "driver_version", "error", "level", "values"),
    [
        (0, None, None, "ok", ["none found"]),
        (
            0,
            "535.1",
            AssertionError("not compiled"),
            "fail",
            ["not compiled", "CUDA build"],
        ),
        (
            0,
            "535.1",
            RuntimeError("driver too\nold"),
            "fail",
            ["driver too old", "docker run"],
        ),
        (0, "535.1", None, "fail", ["nvidia-smi"]),
        (2, "535.1", None, "ok", ["535.1", torch.__version__]),
        (
            1,
            "535.1",
            RuntimeError("The driver is too old (found version 12020). Please"),
            "fail",
            ["535.1", "found version 12020", "580 or newer", "whl/cu126"],
        ),
    ],
)
def test_a_driver_and_a_torch_that_do_not_match(
    monkeypatch, num_gpus, driver_version, error, level, values
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
    built_for = None if "compiled" in str(error) else "13.0"
    monkeypatch.setattr(torch.version, "cuda", built_for)
    line = driver(num_gpus, driver_version)
    assert line.level == level
    for value in values:
        assert value in line.text
    if level != "ok":
        # A remedy follows the problem.
        assert ";" in line.text
