"""Trainings that are harmed or stopped: steps skipped, rolled back, saved and resumed."""

import json
import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from forked import start_forked
from processes import wait_for
from tiny import card, checkpoints, losses, rows, weights

from speakerlab.training.checkpoint import read_note

HARMED = Path(__file__).with_name("harmed_training.py")


@pytest.fixture
def train_harmed(run, settings):
    """train_harmed(exp, "nan 1 3 100", *settings, ranks=1, code=0) -> what it wrote to stderr."""

    def train(exp, harm, *more, **how):
        return run(HARMED, *harm.split(), "--exp", exp, *settings, *more, **how).stderr

    return train


def test_a_step_with_a_nan_is_skipped_whole(train_harmed, tmp_path):
    exp = tmp_path / "exp"
    train_harmed(exp, "nan 0 2 2", "training.num_epochs=1")
    found = rows(exp, "train")
    assert [row["skipped"] for row in found] == [0, 0, 1, 1, 1, 1]
    assert "NaN" not in (exp / "metrics.jsonl").read_text()
    assert math.isfinite(card(exp)["best_valid_eer"])


def test_nan_in_every_step_of_one_rank_ends_with_code_3_and_a_report(train_harmed, tmp_path):
    """Steps 3 to 22 are bad; two roll-backs to step 2, each with another order; then the end."""
    exp, more = tmp_path / "exp", ["training.num_epochs=6", "runtime.log_every_seconds=100"]
    text = train_harmed(exp, "nan 1 3 1000", "runtime.micro_batch=4", *more, ranks=2, code=3)
    found = re.findall(r"rank 1: the first .* output is in (\S+), utterances (.*)", text)
    places, names = zip(*found)
    assert set(places) == {"embedder.backbone.head.conv1"} and len(set(names)) == 3
    assert text.count("step 22: 20 steps in a row") >= 3
    for share in ("0.5", "0.25"):
        assert re.search(rf"new data order, {share} of the learning rate\) to step 2 of 36", text)
    assert "training.lr" in text and "runtime.precision=fp32" in text
    report = json.loads((exp / "nan_report.json").read_text())
    assert (report["step"], report["attempt"], report["device"]) == (22, 2, "cpu")
    good, bad = report["micro_batches"]
    assert (good["rank"], good["is_finite"], bad["rank"], bad["is_finite"]) == (0, True, 1, False)
    assert len(bad["utterances"]) == 4 and bad["loss"] == "nan"
    assert not (exp / "model").exists()


@pytest.mark.parametrize(
    ("ranks", "precision"),
    [(1, "fp32"), *(pytest.param(2, p, marks=pytest.mark.slow) for p in ("fp32", "bf16"))],
)
def test_infinity_for_a_while_is_rolled_back_and_the_run_ends_well(
    train_harmed, tmp_path, ranks, precision
):
    exp, more = (
        tmp_path / "exp",
        ["training.num_epochs=5", f"runtime.precision={precision}", "runtime.device=cpu"],
    )
    more += [f"runtime.micro_batch={8 // ranks}"]
    train_harmed(exp, f"inf-once {ranks - 1} 3 1000", *more, ranks=ranks)
    found = rows(exp, "train")
    assert [row["step"] for row in found] == list(range(1, 31))
    assert [row["attempt"] for row in found] == [0] * 2 + [1] * 28
    assert found[-1]["skipped"] == 0  # those of the first attempt were undone
    assert found[2]["lr"] == pytest.approx(found[1]["lr"] / 2 * 3 / 2)  # the warm-up's, halved
    newest = checkpoints(exp)[-1]
    assert newest.name == "step_00000030_attempt_1" and read_note(newest).attempt == 1


def test_a_validation_that_is_not_finite_is_rolled_back(train_harmed, tmp_path):
    exp = tmp_path / "exp"
    train_harmed(exp, "valid-inf-once 0 1 1000", "training.num_epochs=3")
    found = rows(exp, "train")
    assert found[-1]["attempt"] == 1 and found[-1]["step"] == 18
    report = json.loads((exp / "nan_report.json").read_text())
    assert re.match(r"step \d+: 6 of 6 validation embeddings ", report["error"])


