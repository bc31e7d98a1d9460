"""What of a published model can be read without torch: where it is, its card, how it decides.

In: the path of an experiment or of a model folder. Out: paths and plain values.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from speakerlab.scoring.calibration import Calibration

CALIBRATION = "calibration.json"


def find_model(path: Path) -> Path:
    """The model folder meant by a path: itself, or the one inside an experiment."""
    for folder in (path, path / "model"):
        if (folder / "embedder.safetensors").exists():
            return folder
    got = "a file" if path.is_file() else "a folder without" if path.is_dir() else "nothing there"
    raise FileNotFoundError(
        f"{path}: must be an experiment or a model folder with embedder.safetensors, got {got}; "
        "train one (stage 3), or `speakerlab import` a checkpoint"
    )


def read_card(path: Path) -> dict[str, Any]:
    """The facts about a model, its sha256 among them."""
    return json.loads((find_model(path) / "card.json").read_text(encoding="utf-8"))


def read_settings(path: Path) -> dict[str, Any]:
    """The configuration that a model was trained by, as it stands in its YAML."""
    return yaml.safe_load((find_model(path) / "config.yaml").read_text(encoding="utf-8"))


def read_calibration(folder: Path) -> Calibration | None:
    """What the model of a folder decides by; None where nothing was learned."""
    path = folder / CALIBRATION
    if not path.exists():
        return None
    return Calibration.from_dict(json.loads(path.read_text(encoding="utf-8")), where=str(path))


def read_classes(path: Path) -> list[str]:
    """`speakers.txt` of a published model; empty where it came without a head."""
    file = find_model(path) / "speakers.txt"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def embeddings_stem(exp_dir: Path, data_name: str, *, untrained: bool = False) -> Path:
    """Where the embeddings of a data directory are, without endings."""
    return exp_dir / "embeddings" / data_name / ("untrained" if untrained else "trained")
