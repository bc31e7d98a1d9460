"""The benchmarks of growth, on sizes so small that their figures mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "row", "some"),
    [
        (["growth.py", "--sizes", "200"], "growth.head.200.{}", ["whole_step", "one_of_8_peak"]),
        (["growth.py", "--sizes", "200"], "growth.trials.200.{}", ["eer"]),
        (["manifest.py", "--utterances", "5000"], "manifest.{}.5000", ["compile", "worker_pss"]),
    ],
)
def test_each_size_gives_its_rows(tmp_path, words, row, some):
    script, *options = words
    path = tmp_path / "rows.json"
    command = [sys.executable, f"benchmarks/{script}", *options, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {found["name"]: found for found in json.loads(path.read_text())}
    for name in some:
        assert rows[row.format(name)]["ours"] > 0 and rows[row.format(name)]["commit"]
        assert f"| {name} | " in done.stdout
