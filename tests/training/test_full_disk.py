"""A full disk delays rows and checkpoints of a training and does not end it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
# A file can be written to the end of its last page of 4 KiB, though the disk is full.
SMALL_DISK = 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"'
TRAINING = """
import logging, shutil, sys
from pathlib import Path
from speakerlab.training.appended import LogFile
from speakerlab.training.monitor import Monitor
disk, kept, when = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
logging.basicConfig(format="%(message)s", level=logging.INFO)
logging.getLogger().addHandler(LogFile(disk / "train.log"))
filler = disk / "filler"

def fill():
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

if when == "begin":
    fill()
monitor = Monitor(disk, total_steps=1000, every_seconds=0)
monitor.begin(0)
for step in range(1, 151):
    if step == 50 and when != "begin":
        fill()
    if step == 100 and when != "never":
        filler.unlink()
    monitor.train_row(step, {"loss": step / 8, **dict.fromkeys("abcdefghijkl", step / 16)})
monitor.close()
shutil.copytree(disk, kept, ignore=shutil.ignore_patterns("filler"))
"""


CHECKPOINTS = """
import sys
from pathlib import Path
import torch
from speakerlab.training.writer import CheckpointWriter

folder = Path(sys.argv[1])
writer = CheckpointWriter(folder, keep=3)
for step, size in ((1, 100), (2, 2_000_000), (3, 100)):
    writer.save({"task": {"w": torch.zeros(size)}, "step": step, "attempt": 0})
    try:
        writer.wait()
    except OSError as error:
        print(error)
print(*sorted(path.name for path in folder.iterdir()))
"""


def run(
    disk: Path,
    size: str,
    script: str,
    *arguments: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script in a namespace of its own, in which a small disk is mounted on `disk`."""
    disk.mkdir()
    small = ["unshare", "-m", "sh", "-c", SMALL_DISK, size, str(disk)]
    if not shutil.which("unshare"):
        pytest.skip("needs root, to mount a small disk")
    if subprocess.run([*small, "true"]).returncode:
        pytest.skip("needs root, to mount a small disk")
    python = [sys.executable, "-c", script, str(disk), *arguments]
    done = subprocess.run(
        [*small, *python],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done


def train(tmp_path: Path, when: str) -> tuple[Path, str]:
    """Return the experiment after a training, and what it logged."""
    exp = tmp_path / "kept"
    done = run(tmp_path / "disk", "256k", TRAINING, str(exp), when)
    return exp, done.stderr


def steps_of(exp: Path) -> list[int]:
    text = (exp / "metrics.jsonl").read_text()
    return [json.loads(line)["step"] for line in text.splitlines()]


@pytest.mark.parametrize("when", ["begin", "later"])
def test_rows_are_delayed_and_none_is_lost(tmp_path, when):
    exp, logged = train(tmp_path, when)
    every = list(range(1, 151))
    assert steps_of(exp) == every
    events = EventAccumulator(
        str(exp / "tensorboard"),
        size_guidance={"scalars": 0},
    )
    events.Reload()
    losses = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert losses == [(i, i / 8) for i in every]
    log = (exp / "train.log").read_text()
    for step in every:
        assert f"step {step}/1000 " in log

    for name in ("metrics.jsonl", "train.log", "tensorboard/events"):
        where = f"{tmp_path}/disk/{name}"
        lines = [line for line in logged.splitlines() if line.startswith(where)]
        assert len(lines) == 2, logged
        assert "No space left on device" in lines[0]
        assert lines[1].endswith(": written again, nothing is missing")
    assert "Traceback" not in logged
    assert "Logging error" not in logged


def test_missing_rows_are_reported_at_the_end(tmp_path):
    exp, logged = train(tmp_path, "never")
    steps = steps_of(exp)
    assert 50 <= len(steps) < 150
    assert steps == list(range(1, len(steps) + 1))
    assert f"metrics.jsonl: the last {150 - len(steps)} records are missing" in logged


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path):
    """8 MB do not fit on 4 MiB; the next checkpoint, which fits, is written again."""
    disk = tmp_path / "disk"
    done = run(disk, "4m", CHECKPOINTS)
    line, names = done.stdout.splitlines()
    assert line.startswith(f"{disk}/step_00000002: ")
    assert "the disk is full" in line
    assert " 7.6 " in line
    assert "step_00000001 remains" in line
    assert names == "step_00000001 step_00000003"
