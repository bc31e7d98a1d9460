"""Accuracy of naming classes, with its interval. In: true and found classes as numbers.

Letters: N utterances, C classes, G groups of utterances drawn together, R replicates.
"""

import numpy as np

from speakerlab.core.intervals import MIN_GROUPS, ratio_interval


def confusion(true_N: np.ndarray, found_N: np.ndarray, num_classes: int) -> np.ndarray:
    """Count count_CC, int64: utterances of a true class (row) by the class found (column)."""
    assert len(true_N) == len(found_N), (len(true_N), len(found_N))
    cells_N = np.asarray(true_N, dtype=np.int64) * num_classes + found_N
    return np.bincount(cells_N, minlength=num_classes**2).reshape(num_classes, num_classes)


def accuracy(count_CC: np.ndarray) -> float:
    """Return the share of utterances whose class was found; ValueError if there are none."""
    if not count_CC.sum():
        raise ValueError("utterances: none to measure an accuracy on; give another test set")
    return float(np.trace(count_CC) / count_CC.sum())


def balanced_accuracy(count_CC: np.ndarray) -> float:
    """Return the mean recall over the classes that occur; guessing scores 1 / classes."""
    size_C = count_CC.sum(axis=1)
    occurs_C = size_C > 0
    return float((np.diag(count_CC)[occurs_C] / size_C[occurs_C]).mean())


def accuracy_interval(
    is_right_N: np.ndarray, group_N: np.ndarray | None = None, *, seed: int = 0
) -> list[float] | None:
    """Return the 95 % interval of the accuracy from 1,000 replicates (core/intervals.py).

    group_N: the group of each utterance, by number; a speaker's utterances are drawn together.
    None: each utterance alone. With fewer than five groups there is no interval. Where all or none
    are right, draws cannot differ; then the exact binomial bound with as many trials as there are
    groups (Clopper and Pearson, Biometrika 1934).
    """
    group_N = np.arange(len(is_right_N)) if group_N is None else group_N
    num_groups = int(group_N.max()) + 1
    if num_groups < MIN_GROUPS:
        return None
    if len(np.unique(is_right_N)) == 1:
        bound = 0.025 ** (1 / num_groups)
        return [bound, 1.0] if is_right_N[0] else [0.0, 1 - bound]
    right_G = np.bincount(group_N, weights=is_right_N, minlength=num_groups)
    return ratio_interval(right_G, np.bincount(group_N, minlength=num_groups), seed=seed)
