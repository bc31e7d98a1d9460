"""Accuracy, its interval and the confusion table, counted by hand."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.scoring import identification as ident

# true, found: a b b | b b | c a; class d does not occur
TRUE = np.array([0, 0, 0, 1, 1, 2, 2])
FOUND = np.array([0, 1, 1, 1, 1, 2, 0])


def test_counts_and_rates():
    count_CC = ident.confusion(TRUE, FOUND, 4)
    assert count_CC.tolist() == [
        [1, 2, 0, 0],
        [0, 2, 0, 0],
        [1, 0, 1, 0],
        [0, 0, 0, 0],
    ]
    assert ident.accuracy(count_CC) == pytest.approx(4 / 7)
    recall = [1 / 3, 2 / 2, 1 / 2]
    balanced = sum(recall) / 3
    assert ident.balanced_accuracy(count_CC) == pytest.approx(balanced)


def test_no_utterance_is_refused():
    with refuses("utterances"):
        nothing_CC = np.zeros((2, 2), dtype=np.int64)
        ident.accuracy(nothing_CC)


def test_interval_without_groups_is_that_of_a_binomial():
    """50 of 100: a standard error of 0.05, so 0.5 -+ 0.098."""
    is_right_N = np.arange(100) < 50
    low, high = ident.accuracy_interval(is_right_N)
    assert low == pytest.approx(0.402, abs=0.02)
    assert high == pytest.approx(0.598, abs=0.02)
    assert ident.accuracy_interval(is_right_N) == [low, high]


def test_utterances_of_a_speaker_are_drawn_together():
    """Ten speakers, half of them always wrong: as uncertain as ten utterances, not a hundred."""
    group_N = np.repeat(np.arange(10), 10)
    is_right_N = group_N < 5
    low, high = ident.accuracy_interval(is_right_N, group_N)
    assert low == pytest.approx(0.1, abs=0.01)
    assert high == pytest.approx(0.9, abs=0.01)

    four_speakers_N = np.minimum(group_N, 3)
    assert ident.accuracy_interval(is_right_N, four_speakers_N) is None


def test_all_right_is_not_certainty():
    """Five speakers, all right: a rate of 0.025 ** (1 / 5) would give that in 2.5 % of cases."""
    group_N = np.repeat(np.arange(5), 4)
    all_right_N = np.ones(20, dtype=bool)
    rate = 0.025**0.2
    all_right = ident.accuracy_interval(all_right_N, group_N)
    low, high = all_right
    assert low == pytest.approx(rate)
    assert high == pytest.approx(1)
    all_wrong = ident.accuracy_interval(~all_right_N, group_N)
    low, high = all_wrong
    assert low == pytest.approx(0)
    assert high == pytest.approx(1 - rate)

    # without groups, each of the 20 utterances counts
    low, _ = ident.accuracy_interval(all_right_N)
    assert low == pytest.approx(0.025**0.05)
