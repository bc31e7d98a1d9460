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
# of conf/campplus_tiny.yaml
STEPS = 20
CROPS = 32
CROP_SECONDS = 2.0
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
    command = [
        sys.executable,
        "-m",
        "speakerlab",
        "train",
        "--exp",
        exp,
        "--config",
        *layers,
    ]
    settings = [f"{key}={value}" for key, value in values.items()]
    command += ["--set", *settings, *extra]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(
            f"{tree}: training failed with exit code"
            f" {done.returncode}\n{done.stderr[-2000:]}"
        )


def read_rows(exp: Path) -> list[dict[str, Any]]:
    """The metrics that must be equal, one dictionary per row."""
    text = (exp / "metrics.jsonl").read_text(encoding="utf-8")
    keys = ("kind", "step", *COMPARED)
    rows = []
    for line in text.splitlines():
        metrics = json.loads(line)
        rows.append({key: metrics[key] for key in keys if key in metrics})
    return rows


def list_differences(ours: Path, base: Path) -> list[str]:
    """One line for each metric and each published tensor that differs."""
    import torch
    from safetensors.torch import load_file

    rows = read_rows(ours)
    base_rows = read_rows(base)
    lines = []
    for row, base_row in zip(rows, base_rows, strict=False):
        if row != base_row:
            lines.append(f"{row} at the base: {base_row}")
    if len(rows) != len(base_rows):
        lines.append(f"{len(rows)} rows of metrics, {len(base_rows)} at the base")
    for file in ("embedder.safetensors", "head.safetensors"):
        tensors = load_file(ours / "model" / file)
        base_tensors = load_file(base / "model" / file)
        for name in sorted(tensors.keys() | base_tensors.keys()):
            is_in_both = name in tensors and name in base_tensors
            if not is_in_both or not torch.equal(tensors[name], base_tensors[name]):
                lines.append(f"{file}: {name} differs")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("base", help="commit to compare the working tree with")
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT / "egs/mini/data",
        help="data of mini",
    )
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        help="settings of both trainings",
    )
    args = parser.parse_args()
    if not (args.data / "train" / "shards").exists():
        script = str(ROOT / "egs/mini/run.sh")
        recipe = ["bash", script, "--stop-stage", "2"]
        recipe += ["--data", str(args.data)]
        subprocess.run(recipe, check=True)
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        ours = Path(folder, "ours")
        base = Path(folder, "base")
        add = ["add", "--quiet", "--detach", str(tree), args.base]
        subprocess.run([*git, *add], check=True)
        try:
            train(tree, base, args.data, args.set)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        train(ROOT, ours, args.data, args.set)
        lines = list_differences(ours, base)
        losses = []
        for row in read_rows(ours):
            if row["kind"] == "train":
                losses.append(row["loss"])
        last = losses[-1]
    for line in lines:
        print(line)
    if lines:
        sys.exit(1)
    print(f"{STEPS} steps are bit-identical to {args.base}; the last loss is {last}")


if __name__ == "__main__":
    main()
