"""Curves of a training over its steps, and a recipe's reference curves: the range over seeds.

A recipe's `reference.json` is a list of references; `benchmarks/reference.py` writes them. One
belongs to a run of the same model with as many speakers, utterances and steps.
"""

from pathlib import Path
from typing import Any

from speakerlab.checkpoints.model_files import read_card, read_settings
from speakerlab.core.reading import keys, parse_json, read_json

LOGGED = keys(kind=str, step=int)  # in metrics.jsonl
REFERENCE = keys(settings=dict[str, Any], curves=dict[str, dict[str, list[float]]])
Curve = tuple[list[int], list[float]]  # steps, values
Reference = dict[str, Any]  # settings, seeds, and the curves: name -> step, median, low, high
SETTINGS = ("parameters", "classes", "train_speakers", "train_utterances", "steps")  # in the card
# kind of a row of metrics.jsonl, its key, its name in the report, a factor
CURVES = (
    ("train", "loss", "loss", 1.0),
    ("train", "accuracy", "accuracy in %", 100.0),
    ("train", "lr", "learning rate", 1.0),
    ("valid", "eer", "validation EER in %", 100.0),
    ("valid", "accuracy", "validation accuracy in %", 100.0),
)


def read_curves(path: Path) -> dict[str, Curve]:
    """Read metrics.jsonl as name -> (steps, values); the last values of a repeated step count."""
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            rows.append(parse_json(line, dict[str, Any], like=LOGGED, where=path))
        except ValueError:  # the last line, cut by a kill
            continue
    curves: dict[str, Curve] = {}
    for kind, key, name, factor in CURVES:
        own = [row for row in rows if row.get("kind") == kind and key in row]
        curve = {row["step"]: factor * row[key] for row in own if isinstance(row[key], int | float)}
        if len(curve) > 1:
            curves[name] = list(curve), list(curve.values())
    return curves


def settings_of(exp_dir: Path) -> dict[str, Any]:
    """Return what a run must share with its reference."""
    card = read_card(exp_dir)
    model = {"model": read_settings(exp_dir)["model"]["name"]}
    return model | {key: card.get(key) for key in SETTINGS}


def find_reference(path: Path, exp_dir: Path) -> Reference | None:
    """Return the reference in a recipe's file that belongs to the run, None if there is none."""
    settings = settings_of(exp_dir)
    return next((one for one in read_references(path) if one["settings"] == settings), None)


def read_references(path: Path) -> list[Reference]:
    return read_json(path, list[Reference], like=list[REFERENCE]) if path.exists() else []
