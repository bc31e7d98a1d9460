"""Write a recipe's reference curves from finished runs that differ only in their seed.

python egs/common/reference.py egs/<recipe> EXP...

Letters: T points in time, B bins of steps, R runs.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from speakerlab.checkpoints.model_files import read_card
from speakerlab.core.atomic import write_text
from speakerlab.experiments.curves import (
    Reference,
    read_curves,
    read_references,
    settings_of,
)

NUM_BINS = 30
DIGITS = 4
IN_REFERENCE = ("loss", "learning rate", "validation EER in %")


def main() -> None:
    """Write `reference.json` into the recipe's folder."""
    recipe, *exp_dirs = map(Path, sys.argv[1:])
    if not exp_dirs:
        sys.exit(
            "reference.py: no experiments given; use reference.py egs/<recipe> EXP..."
        )
    try:
        write_reference(recipe / "reference.json", exp_dirs)
    except (ValueError, OSError) as error:
        sys.exit(str(error))


def write_reference(path: Path, exp_dirs: Sequence[Path]) -> Reference:
    """Write the reference of finished runs into a recipe's file, in place of an older one."""
    new = summarize(exp_dirs)
    others = [
        reference
        for reference in read_references(path)
        if reference["settings"] != new["settings"]
    ]
    lines = [json.dumps(reference) for reference in [*others, new]]
    write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")
    return new


def summarize(exp_dirs: Sequence[Path]) -> Reference:
    """Return the median, lowest and highest value over runs in each of up to 30 bins of steps.

    ValueError if the runs differ in more than their seed.
    """
    settings = settings_of(exp_dirs[0])
    seeds = [read_card(exp_dir)["seed"] for exp_dir in exp_dirs]
    for i, exp_dir in enumerate(exp_dirs):
        run_settings = settings_of(exp_dir)
        if run_settings != settings or seeds[i] in seeds[:i]:
            raise ValueError(
                f"{exp_dir}: {run_settings}, seed {seeds[i]}; give runs that differ from"
                f" {exp_dirs[0]}, and only in their seed"
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
    _, bin_T = np.unique(
        np.ceil(np.array(step_T) * NUM_BINS / num_steps), return_inverse=True
    )
    num_B = np.bincount(bin_T)
    return np.bincount(bin_T, step_T) / num_B, np.bincount(bin_T, value_T) / num_B


if __name__ == "__main__":
    main()
