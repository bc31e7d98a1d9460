"""The benchmarks of growth, on sizes so small that their figures mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, names",
    [
        (["growth.py", "--sizes", "200"], ["head.200.whole_step", "trials.200.eer"]),
        (["manifest.py", "--utterances", "5000"], ["compile.5000", "worker3_private.5000"]),
    ],
)
def test_each_size_gives_its_rows(tmp_path, words, names):
    script, *options = words
    path = tmp_path / "rows.json"
    command = [sys.executable, f"benchmarks/{script}", *options, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    values = {row["name"].partition(".")[2]: row["ours"] for row in json.loads(path.read_text())}
    assert all(values[name] > 0 for name in names)
    assert all(name in done.stdout for name in values)
