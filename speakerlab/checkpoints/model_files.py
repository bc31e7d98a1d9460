"""The files of a published model that can be read without torch: card, settings, calibration.

In: the path of an experiment or of a model folder. Out: paths and plain values.
"""

from pathlib import Path
from typing import Any

from speakerlab.checkpoints.catalogue import near_miss
from speakerlab.config.layers import flatten, merge_layers
from speakerlab.core.reading import AGAIN, keys, read_json, read_text
from speakerlab.diarization.clustering import Tuning
from speakerlab.scoring.calibration import Calibration

CALIBRATION = "calibration.json"
TUNING = "diarization.json"
# What a config.yaml must have to be read without building the model.
SETTINGS = {"model.name": str, "frontend.sample_rate": int, "data.dir": str, "data.train": list}
CARD = keys(
    {"train_utterances": int, "train_hours": float, "train_sha256": str}
    | dict.fromkeys(("source", "init_source"), dict[str, Any] | None)
    | {f"train_{name}": list[str] for name in ("corpus", "page", "licence", "languages")},
    **{"sha256": str, "embed_dim": int, "parameters": int},
)


def find_model(path: Path) -> Path:
    """Return the model folder: the path itself, or `model/` inside an experiment."""
    for folder in (path, path / "model"):
        if (folder / "embedder.safetensors").exists():
            return folder
    found = "is a file" if path.is_file() else "has no embedder.safetensors"
    fix = (
        "give an experiment or a model folder: train one (stage 3), or `speakerlab import` a "
        "checkpoint"
    )
    if not path.exists():
        found, fix = "does not exist", near_miss(str(path)) or fix
    raise FileNotFoundError(f"{path}: {found}; {fix}")


def read_card(path: Path) -> dict[str, Any]:
    """Read the facts about a model, its sha256 among them."""
    return read_json(find_model(path) / "card.json", like=CARD)


def read_source(path: Path) -> dict[str, Any] | None:
    """Read the origin of an imported model, or of one fine-tuned from it; None for other models."""
    card = read_card(path)
    return card.get("source") or card.get("init_source")


def read_settings(path: Path) -> dict[str, Any]:
    """Read the configuration of a model as plain values."""
    file = find_model(path) / "config.yaml"
    values, _ = merge_layers([file])
    flat = flatten(values)
    for key, kind in SETTINGS.items():
        if not isinstance(flat.get(key), kind):
            raise ValueError(f"{file}: {key} is missing, or no {kind.__name__}; {AGAIN}")
    return values


def read_calibration(folder: Path) -> Calibration | None:
    """Read the calibration of a model folder, None if it has none."""
    path = folder / CALIBRATION
    return read_json(path, Calibration, fix="calibrate again") if path.exists() else None


def read_tuning(folder: Path) -> Tuning:
    """Read the clustering that was learned for a model folder, the default if there is none."""
    path, fix = folder / TUNING, "run `speakerlab calibrate --for diarization` again"
    return read_json(path, Tuning, fix=fix) if path.exists() else Tuning()


def read_classes(path: Path) -> list[str]:
    """Read `speakers.txt` of a published model; empty if it has no head."""
    file = find_model(path) / "speakers.txt"
    return read_text(file).splitlines() if file.exists() else []


def embeddings_stem(
    exp_dir: Path, data_name: str, *, untrained: bool = False, treatment: str = ""
) -> Path:
    """Return the path, without endings, of the embeddings of a data directory.

    treatment: name of what was done to its utterances before; "": nothing.
    """
    name = "untrained" if untrained else "trained"
    return exp_dir / "embeddings" / data_name / (f"{name}_{treatment}" if treatment else name)
