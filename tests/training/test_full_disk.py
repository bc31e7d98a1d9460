"""A disk that fills up while rows are written, and is emptied: nothing ends, nothing is missing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# A file can be written to the end of its last page of 4 KiB, though the disk is full.
SMALL_DISK = 'mount -t tmpfs -o size=256k tmpfs "$0" && exec "$@"'
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


def can_mount(folder: Path) -> bool:
    command = ["unshare", "-m", "sh", "-c", SMALL_DISK, str(folder), "true"]
    return shutil.which("unshare") is not None and not subprocess.run(command).returncode


def train(tmp_path: Path, when: str) -> tuple[Path, str]:
    """(what is left of the experiment, what was said)"""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("mounts a small disk, so needs root")
    words = [sys.executable, "-c", TRAINING, str(disk), str(kept), when]
    command = ["unshare", "-m", "sh", "-c", SMALL_DISK, str(disk), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return kept, done.stderr


def steps_of(exp: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (exp / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("when", ["begin", "later"])
def test_rows_are_delayed_and_none_is_lost(tmp_path, when):
    exp, said = train(tmp_path, when)
    every = list(range(1, 151))
    assert steps_of(exp) == every
    events = EventAccumulator(str(exp / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(i, i / 8) for i in every]
    log = (exp / "train.log").read_text()
    assert [f"step {i}/1000 " in log for i in every] == [True] * 150
    for name in ("metrics.jsonl", "train.log", "tensorboard/events"):
        where = f"{tmp_path}/disk/{name}"
        told = [line for line in said.splitlines() if line.startswith(where)]
        assert len(told) == 2, said
        assert "No space left on device (0 KiB free)" in told[0]
        assert told[1].endswith(": written again, nothing is missing")
    assert "Traceback" not in said and "Logging error" not in said


def test_what_could_not_be_written_to_the_end_is_told(tmp_path):
    exp, said = train(tmp_path, "never")
    steps = steps_of(exp)
    assert 50 <= len(steps) < 150 and steps == list(range(1, len(steps) + 1))
    assert f"metrics.jsonl: the last {150 - len(steps)} records are missing" in said
