"""Curves of a training."""

import json
from pathlib import Path

from speakerlab.experiments.curves import read_curves


def write_rows(path: Path, rows) -> None:
    lines = [f"{json.dumps(row)}\n" for row in rows]
    path.write_text("".join(lines))


def test_curves_of_a_training(tmp_path):
    rows = [
        {"kind": "train", "step": 10, "loss": 3.0, "accuracy": 0.25, "lr": 0.1},
        # every step was skipped
        {"kind": "train", "step": 20, "lr": 0.2},
        # the same step once more
        {
            "kind": "train",
            "step": 20,
            "loss": 2.0,
            "accuracy": 0.5,
            "lr": 0.05,
        },
        {"kind": "valid", "step": 20, "eer": 0.1},
        {"kind": "valid", "step": 40, "eer": 0.05},
    ]
    path = tmp_path / "metrics.jsonl"
    write_rows(path, rows)
    # a last line that was cut
    with path.open("a") as file:
        file.write('{"kind": "tr')
    assert read_curves(path) == {
        "loss": ([10, 20], [3.0, 2.0]),
        "accuracy in %": ([10, 20], [25.0, 50.0]),
        "learning rate": ([10, 20], [0.1, 0.05]),
        "validation EER in %": ([20, 40], [10.0, 5.0]),
    }
    assert read_curves(tmp_path / "none.jsonl") == {}
