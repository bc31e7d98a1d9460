"""Curves of a training over its steps, and a recipe's reference curves: the range over seeds.

A recipe's `reference.json` is a list of references; `egs/common/reference.py` writes them. A
reference matches runs of the same model with equally many speakers, utterances and steps.
"""

from pathlib import Path
from typing import Any

from speakerlab.checkpoints.model_files import read_card, read_settings
from speakerlab.core.reading import keys, parse_json, read_json

LOGGED = keys(kind=str, step=int)  # in metrics.jsonl
REFERENCE = keys(
    settings=dict[str, Any],
    curves=dict[str, dict[str, list[float]]],
)
Curve = tuple[list[int], list[float]]  # steps, values
# Settings, seeds, and the curves: name -> step, median, low, high.
Reference = dict[str, Any]
# Keys of the model's card that a run and its reference must share.
SETTINGS = (
    "parameters",
    "classes",
    "train_speakers",
    "train_utterances",
    "steps",
)
# Kind of a row of metrics.jsonl, its key, its name in the report, a factor.
CURVES = (
    ("train", "loss", "loss", 1.0),
    ("train", "accuracy", "accuracy in %", 100.0),
    ("train", "lr", "learning rate", 1.0),
    ("valid", "eer", "validation EER in %", 100.0),
    ("valid", "accuracy", "validation accuracy in %", 100.0),
)
EER_OF = "eer/"  # followed by the name of a corpus


def read_curves(path: Path) -> dict[str, Curve]:
    """Read metrics.jsonl as name -> (steps, values); use the last value of a repeated step."""
    rows = _read_metrics(path)
    curves: dict[str, Curve] = {}
    for kind, key, name, factor in [*CURVES, *_of_corpora(rows)]:
        # A resumed run repeats the steps after its last checkpoint: the new value replaces the old.
        value_at: dict[int, float] = {}
        for row in rows:
            if row.get("kind") != kind:
                continue
            value = row.get(key)
            if isinstance(value, int | float):
                value_at[row["step"]] = factor * value
        if len(value_at) > 1:  # a curve needs two points
            values = list(value_at.values())
            curves[name] = (list(value_at), values)
    return curves


def _of_corpora(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, float]]:
    """Return the curves of the validation EER within each of several corpora."""
    keys_of_corpora: dict[str, None] = {}
    for row in rows:
        for key in row:
            if key.startswith(EER_OF):
                keys_of_corpora[key] = None
    return [
        ("valid", key, f"validation EER in %, {key.removeprefix(EER_OF)}", 100.0)
        for key in keys_of_corpora
    ]


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            row = parse_json(line, dict[str, Any], like=LOGGED, where=path)
        except ValueError:  # the last line, cut by a kill
            continue
        rows.append(row)
    return rows


def settings_of(exp_dir: Path) -> dict[str, Any]:
    """Return the settings that a run must share with its reference."""
    card = read_card(exp_dir)
    model = read_settings(exp_dir)["model"]
    settings = {"model": model["name"]}
    for key in SETTINGS:
        settings[key] = card.get(key)
    return settings


def find_reference(path: Path, exp_dir: Path) -> Reference | None:
    """Return the reference in a recipe's file that matches the run, None if there is none."""
    settings = settings_of(exp_dir)
    for reference in read_references(path):
        if reference["settings"] == settings:
            return reference
    return None


def read_references(path: Path) -> list[Reference]:
    if not path.exists():
        return []
    return read_json(path, list[Reference], like=list[REFERENCE])
