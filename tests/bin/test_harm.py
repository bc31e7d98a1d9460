"""Trainings that are harmed or stopped: steps skipped, rolled back, saved and resumed."""

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
from tiny import card, checkpoints, losses, read_json, rows, slow, weights

from speakerlab.training.checkpoint import read_note

HARMED = Path(__file__).with_name("harmed_training.py")


@pytest.fixture
def train_harmed(run, settings):
    """train_harmed(exp, "nan 1 3 100", *settings, ranks=1, code=0) -> what it wrote to stderr."""

    def train(exp, harm, *overrides, **options):
        arguments = (*harm.split(), "--exp", exp, *settings, *overrides)
        return run(HARMED, *arguments, **options).stderr

    return train


def test_a_step_with_a_nan_is_skipped_whole(train_harmed, tmp_path):
    exp = tmp_path / "exp"
    train_harmed(exp, "nan 0 2 2", "training.num_epochs=1")
    # The number of skipped steps so far.
    skipped = [row["skipped"] for row in rows(exp, "train")]
    assert skipped == [0, 0, 1, 1, 1, 1]
    assert "NaN" not in (exp / "metrics.jsonl").read_text()
    assert math.isfinite(card(exp)["best_valid_eer"])


def test_nan_in_every_step_of_one_rank_ends_with_code_3_and_a_report(
    train_harmed, tmp_path
):
    """Steps 3 to 22 are bad; two roll-backs to step 2, each with another order; then the end."""
    exp = tmp_path / "exp"
    overrides = [
        "runtime.micro_batch=4",
        "training.num_epochs=6",
        "runtime.log_every_seconds=100",
    ]
    text = train_harmed(exp, "nan 1 3 1000", *overrides, ranks=2, code=3)

    pattern = r"rank 1: the first .* output is in (\S+), utterances (.*)"
    places, names = zip(*re.findall(pattern, text))
    assert set(places) == {"embedder.backbone.head.conv1"}
    assert len(set(names)) == 3
    assert text.count("step 22: 20 steps in a row") >= 3
    for share in ("0.5", "0.25"):
        change = f"new data order, {share} of the learning rate"
        assert re.search(rf"{change}\) to step 2 of 36", text)
    assert "training.lr" in text
    assert "runtime.precision=fp32" in text

    report = read_json(exp / "nan_report.json")
    assert report["step"] == 22
    assert report["attempt"] == 2
    assert report["device"] == "cpu"
    good, bad = report["micro_batches"]
    assert good["rank"] == 0
    assert good["is_finite"] is True
    assert bad["rank"] == 1
    assert bad["is_finite"] is False
    assert len(bad["utterances"]) == 4
    assert bad["loss"] == "nan"
    assert not (exp / "model").exists()


RANKS_AND_PRECISIONS = [
    (1, "fp32"),
    slow(2, "fp32"),
    slow(2, "bf16"),
]


@pytest.mark.parametrize(("ranks", "precision"), RANKS_AND_PRECISIONS)
def test_infinity_for_a_while_is_rolled_back_and_the_run_ends_well(
    train_harmed, tmp_path, ranks, precision
):
    exp = tmp_path / "exp"
    overrides = [
        "training.num_epochs=5",
        f"runtime.precision={precision}",
        "runtime.device=cpu",
        f"runtime.micro_batch={8 // ranks}",
    ]
    last_rank = ranks - 1
    train_harmed(exp, f"inf-once {last_rank} 3 1000", *overrides, ranks=ranks)
    train_rows = rows(exp, "train")
    steps = [row["step"] for row in train_rows]
    assert steps == list(range(1, 31))
    attempts = [row["attempt"] for row in train_rows]
    assert attempts == [0] * 2 + [1] * 28
    # The skipped steps of the first attempt were undone.
    assert train_rows[-1]["skipped"] == 0
    # The warm-up goes from step 2 to step 3, at half the learning rate.
    warm_up_lr = train_rows[1]["lr"] / 2 * 3
    expected = pytest.approx(warm_up_lr / 2)
    assert train_rows[2]["lr"] == expected
    newest = checkpoints(exp)[-1]
    assert newest.name == "step_00000030_attempt_1"
    assert read_note(newest).attempt == 1


def test_a_validation_that_is_not_finite_is_rolled_back(train_harmed, tmp_path):
    exp = tmp_path / "exp"
    train_harmed(exp, "valid-inf-once 0 1 1000", "training.num_epochs=3")
    train_rows = rows(exp, "train")
    assert train_rows[-1]["attempt"] == 1
    assert train_rows[-1]["step"] == 18
    report = read_json(exp / "nan_report.json")
    assert re.match(r"step \d+: 6 of 6 validation embeddings ", report["error"])


@pytest.mark.parametrize("step", [6, slow(12)])
def test_a_validation_that_was_stopped_is_made_up_for(
    train, train_harmed, tmp_path, step
):
    overrides = ["training.num_epochs=2", "training.checkpoint_every_steps=100"]
    overrides += ["training.valid_every_epochs=1"]
    whole = tmp_path / "whole"
    exp = tmp_path / "cut"
    train(whole, *overrides)
    # The second time, the run stops before any step.
    harm = f"valid-stop 0 {step} {step}"
    num_validations = step // 6 - 1
    for _ in range(2):
        code = 128 + signal.SIGTERM
        text = train_harmed(exp, harm, *overrides, code=code)
        assert f"stopped by SIGTERM at step {step}" in text
        expected = rows(whole, "valid")[:num_validations]
        assert rows(exp, "valid") == expected
    train(exp, *overrides)
    expected = rows(whole, "valid")
    assert rows(exp, "valid") == expected
    assert weights(exp) == weights(whole)


