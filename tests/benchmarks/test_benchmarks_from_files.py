"""Benchmarks of what begins with files: a training, an extraction, a start. See benchmarks/."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import pytest
import torch

from benchmarks import resting

ROOT = Path(__file__).parents[2]
PEER = os.environ.get("SPEAKERLAB_3DSPEAKER", "")  # a checkout
SCRIPTS = ("end_to_end.py", "extract.py", "startup.py")


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"benchmarks/{script}", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)


def rows_of(path: Path, script: str, *words: str) -> dict[str, dict]:
    """The rows that a script writes, beside the peer where there is one."""
    peer = [f"--peer={PEER}"] if PEER else []
    done = run(script, *words, *peer, f"--json={path}")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    for name, row in rows.items():
        assert row["ours"] > 0 and name in done.stdout
        if row["peer"] is not None:
            assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])
    return rows


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_peer_that_is_none_is_refused(tmp_path, script):
    done = run(script, f"--peer={tmp_path}")
    assert done.returncode == 2
    assert f"--peer: must be a checkout of 3D-Speaker, got {tmp_path}" in done.stderr


def count_up(counter: Synchronized) -> None:
    while True:
        counter.value += 1
        time.sleep(0.001)


def test_workers_rest_outside_of_their_turn():
    context = multiprocessing.get_context("fork")
    counter = context.Value("q", 0)
    worker = context.Process(target=count_up, args=(counter,), daemon=True)
    worker.start()
    counted: list[int] = []

    def work() -> None:
        began = counter.value
        while counter.value < began + 5:
            time.sleep(0.001)
        counted.append(counter.value - began)

    try:
        for _ in range(2):
            assert resting.timed(work, torch.device("cpu")) > 0
            time.sleep(0.05)  # the signal has arrived
            before = counter.value
            time.sleep(0.05)
            assert counter.value == before
    finally:
        worker.kill()
    assert min(counted) >= 5


@pytest.mark.slow
def test_a_training_from_files(tmp_path):
    words = ["--model=campplus", "--seconds=0.1", "--crop-seconds=1", "--threads=1"]
    rows = rows_of(tmp_path / "rows.json", "end_to_end.py", *words)
    assert list(rows) == ["end_to_end.campplus.fp32", "end_to_end.campplus"]
    assert [row["precision"] for row in rows.values()] == ["fp32", "bf16"]
    assert min(row["peak_mib"] for row in rows.values()) > 100


@pytest.mark.slow
def test_an_extraction(tmp_path):
    words = ["--seconds=0.1", "--threads=1", "--utterance-seconds=2"]
    rows = rows_of(tmp_path / "rows.json", "extract.py", *words)
    assert list(rows) == ["extract.campplus.fp32", "extract.campplus.bf16"]


@pytest.mark.slow
def test_a_start(tmp_path):
    rows = rows_of(tmp_path / "rows.json", "startup.py", "--turns=2", "--threads=1")
    names = ("help", "train_help", "wrong_option", "first_step", "first_step.campplus")
    assert list(rows) == [f"startup.{name}" for name in names]
    assert {row["unit"] for row in rows.values()} == {"s"}
    assert rows["startup.help"]["ours"] < rows["startup.first_step"]["ours"]
