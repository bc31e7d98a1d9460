"""Labels of another table in place of speakers, and the units held out of training.

Letters: N utterances, C classes, U units that are held out whole (speakers, or utterances), P pairs
of a class and a unit.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from speakerlab.data.arrays import stable_hash
from speakerlab.data.manifest import Manifest
from speakerlab.data.tables import read_table


def label(
    manifest: Manifest, dirs: Sequence[Path], *, tables: Sequence[str]
) -> Manifest:
    """Return `manifest` with the values of tables such as `utt2lang` instead of its speakers.

    dirs: of the parts; tables: the name of the table in each. Raises
    ValueError where an utterance has no label, or there is one class only;
    FileNotFoundError where a directory has no such table.
    """
    paths = [folder / table for folder, table in zip(dirs, tables)]
    where = " + ".join(map(str, paths))
    label_of_part = [read_table(path) for path in paths]
    labels: list[str] = []
    for part_index, row in zip(manifest.part_N.tolist(), manifest.row_N.tolist()):
        utterance = manifest.parts[part_index].ids[row]
        label_of = label_of_part[part_index]
        if utterance not in label_of:
            raise ValueError(
                f"{paths[part_index]}: {utterance} has no label; add its line"
            )
        labels.append(label_of[utterance])
    label_N = np.array(labels, dtype=str)
    classes, class_N = np.unique(label_N, return_inverse=True)
    if len(classes) < 2:
        present = ", ".join(classes) or "none"
        raise ValueError(
            f"{where}: needs at least 2 classes, got only {present}; add others"
        )
    return replace(
        manifest,
        speaker_N=class_N.astype(np.int32),
        speakers=tuple(classes.tolist()),
    )


def hold_out(
    class_N: np.ndarray, unit_N: np.ndarray, names: Sequence[str], *, num_units: int
) -> np.ndarray:
    """Return held_U: about `num_units` units to hold out, in proportion to the classes' sizes.

    names: names of the units; a stable hash of them selects, so that adding units does not change
    the choice. Every class keeps a unit to train on and, if it has two, has one held out. A unit
    with utterances of several classes (a speaker of two languages) is held out of all of them.
    """
    # Each class with each of its units once, however many utterances they share.
    class_and_unit_2N = np.stack([class_N, unit_N])
    pair_2P = np.unique(class_and_unit_2N, axis=1)
    num_classes = int(class_N.max()) + 1

    # Units to hold out of each class: its share, at least one, but never its last unit.
    num_train_C = np.bincount(pair_2P[0], minlength=num_classes)
    share_C = num_units * num_train_C / num_train_C.sum()
    target_C = np.maximum(np.rint(share_C), 1).astype(int)
    all_but_one_C = np.maximum(num_train_C - 1, 0)
    target_C = np.minimum(target_C, all_but_one_C)

    classes_of: dict[int, list[int]] = {}
    units_of: list[list[int]] = [[] for _ in range(num_classes)]
    for class_, unit in pair_2P.T.tolist():
        classes_of.setdefault(unit, []).append(class_)
        units_of[class_].append(unit)

    def hash_unit(unit: int) -> int:
        return stable_hash(f"valid:{names[unit]}")

    # Small classes choose first, because they have the fewest units to choose from.
    held_U = np.zeros(len(names), dtype=bool)
    smallest_first = np.argsort(num_train_C, kind="stable")
    for class_ in smallest_first.tolist():
        units = sorted(units_of[class_], key=hash_unit)
        num_held = int(held_U[units].sum())  # for other classes of the same units
        num_missing = target_C[class_] - num_held
        for unit in units:
            if num_missing <= 0:
                break
            num_train_of_classes = num_train_C[classes_of[unit]]
            is_last_of_a_class = num_train_of_classes.min() < 2
            if held_U[unit] or is_last_of_a_class:
                continue
            held_U[unit] = True
            num_train_C[classes_of[unit]] -= 1
            num_missing -= 1
    return held_U