@pytest.mark.parametrize("step", [6, 12])
def test_a_validation_that_was_stopped_is_made_up_for(train, train_harmed, tmp_path, step):
    more = ["training.num_epochs=2", "training.checkpoint_every_steps=100"]
    more += ["training.valid_every_epochs=1"]
    whole, exp = tmp_path / "whole", tmp_path / "cut"
    train(whole, *more)
    for _ in range(2):  # the second time before any step
        text = train_harmed(exp, f"valid-stop 0 {step} {step}", *more, code=128 + signal.SIGTERM)
        assert f"stopped by SIGTERM at step {step}" in text
        assert rows(exp, "valid") == rows(whole, "valid")[: step // 6 - 1]
    train(exp, *more)
    assert rows(exp, "valid") == rows(whole, "valid")
    assert weights(exp) == weights(whole)


@pytest.mark.parametrize(
    ("ranks", "harm"),
    [
        (2, "full-back 1 7 1000"),
        pytest.param(2, "full 0 7 1000", marks=pytest.mark.slow),
        pytest.param(2, "full 1 7 1000", marks=pytest.mark.slow),
        (1, "full-back 0 7 1000"),
    ],
)
def test_out_of_memory_saves_the_state_before_the_step(train_harmed, tmp_path, ranks, harm):
    """Several ranks, which wait for the one that failed, return to the last checkpoint."""
    exp, began = tmp_path / "exp", time.monotonic()
    more = ["runtime.micro_batch=4", "training.checkpoint_every_steps=5"]
    text = train_harmed(exp, harm, *more, ranks=ranks, code=5)
    assert time.monotonic() - began < 60
    assert re.search(r"step 7: out of memory on rank \d: CUDA out of memory", text)
    assert "lost another rank" not in text  # with another exit code, a host would not retry
    assert (exp / "out_of_memory").read_text() == "4\n"
    last = 7 if ranks == 1 else 5
    assert checkpoints(exp)[-1].name == f"step_0000000{last}"
    text = train_harmed(exp, "nan 9 0 0", *more, "runtime.micro_batch=2", ranks=ranks)
    assert f"resuming from step {last} of 24" in text
    assert list(losses(exp)) == list(range(1, 25))


def test_out_of_memory_outside_of_a_step_is_one_line(train_harmed, tmp_path):
    text = train_harmed(tmp_path / "exp", "valid-full 0 0 1000", code=1)
    assert "rank 0: out of memory outside of a step: CUDA out of memory" in text


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_run_stopped_by_a_signal_saves_and_resumes_bit_identically(
    number, trained, train, settings, environment, tmp_path
):
    exp, output = tmp_path / "exp", tmp_path / "output"
    words = ["-m", "speakerlab", "train", "--exp", exp, *settings]
    process = start_forked(words, environment, output)
    wait_for(lambda: len(rows(exp, "train")) >= 5)
    os.kill(process.pid, number)
    process.join(60)
    text = output.with_suffix(".err").read_text()
    assert process.exitcode == 128 + number and "Traceback" not in text
    step = read_note(checkpoints(exp)[-1]).step
    assert f"stopped by {number.name} at step {step}" in text
    assert f"resuming from step {step} of 24" in train(exp).stderr
    assert weights(exp) == weights(trained) and losses(exp) == losses(trained)


def test_torchrun_hands_sigterm_on_and_two_ranks_resume_bit_identically(
    train, train_command, environment, tmp_path
):
    """The checkpoint is of the step at which the signal came, outside the schedule."""
    more = ["training.checkpoint_every_steps=1000", "runtime.micro_batch=4"]
    whole, exp = tmp_path / "whole", tmp_path / "cut"
    train(whole, *more, ranks=2)
    words = train_command(exp, 2, *more)
    first = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(rows(exp, "train")) >= 5)
    asked = time.monotonic()
    first.send_signal(signal.SIGTERM)
    _, text = first.communicate(timeout=60)
    assert time.monotonic() - asked < 25
    assert first.returncode == 128 + signal.SIGTERM, text
    assert "stopped by SIGTERM at step" in text and "Traceback" not in text
    (kept,) = checkpoints(exp)
    note = read_note(kept)
    assert not note.scheduled
    assert f"resuming from step {note.step} of 24" in train(exp, *more, ranks=2).stderr
    assert weights(exp) == weights(whole) and losses(exp) == losses(whole)
