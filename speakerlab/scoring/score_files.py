"""Score files of any system: `enrol test score` per line; further columns are ignored.

Also reads 3D-Speaker's `enrol test label score`, recognised by the label in the first line.
In: a file and a trial list. Out: the scores, in the order of the trials.
Letters: N trials, L lines.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.atomic import replacing
from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text
from speakerlab.scoring.trials import LABELS, LINES_AT_ONCE, TRUTH, Trials

NO_TRIAL = -1


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
    row_of = {name: row for row, name in enumerate(trials.enrol_ids)}
    column_of = {name: row for row, name in enumerate(trials.test_ids)}
    cells: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    scores: list[np.ndarray] = [np.empty(0)]
    for enrol, test, numbers in _read_blocks(path):
        row_L = np.fromiter(map(row_of.get, enrol, repeat(NO_TRIAL)), np.int64, len(enrol))
        column_L = np.fromiter(map(column_of.get, test, repeat(NO_TRIAL)), np.int64, len(test))
        known_L = (row_L != NO_TRIAL) & (column_L != NO_TRIAL)
        cells.append((row_L * len(trials.test_ids) + column_L)[known_L])
        scores.append(np.asarray(numbers)[known_L])
    scores_N = np.concatenate(scores)[_places(np.concatenate(cells), trials, path)]
    faults = Faults()
    for n in np.flatnonzero(np.isnan(scores_N)):
        name = f"{trials.enrol_ids[trials.enrol_N[n]]} {trials.test_ids[trials.test_N[n]]}"
        faults.add("scores", f"{path}: the score of {name} is nan; score it again")
    faults.raise_if_any(f"{path}: refused, each trial needs a number")
    return scores_N


def _read_blocks(path: Path) -> Iterator[tuple[Sequence[str], Sequence[str], list[float]]]:
    """Blocks of the file as (enrol, test, score) columns."""
    num_lines, place = 0, 0  # place: column of the score
    with open_text(path) as stream:
        while lines := list(islice(stream, LINES_AT_ONCE)):
            rows = [row for row in map(str.split, lines) if row]
            if rows:
                if not place:
                    place = 3 if [w in TRUTH for w in rows[0][2:4]] == [True, False] else 2
                columns = list(islice(zip(*rows), place + 1))  # as many as the shortest has
                try:
                    scores = list(map(float, columns[place]))
                    if place == 3 and not TRUTH.keys() >= set(columns[2]):
                        raise ValueError("a label is none")
                except (IndexError, ValueError):
                    _refuse_lines(lines, num_lines, path, place)
                    raise
                yield columns[0], columns[1], scores
            num_lines += len(lines)


def _refuse_lines(lines: Sequence[str], num_before: int, path: Path, place: int) -> None:
    form, faults = "enrol test score" if place == 2 else "enrol test label score", Faults()
    for number, line in enumerate(lines, num_before + 1):
        row = line.split()
        try:
            float(row[place] if row else "0")
            is_wrong = place == 3 and bool(row) and row[2] not in TRUTH
        except (IndexError, ValueError):
            is_wrong = True
        if is_wrong:
            text = f"is not '{form}' as the first line, got {' '.join(row)!r}; correct it"
            faults.add("unreadable lines", f"{path}:{number}: {text}")
    faults.raise_if_any(f"{path}: refused, no score was read")


def _places(cell_L: np.ndarray, trials: Trials, path: Path) -> NDArray[np.int64]:
    """The line of each trial, (N)."""
    wanted_N = trials.enrol_N.astype(np.int64) * len(trials.test_ids) + trials.test_N
    if np.array_equal(cell_L, wanted_N):  # written from the same list, as most are
        return np.arange(len(wanted_N))
    order_L = np.argsort(cell_L, kind="stable")
    sorted_L = cell_L[order_L]
    place_N = np.searchsorted(sorted_L, wanted_N)
    found_N = place_N < len(sorted_L)
    found_N[found_N] = sorted_L[place_N[found_N]] == wanted_N[found_N]
    again_L = sorted_L[1:][sorted_L[1:] == sorted_L[:-1]]
    faults = Faults()
    for cells, problem in (
        (wanted_N[~found_N], "no score; score the whole list"),
        (again_L[np.isin(again_L, wanted_N)], "more than one score; keep one"),
    ):
        for row, column in zip(*divmod(cells, len(trials.test_ids))):
            name = f"{trials.enrol_ids[row]} {trials.test_ids[column]}"
            faults.add("trials", f"{path}: {name} has {problem}")
    faults.raise_if_any(f"{path}: refused, each trial needs one score")
    return order_L[place_N]
