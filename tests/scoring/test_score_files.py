"""Score files are read back by trial, not by line."""

import numpy as np
import pytest

from speakerlab.scoring.score_files import read_scores, write_scores
from speakerlab.scoring.trials import LINES_AT_ONCE, Trials, read_trials, write_trials

LIST = "a x target\nb x nontarget\na y nontarget\n"


@pytest.fixture
def trials(tmp_path):
    (tmp_path / "trials").write_text(LIST)
    return read_trials(tmp_path / "trials")


def test_written_scores_read_back(tmp_path, trials):
    write_scores(tmp_path / "s.txt", trials, np.array([0.5, -0.25, 0.1]))
    assert (tmp_path / "s.txt").read_text() == (
        "a x 0.500000 target\nb x -0.250000 nontarget\na y 0.100000 nontarget\n"
    )
    assert read_scores(tmp_path / "s.txt", trials).tolist() == [0.5, -0.25, 0.1]


def test_order_labels_and_other_trials_do_not_matter(tmp_path, trials):
    (tmp_path / "s.txt").write_text("c x 9\na y 0.1\nb y 8\nb x -0.25 nontarget 7 7\n\na x 5e-1\n")
    assert read_scores(tmp_path / "s.txt", trials).tolist() == [0.5, -0.25, 0.1]


def test_a_long_file_in_another_order(tmp_path):
    num = 2 * LINES_AT_ONCE + 7
    write_trials(tmp_path / "trials", [(f"e{i % 89}", f"t{i}", i % 2 == 0) for i in range(num)])
    trials = read_trials(tmp_path / "trials")
    order = np.random.default_rng(0).permutation(num)
    lines = [f"e{i % 89} t{i} {i}\n" for i in order]
    (tmp_path / "s.txt").write_text("".join(lines))
    assert read_scores(tmp_path / "s.txt", trials).tolist() == list(range(num))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a x 1\nb x 2\n", ": has no score for a y; score the whole list"),
        ("", ": has no score for a x"),
        ("a x 1\nb x two\na y 3\n", ":2: is not 'enrol test score', got 'b x two'"),
        ("a x 1\na y nan\nb x 0\n", ": must be a number, got nan for a y; score it again"),
        ("a x 1\nb x\na y 3\n", ":2: is not 'enrol test score', got 'b x'"),
        ("a x 1\na x 1\nb x 2\na y 3\n", ": a trial is scored more than once, got a x"),
    ],
)
def test_bad_files_are_named(tmp_path, trials, text, line):
    (tmp_path / "s.txt").write_text(text)
    with pytest.raises(ValueError) as error:
        read_scores(tmp_path / "s.txt", trials)
    assert str(error.value).startswith(str(tmp_path / "s.txt") + line)


def test_a_missing_file_is_one_line(tmp_path, trials):
    with pytest.raises(FileNotFoundError, match=r"no such score file; run `speakerlab score`"):
        read_scores(tmp_path / "none.txt", trials)


def test_scores_are_written_a_trial_a_line(tmp_path):
    path = tmp_path / "scores" / "mini.txt"
    trials = Trials(
        ["a", "b"],
        ["x"],
        np.array([1, 0], dtype=np.int32),
        np.array([0, 0], dtype=np.int32),
        np.array([True, False]),
    )
    write_scores(path, trials, np.array([0.25, -1 / 3], dtype=np.float32))
    assert path.read_text() == "b x 0.250000 target\na x -0.333333 nontarget\n"
    assert list(path.parent.iterdir()) == [path]


def test_score_files_are_in_the_order_of_the_trials(tmp_path):
    (tmp_path / "trials").write_text("".join(f"e{i % 7} t{i} {i % 2}\n" for i in range(5000)))
    write_scores(tmp_path / "s", read_trials(tmp_path / "trials"), np.arange(5000.0))
    lines = [line.split() for line in (tmp_path / "s").read_text().splitlines()]
    assert [line[1] for line in lines] == [f"t{i}" for i in range(5000)]
    assert [float(line[2]) for line in lines] == list(range(5000))
    assert [line[3] for line in lines[:2]] == ["nontarget", "target"]
