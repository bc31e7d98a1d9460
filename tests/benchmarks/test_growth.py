"""The benchmarks of growth, on sizes so small that their figures mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named", "shown"),
    [
        (
            ["growth.py", "--sizes", "200"],
            ["growth.head.200.whole_step", "growth.start.200.publish", "growth.trials.200.eer"],
            "| whole_step | ",
        ),
        (
            ["manifest.py", "--utterances", "5000"],
            ["manifest.compile.5000", "manifest.worker_private.5000"],
            "| compile | ",
        ),
    ],
)
def test_each_size_gives_its_rows(tmp_path, words, named, shown):
    script, *options = words
    path = tmp_path / "rows.json"
    command = [sys.executable, f"benchmarks/{script}", *options, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(path.read_text())}
    assert all(rows[name]["ours"] > 0 and rows[name]["commit"] for name in named)
    assert all(name in done.stdout for name in rows)
    assert shown in done.stdout
