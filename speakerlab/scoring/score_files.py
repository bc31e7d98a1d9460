"""Score files of any system: `enrol test score` per line; further columns are ignored.

Also reads 3D-Speaker's `enrol test label score`, recognised by the label in the first line.
In: a file and a trial list. Out: the scores, in the order of the trials.
Letters: N trials, L lines.
"""

from array import array
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.atomic import replacing
from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text
from speakerlab.scoring.trials import LABELS, LINES_AT_ONCE, TRUTH, Trials


def write_scores(path: str | Path, trials: Trials, scores_N: np.ndarray) -> None:
    """Write one line per trial: enrolment id, test id, score, target|nontarget."""
    assert len(scores_N) == len(trials), (len(scores_N), len(trials))
    enrol_ids, test_ids = trials.enrol_ids, trials.test_ids
    columns = (trials.enrol_N, trials.test_N, scores_N, trials.is_target_N)
    with replacing(Path(path)) as partial, partial.open("w", encoding="utf-8") as stream:
        for start in range(0, len(trials), LINES_AT_ONCE):
            block = zip(*(column[start : start + LINES_AT_ONCE].tolist() for column in columns))
            stream.writelines(
                f"{enrol_ids[e]} {test_ids[t]} {score:.6f} {LABELS[is_target]}\n"
                for e, t, score, is_target in block
            )


def read_scores(path: str | Path, trials: Trials) -> NDArray[np.float64]:
    """Read the score of every trial, (N). Lines may be in any order; other trials are ignored.

    Raises ValueError for a line without a score, and for a trial that has none, more than one, or
    NaN.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such score file; run `speakerlab score`")
    cell_L, score_L = _read_lines(path, trials)
    order_L = np.argsort(cell_L, kind="stable")
    wanted_N = trials.enrol_N.astype(np.int64) * len(trials.test_ids) + trials.test_N
    first_N = np.searchsorted(cell_L, wanted_N, sorter=order_L)
    end_N = np.searchsorted(cell_L, wanted_N, "right", order_L)
    scores_N = np.append(score_L[order_L], np.nan)[first_N]
    faults = Faults()
    for n in np.flatnonzero((end_N - first_N != 1) | np.isnan(scores_N)):
        problem = "no score; score the whole list"
        if end_N[n] > first_N[n]:
            is_nan = np.isnan(scores_N[n])
            problem = "the score nan; score it again" if is_nan else "more than one score; keep one"
        name = f"{trials.enrol_ids[trials.enrol_N[n]]} {trials.test_ids[trials.test_N[n]]}"
        faults.add("trials", f"{path}: {name} has {problem}")
    faults.raise_if_any(f"{path}: refused, each trial needs one score")
    return scores_N


def _read_lines(path: Path, trials: Trials) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the cell of the matrix enrolment x test, and the score, of each line of a trial."""
    row_of = {name: row for row, name in enumerate(trials.enrol_ids)}
    column_of = {name: column for column, name in enumerate(trials.test_ids)}
    cells, scores, place, faults = array("q"), array("d"), 0, Faults()  # place: of the score
    with open_text(path) as stream:
        for number, words in enumerate(map(str.split, stream), 1):
            if not words:
                continue
            place = place or (3 if [w in TRUTH for w in words[2:4]] == [True, False] else 2)
            try:
                score = float(words[place])
                if place == 3 and words[2] not in TRUTH:
                    raise ValueError(words[2])
            except (IndexError, ValueError):
                form = "enrol test label score" if place == 3 else "enrol test score"
                text = f"is not '{form}' as the first line, got {' '.join(words)!r}; correct it"
                faults.add("unreadable lines", f"{path}:{number}: {text}")
                continue
            if words[0] in row_of and words[1] in column_of:
                cells.append(row_of[words[0]] * len(column_of) + column_of[words[1]])
                scores.append(score)
    faults.raise_if_any(f"{path}: refused, no score was read")
    return np.array(cells, np.int64), np.array(scores)
