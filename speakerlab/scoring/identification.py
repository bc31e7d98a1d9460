"""Accuracy of identification, with its interval. In: true and found classes as numbers.

Letters: N utterances, C classes, G groups of utterances drawn together, R replicates.
"""

import numpy as np

from speakerlab.core.intervals import MIN_GROUPS, ratio_interval


def confusion(true_N: np.ndarray, found_N: np.ndarray, num_classes: int) -> np.ndarray:
    """Return count_CC, int64: number of utterances by true class (row) and found class (column)."""
    assert len(true_N) == len(found_N), (len(true_N), len(found_N))
    # The cell of each utterance in the flattened matrix. int64, so that the product of small
    # integers cannot overflow.
    true_N = np.asarray(true_N, dtype=np.int64)
    cell_N = true_N * num_classes + found_N
    count = np.bincount(cell_N, minlength=num_classes**2)
    return count.reshape(num_classes, num_classes)


def accuracy(count_CC: np.ndarray) -> float:
    """Return the share of utterances with the right class; ValueError without utterances."""
    num_utterances = count_CC.sum()
    if not num_utterances:
        raise ValueError(
            "utterances: none to measure an accuracy on; give another test set"
        )
    # Right decisions are on the diagonal.
    return float(np.trace(count_CC) / num_utterances)


def balanced_accuracy(count_CC: np.ndarray) -> float:
    """Return the mean recall over the true classes present; chance level is 1 / classes."""
    size_C = count_CC.sum(axis=1)
    right_C = np.diag(count_CC)
    occurs_C = size_C > 0
    recalls = right_C[occurs_C] / size_C[occurs_C]
    return float(recalls.mean())


def accuracy_interval(
    is_right_N: np.ndarray,
    group_N: np.ndarray | None = None,
    *,
    seed: int = 0,
) -> list[float] | None:
    """Return the 95 % interval of the accuracy from 1,000 replicates (core/intervals.py).

    group_N: number of the group of each utterance; the utterances of a group, such as a speaker,
    are drawn together. None: each utterance is a group. With fewer than five groups there is no
    interval. If all utterances or none are right, all replicates are equal, so the exact binomial
    bound is used, with one trial per group (Clopper and Pearson, Biometrika 1934).
    """
    if group_N is None:
        group_N = np.arange(len(is_right_N))
    num_groups = int(group_N.max()) + 1
    if num_groups < MIN_GROUPS:
        return None
    all_are_equal = len(np.unique(is_right_N)) == 1
    if all_are_equal:
        # The accuracy at which all groups are right with a probability of 2.5 %.
        bound = 0.025 ** (1 / num_groups)
        return [bound, 1.0] if is_right_N[0] else [0.0, 1 - bound]
    right_G = np.bincount(group_N, weights=is_right_N, minlength=num_groups)
    size_G = np.bincount(group_N, minlength=num_groups)
    return ratio_interval(right_G, size_G, seed=seed)
