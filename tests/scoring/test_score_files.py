"""Score files are read back by trial, not by line."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.scoring.score_files import read_scores, write_scores
from speakerlab.scoring.trials import LINES_AT_ONCE, read_trials

LIST = "a x target\nb x nontarget\na y nontarget\n"


@pytest.fixture
def trials(tmp_path):
    (tmp_path / "trials").write_text(LIST)
    return read_trials(tmp_path / "trials")


def test_written_scores_read_back(tmp_path, trials):
    path = tmp_path / "s.txt"
    scores_N = np.array([0.5, -0.25, 0.1])
    write_scores(path, trials, scores_N)
    assert path.read_text().splitlines(keepends=True) == [
        "a x 0.500000 target\n",
        "b x -0.250000 nontarget\n",
        "a y 0.100000 nontarget\n",
    ]
    read_N = read_scores(path, trials)
    assert read_N.tolist() == scores_N.tolist()


def test_order_labels_and_other_trials_do_not_matter(tmp_path, trials):
    (tmp_path / "s.txt").write_text(
        "c x 9\na y 0.1\nb y 8\nb x -0.25 nontarget\n\na x 5e-1\n"
    )
    scores_N = read_scores(tmp_path / "s.txt", trials)
    assert scores_N.tolist() == [0.5, -0.25, 0.1]


@pytest.mark.parametrize(
    ("space", "yes"),
    [("\ufeff", "target"), ("", "TARGET"), ("\n" * LINES_AT_ONCE, "1")],
)
def test_scores_of_3dspeaker_stand_after_the_label(tmp_path, trials, space, yes):
    (tmp_path / "s.txt").write_text(f"{space}a x {yes} 0.5\nb x 0 -0.25\na y 0 0.1\n")
    scores_N = read_scores(tmp_path / "s.txt", trials)
    assert scores_N.tolist() == [0.5, -0.25, 0.1]


def test_a_long_file_in_another_order(tmp_path):
    num = 2 * LINES_AT_ONCE + 7
    labels = ["target", "nontarget"]
    trial_lines = [f"e{i % 89} t{i} {labels[i % 2]}\n" for i in range(num)]
    (tmp_path / "trials").write_text("".join(trial_lines))
    trials = read_trials(tmp_path / "trials")
    # the score of a trial is its number in the list
    order = np.random.default_rng(0).permutation(num)
    lines = [f"e{i % 89} t{i} {i}\n" for i in order]
    (tmp_path / "s.txt").write_text("".join(lines))
    scores_N = read_scores(tmp_path / "s.txt", trials)
    assert scores_N.tolist() == list(range(num))


@pytest.mark.parametrize(
    ("text", "line", "value"),
    [
        ("a x 1\nb x 2\n", "", "a y has no"),
        ("", "", "is empty; score the list again"),
        (" \n\n", "", "is empty; score the list again"),
        ("c x 1\na z 2\n", "", "has no trial of the list, such as a x"),
        # Sides that are swapped.
        ("x a 1\nx b 2\ny a 3\n", "", "has no trial of the list"),
        ("a x 1\nb x two\na y 3\n", ":2", "'b x two'"),
        ("a x 1\na y nan\nb x 0\n", "", "a y has the score nan"),
        ("a x 1\nb x\na y 3\n", ":2", "'b x'"),
        ("a x 1 5\nb x 0\na y 0 3\n", ":2", "'b x 0'"),
        ("a x 1 5\nb x 0.5 4\na y 0 3\n", ":2", "'b x 0.5 4'"),
        # An id with a blank whose second word is a number, and another column.
        ("a x 1\nb 2 x 3\na y 3\n", ":2", "'b 2 x 3'"),
        ("a x 1\nb 2 3 x\na y 3\n", ":2", "'b 2 3 x'"),
        ("a x 1\nb x 2 target 4\na y 3\n", ":2", "'b x 2 target 4'"),
        ("a x 1\na x 1\nb x 2\na y 3\n", "", "a x has more"),
        # Labels of another list, and a score of 3D-Speaker that reads like a label.
        ("a x 1 nontarget\nb x 2\na y 3\n", "", "a x has the label nontarget"),
        ("a x 1 0\nb x 0 0\na y 0 1\n", "", "a x has the label nontarget"),
    ],
)
def test_bad_files_are_named(tmp_path, trials, text, line, value):
    (tmp_path / "s.txt").write_text(text)
    with refuses(f"{tmp_path}/s.txt{line}", value):
        read_scores(tmp_path / "s.txt", trials)


def test_a_missing_file_is_one_line(tmp_path, trials):
    with refuses(f"{tmp_path}/none.txt", error=FileNotFoundError):
        read_scores(tmp_path / "none.txt", trials)
