"""Score files of any system: `enrol test score` per line, which a label may follow.

Also reads 3D-Speaker's `enrol test label score`, recognised by the label in the first line.
In: a file and a trial list. Out: the scores, in the order of the trials.
Letters: N trials, L lines.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.atomic import replacing
from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text
from speakerlab.core.trial_lines import LABELS, TRUTH
from speakerlab.scoring.trials import LINES_AT_ONCE, Trials

NO_LABEL = -1  # of a line without a label


def write_scores(path: str | Path, trials: Trials, scores_N: np.ndarray) -> None:
    """Write one line per trial: enrolment id, test id, score, target|nontarget."""
    assert len(scores_N) == len(trials), (len(scores_N), len(trials))
    with (
        replacing(Path(path)) as partial,
        partial.open("w", encoding="utf-8", newline="\n") as stream,
    ):
        for start in range(0, len(trials), LINES_AT_ONCE):
            block = slice(start, start + LINES_AT_ONCE)
            # Convert to Python numbers: formatting NumPy numbers takes much longer.
            rows = zip(
                trials.enrol_N[block].tolist(),
                trials.test_N[block].tolist(),
                scores_N[block].tolist(),
                trials.is_target_N[block].tolist(),
            )
            lines: list[str] = []
            for enrol, test, score, is_target in rows:
                pair = f"{trials.enrol_ids[enrol]} {trials.test_ids[test]}"
                lines.append(f"{pair} {score:.6f} {LABELS[is_target]}\n")
            stream.writelines(lines)


def read_scores(path: str | Path, trials: Trials) -> NDArray[np.float64]:
    """Read the score of every trial, (N). Lines may be in any order; other trials are ignored.

    Raises ValueError for a line without a score, and for a trial with no score, several scores, NaN
    or another label than in the list.
    """
    path = Path(path)
    if not path.exists():  # a file, or a pipe
        raise FileNotFoundError(f"{path}: no such score file; run `speakerlab score`")
    cell_L, score_L, label_L = _read_lines(path, trials)
    if not len(cell_L):
        first = (
            f"{trials.enrol_ids[trials.enrol_N[0]]} {trials.test_ids[trials.test_N[0]]}"
        )
        raise ValueError(
            f"{path}: has no trial of the list, such as {first}; give the scores of this"
            " list"
        )
    # Find each trial's cell in the sorted cells of the lines by bisection: a dict of millions of
    # pairs would take too much memory.
    order_L = np.argsort(cell_L, kind="stable")
    enrol_N = trials.enrol_N.astype(np.int64)
    cell_N = enrol_N * len(trials.test_ids) + trials.test_N
    first_N = np.searchsorted(cell_L, cell_N, side="left", sorter=order_L)
    end_N = np.searchsorted(cell_L, cell_N, side="right", sorter=order_L)
    num_lines_N = end_N - first_N
    # Append one score, for a missing trial whose cell would come after all others.
    ascending_scores = np.append(score_L[order_L], np.nan)
    scores_N = ascending_scores[first_N]

    # A label that contradicts the list is of another list, or a score was taken for the label.
    ascending_labels = np.append(label_L[order_L], NO_LABEL)
    labels_N = ascending_labels[first_N]
    contradicts_N = (labels_N != NO_LABEL) & (labels_N != trials.is_target_N)

    is_nan_N = np.isnan(scores_N)
    is_wrong_N = (num_lines_N != 1) | is_nan_N | contradicts_N
    faults = Faults()
    for trial in np.flatnonzero(is_wrong_N):
        if num_lines_N[trial] == 0:
            problem = "no score; score the whole list"
        elif is_nan_N[trial]:
            problem = "the score nan; score it again"
        elif num_lines_N[trial] > 1:
            problem = "more than one score; keep one"
        else:
            label = LABELS[labels_N[trial]]
            problem = f"the label {label}, unlike in the list; correct one of them"
        enrol_id = trials.enrol_ids[trials.enrol_N[trial]]
        test_id = trials.test_ids[trials.test_N[trial]]
        faults.add("trials", f"{path}: {enrol_id} {test_id} has {problem}")
    faults.raise_if_any(f"{path}: refused, each trial needs one score")
    return scores_N


def _read_lines(
    path: Path, trials: Trials
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int8]]:
    """Return cell, score and label of each line of a trial.

    cell: index into the flattened matrix of enrolments x tests. label: 1 for a target, 0 for a
    non-target, or NO_LABEL.
    """
    row_of = {name: row for row, name in enumerate(trials.enrol_ids)}
    column_of = {name: column for column, name in enumerate(trials.test_ids)}
    # Arrays, because lists of millions of Python numbers would take much memory.
    cells = array("q")
    scores = array("d")
    labels = array("b")
    faults = Faults()
    score_column = 0  # unknown before the first line with text
    with open_text(path) as stream:
        for number, line in enumerate(stream, start=1):
            fields = line.split()
            if not fields:
                continue
            if not score_column:
                score_column = _find_score_column(fields)
            score_and_label = _parse_fields(fields, score_column)
            if score_and_label is None:
                form = "enrol test score [label]"
                if score_column == 3:
                    form = "enrol test label score"
                faults.add(
                    "unreadable lines",
                    f"{path}:{number}: is not '{form}' as the first line, got"
                    f" {' '.join(fields)!r}; correct it",
                )
                continue
            enrol_id, test_id = fields[:2]
            if enrol_id in row_of and test_id in column_of:
                row = row_of[enrol_id]
                column = column_of[test_id]
                score, label = score_and_label
                cells.append(row * len(column_of) + column)
                scores.append(score)
                labels.append(label)
    faults.raise_if_any(f"{path}: refused, no score was read")
    if not score_column:
        raise ValueError(f"{path}: is empty; score the list again")
    return (
        np.array(cells, np.int64),
        np.array(scores),
        np.array(labels, np.int8),
    )


def _parse_fields(fields: Sequence[str], score_column: int) -> tuple[float, int] | None:
    """Return (score, label or NO_LABEL) of a line; None if it has another form than the first."""
    if len(fields) <= score_column:
        return None
    try:
        score = float(fields[score_column])
    except ValueError:
        return None
    # What remains besides the two ids and the score is the label. A blank in an id shifts the
    # columns, so that a part of the id would be the label.
    labels = [*fields[2:score_column], *fields[score_column + 1 :]]
    if not labels:
        return score, NO_LABEL
    label = labels[0].lower()
    if len(labels) > 1 or label not in TRUTH:
        return None
    return score, TRUTH[label]


def _find_score_column(fields: Sequence[str]) -> int:
    """Return the column of the score, from the first line: 3 after a label, else 2."""
    # In `enrol test score label`, the label is after the score.
    are_labels = [field.lower() in TRUTH for field in fields[2:4]]
    return 3 if are_labels == [True, False] else 2
