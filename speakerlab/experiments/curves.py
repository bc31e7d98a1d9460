"""Curves of a training over its steps, and a recipe's reference curves: the range over seeds.

A recipe's `reference.json` is a list of references; `egs/common/reference.py` writes them. One
belongs to a run of the same model with as many speakers, utterances and steps.
Letters: T points in time, B bins of steps, R runs.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.checkpoints.model_files import read_card, read_settings
from speakerlab.core.atomic import write_text
from speakerlab.core.reading import keys, parse_json, read_json

LOGGED = keys(kind=str, step=int)  # in metrics.jsonl
REFERENCE = keys(settings=dict[str, Any], curves=dict[str, dict[str, list[float]]])
Curve = tuple[list[int], list[float]]  # steps, values
Reference = dict[str, Any]  # settings, seeds, and the curves: name -> step, median, low, high
SETTINGS = ("parameters", "classes", "train_speakers", "train_utterances", "steps")  # in the card
NUM_BINS = 30
DIGITS = 4
# kind of a row of metrics.jsonl, its key, its name in the report, a factor
CURVES = (
    ("train", "loss", "loss", 1.0),
    ("train", "accuracy", "accuracy in %", 100.0),
    ("train", "lr", "learning rate", 1.0),
    ("valid", "eer", "validation EER in %", 100.0),
    ("valid", "accuracy", "validation accuracy in %", 100.0),
)
IN_REFERENCE = ("loss", "learning rate", "validation EER in %")


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
        curve: list[tuple[int, float]] = []
        for row in rows:
            if row.get("kind") == kind:
                while curve and curve[-1][0] >= row["step"]:
                    curve.pop()
                if isinstance(row.get(key), int | float):
                    curve.append((row["step"], factor * row[key]))
        if len(curve) > 1:
            curves[name] = [step for step, _ in curve], [value for _, value in curve]
    return curves


def settings_of(exp_dir: Path) -> dict[str, Any]:
    """Return what a run must share with its reference."""
    card = read_card(exp_dir)
    model = {"model": read_settings(exp_dir)["model"]["name"]}
    return model | {key: card.get(key) for key in SETTINGS}


def find_reference(path: Path, exp_dir: Path) -> Reference | None:
    """Return the reference in a recipe's file that belongs to the run, None if there is none."""
    settings = settings_of(exp_dir)
    return next((one for one in _read(path) if one["settings"] == settings), None)


def write_reference(path: Path, exp_dirs: Sequence[Path]) -> Reference:
    """Write the reference of finished runs into a recipe's file, in place of an older one."""
    new = summarize(exp_dirs)
    others = [one for one in _read(path) if one["settings"] != new["settings"]]
    lines = [json.dumps(one) for one in [*others, new]]
    write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")
    return new


def summarize(exp_dirs: Sequence[Path]) -> Reference:
    """Return the median, lowest and highest value over runs in each of up to 30 bins of steps.

    ValueError if the runs differ in more than their seed.
    """
    settings = settings_of(exp_dirs[0])
    seeds = [read_card(exp_dir)["seed"] for exp_dir in exp_dirs]
    for i, exp_dir in enumerate(exp_dirs):
        if settings_of(exp_dir) != settings or seeds[i] in seeds[:i]:
            raise ValueError(
                f"{exp_dir}: differs from {exp_dirs[0]} in more than its seed, or has the seed of "
                "another; give runs that differ only in their seed"
            )
    runs = [
        {
            name: _smooth(*curve, num_steps=settings["steps"])
            for name, curve in read_curves(exp_dir / "metrics.jsonl").items()
        }
        for exp_dir in exp_dirs
    ]
    curves: dict[str, dict[str, list[float]]] = {}
    for name in [name for name in IN_REFERENCE if name in runs[0]]:
        step_B, value_RB = runs[0][name][0], np.array([run[name][1] for run in runs])
        lines = {"step": step_B, "median": np.median(value_RB, axis=0)}
        lines |= {"low": value_RB.min(axis=0), "high": value_RB.max(axis=0)}
        curves[name] = {
            key: [float(f"{number:.{DIGITS}g}") for number in line_B]
            for key, line_B in lines.items()
        }
    return {"settings": settings, "seeds": seeds, "curves": curves}


def _smooth(
    step_T: Sequence[int], value_T: Sequence[float], *, num_steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean step and the mean value of the points in each bin that has any."""
    _, bin_T = np.unique(np.ceil(np.array(step_T) * NUM_BINS / num_steps), return_inverse=True)
    num_B = np.bincount(bin_T)
    return np.bincount(bin_T, step_T) / num_B, np.bincount(bin_T, value_T) / num_B


def _read(path: Path) -> list[Reference]:
    return read_json(path, list[Reference], like=list[REFERENCE]) if path.exists() else []