OF_MEMORY = ["runtime.micro_batch=4", "training.checkpoint_every_steps=5"]
OUT_OF_MEMORY = r"step 7: out of memory on rank \d: CUDA out of memory"


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm", ["full-back 1 7 1000", "full 0 7 1000", "full 1 7 1000"]
)
def test_out_of_memory_ends_all_ranks_with_code_5_and_a_note(
    train_harmed, tmp_path, harm
):
    """All wait for the one that failed and keep the last checkpoint; their launcher retries."""
    exp = tmp_path / "exp"
    began = time.monotonic()
    text = train_harmed(exp, harm, *OF_MEMORY, ranks=2, code=5)
    assert time.monotonic() - began < 60
    assert re.search(OUT_OF_MEMORY, text)
    assert "retrying" not in text
    # With the exit code of a lost rank, a host would not retry.
    assert "lost another rank" not in text
    assert (exp / "out_of_memory").read_text() == "4\n"
    assert checkpoints(exp)[-1].name == "step_00000005"

    smaller = [*OF_MEMORY, "runtime.micro_batch=2"]
    text = train_harmed(exp, "nan 9 0 0", *smaller, ranks=2)
    assert "resuming from step 5 of 24" in text
    steps = list(losses(exp))
    assert steps == list(range(1, 25))


def test_a_training_that_runs_out_of_memory_saves_and_retries_with_a_smaller_micro_batch(
    train_harmed, tmp_path
):
    """The second attempt is a fresh process, which nothing harms; it resumes before the step."""
    exp = tmp_path / "exp"
    text = train_harmed(exp, "full-back 0 7 1000", *OF_MEMORY)
    retrying = "out of memory with a micro-batch of 4; retrying .*\n"
    first, second = re.split(retrying, text)
    assert re.search(OUT_OF_MEMORY, first)
    assert "resuming from step 7 of 24" in second
    # The log has both attempts.
    assert "out of memory" in (exp / "train.log").read_text()
    steps = list(losses(exp))
    assert steps == list(range(1, 25))


def test_out_of_memory_for_the_second_time_ends_the_run_with_code_5(
    train_harmed, tmp_path
):
    below = ["--below-micro-batch", "8"]
    exp = tmp_path / "exp"
    text = train_harmed(exp, "full-back 0 7 1000", *OF_MEMORY, *below, code=5)
    last = text.splitlines()[-1]
    assert "out of memory again with a micro-batch of 4; " in last
    assert "data.crop_seconds" in last
    assert "retrying" not in text


def test_out_of_memory_outside_of_a_step_is_one_line(train_harmed, tmp_path):
    text = train_harmed(tmp_path / "exp", "valid-full 0 0 1000", code=1)
    assert "rank 0: out of memory outside of a step: CUDA out of memory" in text


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        slow(signal.SIGTERM),
        slow(signal.SIGUSR1),
    ],
)
def test_a_run_stopped_by_a_signal_saves_and_resumes_bit_identically(
    number, trained, train, settings, environment, tmp_path
):
    exp = tmp_path / "exp"
    output = tmp_path / "output"
    arguments = ["-m", "speakerlab", "train", "--exp", exp, *settings]
    process = start_forked(arguments, environment, output)
    wait_for(lambda: len(rows(exp, "train")) >= 5)
    os.kill(process.pid, number)
    process.join(60)
    text = output.with_suffix(".err").read_text()
    assert process.exitcode == 128 + number
    assert "Traceback" not in text
    step = read_note(checkpoints(exp)[-1]).step
    assert f"stopped by {number.name} at step {step}" in text
    done = train(exp)
    assert f"resuming from step {step} of 24" in done.stderr
    assert weights(exp) == weights(trained)
    assert losses(exp) == losses(trained)


@pytest.mark.slow
def test_the_launcher_passes_sigterm_on_and_two_ranks_resume_bit_identically(
    train, train_command, environment, tmp_path
):
    """The checkpoint is of the step at which the signal came, outside the schedule."""
    overrides = ["training.checkpoint_every_steps=1000", "runtime.micro_batch=4"]
    whole = tmp_path / "whole"
    exp = tmp_path / "cut"
    train(whole, *overrides, ranks=2)
    arguments = train_command(exp, 2, *overrides)
    first = subprocess.Popen(
        arguments,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: len(rows(exp, "train")) >= 5)
    asked = time.monotonic()
    first.send_signal(signal.SIGTERM)
    _, text = first.communicate(timeout=60)
    assert time.monotonic() - asked < 25
    assert first.returncode == 128 + signal.SIGTERM, text
    assert "stopped by SIGTERM at step" in text
    assert "Traceback" not in text

    (checkpoint,) = checkpoints(exp)
    note = read_note(checkpoint)
    assert not note.scheduled
    text = train(exp, *overrides, ranks=2).stderr
    assert f"resuming from step {note.step} of 24" in text
    assert weights(exp) == weights(whole)
    assert losses(exp) == losses(whole)
