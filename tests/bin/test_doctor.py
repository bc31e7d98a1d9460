"""doctor: what it says of a machine that is well, and of one that is short of everything."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from speakerlab.bench.doctor_devices import driver, ranks_talk

SMALL_SHM = "mount -t tmpfs -o size=16m tmpfs /dev/shm"


def can_mount() -> bool:
    command = ["unshare", "-m", "sh", "-c", SMALL_SHM]
    return shutil.which("unshare") is not None and not subprocess.run(command).returncode


needs_mount = pytest.mark.skipif(not can_mount(), reason="needs root, to mount small disks")


def lines_of(text: str) -> dict[str, str]:
    """Subject -> level, of what doctor printed."""
    lines = (line.partition(" ") for line in text.splitlines())
    return {rest.strip().partition(":")[0]: level for level, _, rest in lines}


def test_a_machine_that_is_well(run, data, settings, tmp_path):
    exp = tmp_path / "exps/new"
    done = run("-m", "speakerlab", "doctor", "--data", data, "--exp", exp, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    found = lines_of(done.stdout)
    assert set(found.values()) <= {"ok", "warn"}  # a busy disk may be slow
    subjects = {"CPUs", "OMP_NUM_THREADS", "memory", "/dev/shm", "open files", "TensorBoard"}
    assert subjects | {str(exp), str(data)} <= set(found)
    assert "gloo between 2 ranks: add up" in done.stdout or "GPU 0" in done.stdout
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@needs_mount
def test_a_machine_that_is_short_of_everything(environment, data, settings, tmp_path):
    """16 MiB of shared memory, 8 MiB of disk, 200 open files, a recording that is gone."""
    exp, copy = tmp_path / "exp", tmp_path / "data"
    exp.mkdir()
    shutil.copytree(data / "train", copy / "train")
    scp = copy / "train/wav.scp"
    scp.write_text(scp.read_text().replace(str(data), str(tmp_path)))
    shutil.copytree(data / "wav", tmp_path / "wav")
    (tmp_path / "wav/s0-u0.wav").unlink()
    harm = f'{SMALL_SHM} && mount -t tmpfs -o size=8m tmpfs "$1" && ulimit -n 200 && shift'
    keep = "training.keep_checkpoints=1000"
    words = ["doctor", "--exp", exp, "--data", copy, "--num-workers", "64", *settings, keep]
    command = ["unshare", "-m", "sh", "-c", f'{harm} && exec "$@"', "sh", exp, sys.executable]
    done = subprocess.run(
        [*command, "-m", "speakerlab", *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    failed = "\n".join(line for line in done.stdout.splitlines() if line.startswith("fail"))
    assert "runtime.num_workers: 64 for each of 1 ranks need" in failed
    assert "of /dev/shm, got 16 MiB free; enlarge it (docker run --shm-size=" in failed
    assert f"{exp}: cannot be written, got 'No space left on device'; free some space" in failed
    assert "open files: 200 allowed, a rank needs about" in failed
    assert "wav/s0-u0.wav: no such file" in failed
    assert f"{exp}: 8 MiB free, checkpoints of " in failed
    assert failed.count("\n") == 4
    last = "doctor: 5 lines with fail; mend what they name before a run\n"
    assert done.stderr == last


@needs_mount
def test_a_read_only_disk(environment, tmp_path):
    harm = 'mount -t tmpfs -o ro tmpfs "$1" && shift && exec "$@"'
    code = (
        "import sys; from pathlib import Path; from speakerlab.bench import doctor; "
        "plan = doctor.Plan(None, Path(sys.argv[1]), None, 1, 0); "
        "print(doctor.writing(plan)); print(doctor.locks(plan))"
    )
    command = ["unshare", "-m", "sh", "-c", harm, "sh", tmp_path, sys.executable, "-c", code]
    done = subprocess.run([*command, tmp_path], env=environment, capture_output=True, text=True)
    assert [line.partition(";")[0] for line in done.stdout.splitlines()] == [
        f"fail {tmp_path}: cannot be written, got 'Read-only file system'",
        f"fail {tmp_path}: has no file locks, got 'Read-only file system'",
    ]


@needs_mount
def test_a_training_is_refused_before_it_starts_where_shared_memory_is_small(
    environment, train_command, tmp_path
):
    words = train_command(tmp_path / "exp", 1, "runtime.num_workers=64")
    harm = f'{SMALL_SHM} && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", harm, "sh", sys.executable, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    refused = done.stderr.splitlines()[-1]
    assert refused.startswith("runtime.num_workers: 64 for each of 1 ranks need ")
    assert "MiB of /dev/shm, got 16 MiB free; enlarge it (docker run --shm-size=" in refused
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "exp/checkpoints").glob("step_*"))


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import time; time.sleep(60)", "no answer within 1 s; "),
        ("import os; os.kill(os.getpid(), 7)", "rank 0 got SIGBUS; rank 1 got SIGBUS; "),
        ("import os\nif os.environ['RANK'] == '1': raise RuntimeError('no way')", "'RuntimeError"),
    ],
)
def test_ranks_that_do_not_talk(program, why):
    began = time.monotonic()
    line = ranks_talk(2, seconds=1 if "sleep" in program else 20, program=program)
    assert line.level == "fail" and why in line.text
    assert time.monotonic() - began < 20


NVIDIA = {"found": "535.1", "newest": "12.2", "built_for": "13.0"}


@pytest.mark.parametrize(
    ("num_gpus", "facts", "level", "text"),
    [
        (0, {"found": None, "newest": None}, "ok", "GPUs: none, training runs on the CPU"),
        (0, {"built_for": None}, "fail", "is built for CPUs only; install a CUDA build"),
        (0, {}, "fail", "up to CUDA 12.2; torch is for 13.0; update the driver, or install torch"),
        (0, {"newest": "13.1"}, "fail", "no GPU seen; docker run --gpus all"),
        (2, {}, "ok", "driver: NVIDIA 535.1, up to CUDA 12.2; torch is for 13.0"),
    ],
)
def test_a_driver_and_a_torch_that_do_not_match(monkeypatch, num_gpus, facts, level, text):
    monkeypatch.delitem(os.environ, "CUDA_VISIBLE_DEVICES", raising=False)
    line = driver(num_gpus, **{**NVIDIA, **facts})
    assert line.level == level and text in line.text
    assert (";" in line.text) or level == "ok"


def test_hidden_gpus_are_told(monkeypatch):
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    line = driver(0, **{**NVIDIA, "newest": "13.1"})
    assert line.text.endswith("no GPU seen; correct CUDA_VISIBLE_DEVICES=''")
