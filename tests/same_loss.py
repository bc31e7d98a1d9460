"""Train 20 steps of mini at two commits and compare every loss and every weight bit for bit.

    make same-loss BASE=main~3            # the working tree against a commit

A refactoring must not change a single bit of either. Prints one line per difference and exits with
1 if there are any. The corpus is made by `egs/mini/run.sh` if it is not there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS, CROPS, CROP_SECONDS = 20, 32, 2.0  # of conf/campplus_tiny.yaml
COMPARED = ("loss", "accuracy", "grad_norm", "lr", "margin", "silent", "eer")


def train(tree: Path, exp: Path, data: Path, extra: list[str]) -> None:
    """Train in the checkout `tree`, on one process without data workers."""
    layers = [tree / "conf/campplus_tiny.yaml", tree / "egs/mini/conf.yaml"]
    values = {
        "data.dir": data,
        "training.num_epochs": 1,
        "training.epoch_hours": STEPS * CROPS * CROP_SECONDS / 3600,
        "training.warmup_epochs": 0.2,
        "training.margin": "{start_epoch: 0.3, end_epoch: 0.8}",
        "runtime.num_workers": 0,
        "runtime.log_every_steps": 1,
    }
    command = [sys.executable, "-m", "speakerlab", "train", "--exp", exp, "--config", *layers]
    command += ["--set", *(f"{key}={value}" for key, value in values.items()), *extra]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=tree, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{tree}: training failed with exit code {done.returncode}\n{done.stderr[-2000:]}")


def read_rows(exp: Path) -> list[dict[str, Any]]:
    """The metrics that must be equal, one dictionary per row."""
    lines = (exp / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    keys = ("kind", "step", *COMPARED)
    return [{key: row[key] for key in keys if key in row} for row in map(json.loads, lines)]


def list_differences(ours: Path, base: Path) -> list[str]:
    """One line for each metric and each published tensor that differs."""
    import torch
    from safetensors.torch import load_file

    rows, base_rows = read_rows(ours), read_rows(base)
    lines = [f"{a} at the base: {b}" for a, b in zip(rows, base_rows, strict=False) if a != b]
    if len(rows) != len(base_rows):
        lines.append(f"{len(rows)} rows of metrics, {len(base_rows)} at the base")
    for file in ("embedder.safetensors", "head.safetensors"):
        a, b = load_file(ours / "model" / file), load_file(base / "model" / file)
        names = sorted(a.keys() | b.keys())
        lines += [
            f"{file}: {name} differs"
            for name in names
            if name not in a or name not in b or not torch.equal(a[name], b[name])
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("base", help="commit to compare the working tree with")
    parser.add_argument("--data", type=Path, default=ROOT / "egs/mini/data", help="data of mini")
    parser.add_argument("--set", nargs="*", default=[], help="settings of both trainings")
    args = parser.parse_args()
    if not (args.data / "train" / "shards").exists():
        recipe = ["bash", str(ROOT / "egs/mini/run.sh"), "--stop-stage", "2"]
        subprocess.run([*recipe, "--data", str(args.data)], check=True)
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree, ours, base = (Path(folder, name) for name in ("tree", "ours", "base"))
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), args.base], check=True)
        try:
            train(tree, base, args.data, args.set)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        train(ROOT, ours, args.data, args.set)
        lines = list_differences(ours, base)
        last = [row["loss"] for row in read_rows(ours) if row["kind"] == "train"][-1]
    for line in lines:
        print(line)
    if lines:
        sys.exit(1)
    print(f"{STEPS} steps are bit-identical to {args.base}; the last loss is {last}")


if __name__ == "__main__":
    main()
