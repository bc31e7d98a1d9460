"""Classes: speakers at each speed, or the labels of another table, and what validation holds out.

Letters: N utterances, C classes, U units that are held out whole: speakers, or utterances.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from speakerlab.data.arrays import stable_hash
from speakerlab.data.manifest import Manifest
from speakerlab.data.tables import read_table


def label(manifest: Manifest, dirs: Sequence[Path], *, table: str) -> Manifest:
    """Return `manifest` with the values of `table`, such as `utt2lang`, instead of its speakers.

    Raises ValueError where an utterance has no label, or there is one class only;
    FileNotFoundError where a directory has no such table.
    """
    labels: dict[str, str] = {}
    where = " + ".join(str(folder / table) for folder in dirs)
    for folder in dirs:
        labels |= read_table(folder / table)
    try:
        label_N = [labels[utterance] for utterance in manifest.ids]
    except KeyError as error:
        raise ValueError(f"{where}: {error.args[0]} has no label; add its line") from None
    classes, class_N = np.unique(np.array(label_N, dtype=str), return_inverse=True)
    if len(classes) < 2:
        found = ", ".join(classes) or "none"
        raise ValueError(f"{where}: needs at least 2 classes, got only {found}; add others")
    return replace(manifest, speaker_N=class_N.astype(np.int32), speakers=tuple(classes.tolist()))


def hold_out(
    class_N: np.ndarray, unit_N: np.ndarray, names: Sequence[str], *, num_units: int
) -> np.ndarray:
    """Return held_U: about `num_units` units to hold out, in proportion to the classes' sizes.

    names: names of the units; a stable hash of them selects, so that adding units does not change
    the choice. Every class keeps a unit to train on and, if it has two, has one held out. A unit
    with utterances of several classes (a speaker of two languages) is held out of all of them.
    """
    pairs = np.unique(np.stack([class_N, unit_N]), axis=1)
    num_classes = int(class_N.max()) + 1
    left_C = np.bincount(pairs[0], minlength=num_classes)
    wanted_C = np.maximum(np.rint(num_units * left_C / left_C.sum()), 1).astype(int)
    wanted_C = np.minimum(wanted_C, np.maximum(left_C - 1, 0))
    classes_of: dict[int, list[int]] = {}
    units_of: list[list[int]] = [[] for _ in range(num_classes)]
    for of_class, unit in pairs.T.tolist():
        classes_of.setdefault(unit, []).append(of_class)
        units_of[of_class].append(unit)
    held_U = np.zeros(len(names), dtype=bool)
    for of_class in np.argsort(left_C, kind="stable").tolist():
        order = sorted(units_of[of_class], key=lambda unit: stable_hash(f"valid:{names[unit]}"))
        missing = wanted_C[of_class] - int(held_U[order].sum())
        for unit in order:
            if missing <= 0:
                break
            if held_U[unit] or (left_C[classes_of[unit]] < 2).any():
                continue
            held_U[unit] = True
            left_C[classes_of[unit]] -= 1
            missing -= 1
    return held_U


def class_names(speakers: Sequence[str], speeds: Sequence[float]) -> list[str]:
    """Return the name of each class: a speaker, or `id#0.9` for the speaker at another speed."""
    return [s if speed == 1.0 else f"{s}#{speed:g}" for speed in speeds for s in speakers]
