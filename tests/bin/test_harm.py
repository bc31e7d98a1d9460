"""Two ranks, one of which is harmed: both do the same, and the run ends as it should."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speakerlab.training.checkpoint import read_note

HARMED = Path(__file__).with_name("harmed_training.py")
LAUNCH = ["-m", "speakerlab.bin.launch", "--standalone", "--max-restarts", "0"]
MORE = ["runtime.micro_batch=4", "runtime.log_every_seconds=100"]


@pytest.fixture
def train_harmed(run, settings):
    """train_harmed(exp, ranks, "nan 1 3 100", *settings) -> the finished process."""

    def train(exp, ranks, harm, *more):
        launch = [*LAUNCH, "--nproc-per-node", str(ranks)] if ranks > 1 else []
        return run(*launch, HARMED, *harm.split(), "--exp", exp, *settings, *MORE, *more)

    return train


def rows(exp):
    lines = (exp / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def test_nothing_but_nan_on_one_rank_ends_with_code_3_and_a_report(train_harmed, tmp_path):
    """Steps 3 to 22 are bad; two roll-backs to step 2, each with another order; then the end."""
    done = train_harmed(tmp_path / "exp", 2, "nan 1 3 1000", "training.num_epochs=6")
    assert done.returncode == 3, done.stderr
    found = re.findall(r"rank 1: the first output .* that of (\S+), at (.*)", done.stderr)
    places, names = zip(*found)
    assert set(places) == {"embedder.backbone.head.conv1"} and len(set(names)) == 3
    assert done.stderr.count("step 22: 20 steps in a row had no finite gradient") >= 3
    assert "another order, 0.5 of the learning rate, from step 2 of 36" in done.stderr
    assert "another order, 0.25 of the learning rate, from step 2 of 36" in done.stderr
    assert "given up: lower training.lr, or use runtime.precision=fp32" in done.stderr
    assert "got exit code 3" in done.stderr and "Traceback" not in done.stderr
    report = json.loads((tmp_path / "exp" / "nan_report.json").read_text())
    assert (report["step"], report["attempt"], report["device"]) == (22, 2, "cpu")
    good, bad = report["micro_batches"]
    assert (good["rank"], good["is_finite"], bad["rank"], bad["is_finite"]) == (0, True, 1, False)
    assert len(bad["utterances"]) == 4 and bad["loss"] == "nan"
    assert not list((tmp_path / "exp").glob("model"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_inf_for_a_while_on_one_rank_is_rolled_back_and_the_run_ends_well(
    train_harmed, tmp_path, precision
):
    settings = ["training.num_epochs=5", f"runtime.precision={precision}"]
    done = train_harmed(tmp_path / "exp", 2, "inf-once 1 3 1000", *settings)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "exp")
    assert [row["step"] for row in found] == list(range(1, 31))
    assert [row["attempt"] for row in found] == [0] * 2 + [1] * 28
    assert found[-1]["skipped"] == 0  # those of the first attempt were undone
    lr = [row["lr"] for row in found]
    assert lr[2] == pytest.approx(lr[1] / 2 * 3 / 2)  # the warm-up's third step, halved
    newest = max((tmp_path / "exp" / "checkpoints").iterdir())
    assert newest.name == "step_00000030_attempt_1" and read_note(newest).attempt == 1


@pytest.mark.parametrize(
    ("ranks", "harm"),
    [
        (2, "full-back 1 7 1000"),
        pytest.param(2, "full 0 7 1000", marks=pytest.mark.slow),
        pytest.param(2, "full 1 7 1000", marks=pytest.mark.slow),
        pytest.param(1, "full-back 0 7 1000", marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_saves_what_was_before_the_step(train_harmed, tmp_path, ranks, harm):
    exp = tmp_path / "exp"
    began = time.monotonic()
    done = train_harmed(exp, ranks, harm, "training.checkpoint_every_steps=5")
    assert done.returncode == 5, done.stderr
    assert time.monotonic() - began < 60
    assert re.search(r"step 7: out of memory on rank \d: CUDA out of memory", done.stderr)
    assert "Traceback" not in done.stderr
    assert (exp / "out_of_memory").read_text() == "4\n"
    assert max(path.name for path in (exp / "checkpoints").iterdir()) == "step_00000007"
    done = train_harmed(exp, ranks, "nan 9 0 0", "runtime.micro_batch=2")
    assert done.returncode == 0, done.stderr
    assert "resuming from step 7 of 24" in done.stderr
    assert [row["step"] for row in rows(exp)] == list(range(1, 25))


def wait_for(exp: Path, step: int) -> None:
    """Until the row of a step is written."""
    deadline = time.monotonic() + 60
    while not (exp / "metrics.jsonl").exists() or len(rows(exp)) < step:
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        (2, signal.SIGTERM),
        pytest.param(1, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_leaves_and_the_run_goes_on_with_the_same_bits(
    ranks, number, run, train_command, environment, tmp_path
):
    """The checkpoint is off the schedule, at whatever step it was."""
    more = ["training.num_epochs=5", "training.checkpoint_every_steps=1000", *MORE]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = run(*train_command(whole, ranks, *more))
    assert done.returncode == 0, done.stderr
    words = [sys.executable, *train_command(cut, ranks, *more)]
    first = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(cut, 5)
    asked = time.monotonic()
    os.kill(first.pid, number)
    _, text = first.communicate(timeout=60)
    assert time.monotonic() - asked < 25
    assert first.returncode == 128 + number, text
    assert f"stopped by {number.name} at step" in text and "Traceback" not in text
    (kept,) = (cut / "checkpoints").glob("step_*")
    note = read_note(kept)
    assert not note.scheduled
    done = run(*train_command(cut, ranks, *more))
    assert done.returncode == 0, done.stderr
    assert f"resuming from step {note.step} of 30" in done.stderr
    for name in ("embedder.safetensors", "head.safetensors"):
        assert (cut / "model" / name).read_bytes() == (whole / "model" / name).read_bytes()
    assert [row["loss"] for row in rows(cut)] == [row["loss"] for row in rows(whole)]
