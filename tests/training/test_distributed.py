"""Collectives of two ranks, their failures, and the loss of a rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("collective_ranks.py")


def run_ranks(folder: Path, start_method: str) -> list[dict]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(SCRIPT), str(folder), start_method],
        capture_output=True,
        text=True,
        timeout=100,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(SCRIPT.parents[2]),
        },
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_both_ranks_get_the_same_values(tmp_path):
    first, second = run_ranks(tmp_path, "live")
    for values in (first, second):
        # objects of different sizes, in the order of the ranks
        assert values["every"] == [[0, ""], [1, "x"]]
        assert values["still"] == [0, 1]
        assert values["copied"] == [0.0, 0.0]
        assert values["sum"] == [2.0, 1.0]
        assert values["largest"] == [1, 5]
        assert values["good"] is None
        assert values["first"] == 42
        assert values["peer"] == "there"
        assert values["tags"].startswith("RuntimeError: barrier: ")
        assert "['published', 'checkpoint']" in values["tags"]

    # rank 0 alone runs the function, and both raise its error
    fault = "data/train: no such folder; run stage 1"
    assert first["failed"] == f"ValueError: {fault}"
    assert second["failed"] == f"ValueError: rank 0 failed: {fault}"


@pytest.mark.slow
def test_a_lost_rank_is_detected(tmp_path):
    (second,) = run_ranks(tmp_path, "die")
    assert second["peer"] == "lost"
