"""Accuracy, its interval and the confusion table, counted by hand."""

import json

import numpy as np
import pytest

from speakerlab.scoring import identification as ident

# true, found: a b b | b b | c a; class d does not occur
TRUE = np.array([0, 0, 0, 1, 1, 2, 2])
FOUND = np.array([0, 1, 1, 1, 1, 2, 0])
CLASSES = ["a", "b", "c", "d"]


def make_row(**more):
    return ident.result_row(
        **{
            "data": "test",
            "system": "exp",
            "count_CC": ident.confusion(TRUE, FOUND, 4),
            "classes": CLASSES,
            "interval": (0.25, 0.75),
            "protocol": "by hand",
            "model_sha256": "0" * 64,
            "commit": None,
            **more,
        }
    )


def test_counts_and_rates():
    count_CC = ident.confusion(TRUE, FOUND, 4)
    assert count_CC.tolist() == [[1, 2, 0, 0], [0, 2, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert ident.accuracy(count_CC) == pytest.approx(4 / 7)
    assert ident.balanced_accuracy(count_CC) == pytest.approx((1 / 3 + 2 / 2 + 1 / 2) / 3)


def test_no_utterance_is_refused():
    with pytest.raises(ValueError, match="at least one is needed, got none"):
        ident.accuracy(np.zeros((2, 2), dtype=np.int64))


def test_a_row_of_results_tells_only_what_occurs():
    row = make_row()
    assert row["confusion"] == {"a": {"a": 1, "b": 2}, "b": {"b": 2}, "c": {"a": 1, "c": 1}}
    assert (row["num"], row["num_classes"], row["task"]) == (7, 4, "identification")
    assert row["error"] == pytest.approx(3 / 7)
    assert row["accuracy_ci95"] == [0.25, 0.75]
    assert json.loads(json.dumps(row)) == row


def test_interval_without_groups_is_that_of_a_binomial():
    """50 of 100: a standard error of 0.05, so 0.5 -+ 0.098."""
    is_right_N = np.arange(100) < 50
    low, high = ident.accuracy_interval(is_right_N)
    assert (low, high) == pytest.approx((0.402, 0.598), abs=0.02)
    assert ident.accuracy_interval(is_right_N) == (low, high)


def test_utterances_of_a_speaker_are_drawn_together():
    """Ten speakers, half of them always wrong: as uncertain as ten utterances, not a hundred."""
    group_N = np.repeat(np.arange(10), 10)
    low, high = ident.accuracy_interval(group_N < 5, group_N)
    assert (low, high) == pytest.approx((0.2, 0.8), abs=0.01)


def test_all_right_is_not_certainty():
    """Five speakers, all right: a rate of 0.025 ** (1 / 5) would give that in 2.5 % of cases."""
    group_N = np.repeat(np.arange(5), 4)
    assert ident.accuracy_interval(group_N >= 0, group_N) == pytest.approx((0.025**0.2, 1))
    assert ident.accuracy_interval(group_N < 0, group_N) == pytest.approx((0, 1 - 0.025**0.2))
    assert ident.accuracy_interval(np.ones(20, dtype=bool))[0] == pytest.approx(0.025**0.05)


def test_results_keep_other_rows(tmp_path):
    path = tmp_path / "results.json"
    trial_row = {"trials": "test/trials", "system": "exp", "eer": 0.1}
    path.write_text(json.dumps([trial_row]))
    assert ident.update_results(path, make_row()) == [make_row()]
    newer = make_row(commit="abc")
    other = make_row(data="other")
    ident.update_results(path, other)
    assert ident.update_results(path, newer) == [newer, other]
    assert json.loads(path.read_text()) == [trial_row, newer, other]
    path.write_text("{")
    with pytest.raises(ValueError, match="not a list of results, got"):
        ident.update_results(path, newer)


def test_decisions_are_written_one_a_line(tmp_path):
    path = tmp_path / "scores" / "test_classes.txt"
    ident.write_decisions(path, ["u1", "u2"], TRUE[1:3], FOUND[1:3], np.array([0.75, 1]), CLASSES)
    assert path.read_text() == "u1 a b 0.750000\nu2 a b 1.000000\n"


def test_tables_for_a_console():
    assert ident.format_confusion(make_row()).splitlines() == [
        "true \\ found  a  b  c",
        "------------  -  -  -",
        "a             1  2  0",
        "b             0  2  0",
        "c             1  0  1",
    ]
    header, _, line = ident.format_rows([make_row()]).splitlines()
    assert line.split() == ["test", "exp", "57.14", "25.00", "-", "75.00", "61.11", "4", "7"]
    assert header.startswith("data  system  accuracy %")


def test_of_many_classes_only_the_commonest_confusions_are_shown():
    classes = [f"c{i:02d}" for i in range(30)]
    true_N = np.repeat(np.arange(30), 3)
    found_N = true_N.copy()
    found_N[:2], found_N[5] = 7, 9
    row = make_row(count_CC=ident.confusion(true_N, found_N, 30), classes=classes)
    assert ident.format_confusion(row).splitlines()[2:] == [
        "c00   c07         2",
        "c01   c09         1",
    ]
