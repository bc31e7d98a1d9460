"""Lines of trial lists. In: a text file. Out: the ids and the label of each trial.

The first line decides the format of the whole file: `enrol test target|nontarget` (Kaldi),
`1|0 enrol test` (VoxCeleb), `enrol test 1|0` (CN-Celeb), or a table with a header, separated by
commas, semicolons or tabs (such as NIST's keys). Labels may have capitals.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import ArrayLike

from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text

Format = tuple[str, int, set[str]]
TrialLine = tuple[int, str, str, bool]  # number of the line, both ids, is_target
LABELS = ("nontarget", "target")  # in written lists; index: is_target
TRUTH = {
    "target": True,
    "nontarget": False,
    "1": True,
    "0": False,
    # Only in tables.
    "true": True,
    "false": False,
    "tgt": True,
    "imp": False,
}
# Name -> (column of the label, spellings of the label).
FORMATS = {
    "enrol test target|nontarget": (2, {"target", "nontarget"}),
    "1|0 enrol test": (0, {"1", "0"}),
    "enrol test 1|0": (2, {"1", "0"}),
}
# The three columns that are read from a table.
TABLE = (f"{'|'.join(TRUTH)} enrol test", 0, set(TRUTH))
# Names of these three columns that occur in tables, in lower case.
HEADERS = (
    ("label", "target", "targettype", "is_target", "key"),
    (
        "enrol",
        "enroll",
        "enrolment",
        "enrollment",
        "model",
        "modelid",
        "utt1",
        "wav1",
        "file1",
    ),
    ("test", "segment", "segmentid", "utt2", "wav2", "file2"),
)


def read_trial_lines(path: Path, faults: Faults) -> Iterator[TrialLine]:
    """Yield the trials of a list; lines of another format than the first go to `faults`.

    Raises ValueError with file and line if the first line is no trial, or for a blank line between
    trials.
    """
    first_blank = 0
    with open_text(path, newline="") as stream:
        rows, row_format, num_before = _read_rows(stream, path)
        format_name, label_column, labels = row_format
        for number, row in enumerate(rows, num_before + 1):
            # Blank lines are allowed at the end of the file only.
            if not row:
                first_blank = first_blank or number
                continue
            if first_blank:
                problem = "blank line between trials; remove the line"
                raise ValueError(f"{path}:{first_blank}: {problem}")
            is_trial = len(row) == 3 and row[label_column].lower() in labels
            if not is_trial:
                faults.add(
                    "unreadable lines",
                    f"{path}:{number}: {' '.join(row)!r} is not of the format"
                    f" '{format_name}' of the first line; use one format for all lines",
                )
                continue
            label = row.pop(label_column)
            enrol_id, test_id = row
            yield number, enrol_id, test_id, TRUTH[label.lower()]


def add_repeats(
    faults: Faults,
    path: Path,
    *,
    ids: tuple[Sequence[str], Sequence[str]],
    enrol_N: ArrayLike,
    test_N: ArrayLike,
    line_N: Sequence[int],
) -> None:
    """Add the lines that repeat a pair to `faults`.

    ids: enrolment ids and test ids. enrol_N, test_N: index of the ids of each trial, in the order
    of the lines. line_N: its line.
    """
    enrol_ids, test_ids = ids
    pair_N = np.asarray(enrol_N, dtype=np.int64) * len(test_ids) + np.asarray(test_N)
    # Equal pairs become neighbours, in the order of their lines.
    order_N = np.argsort(pair_N, kind="stable")
    ascending_N = pair_N[order_N]
    is_repeated = ascending_N[1:] == ascending_N[:-1]
    for place in np.flatnonzero(is_repeated):
        earlier = order_N[place]
        later = order_N[place + 1]
        enrol, test = divmod(int(pair_N[later]), len(test_ids))
        faults.add(
            "duplicate trials",
            f"{path}:{line_N[later]}: {enrol_ids[enrol]} {test_ids[test]} repeats line"
            f" {line_N[earlier]}; keep one of them",
        )


def _read_rows(stream: TextIO, path: Path) -> tuple[Iterable[list[str]], Format, int]:
    """Return the fields of each line, their format, and the number of lines before them."""
    first = stream.readline()
    for separator in ",;\t":
        header = next(csv.reader([first.lower()], delimiter=separator), [])
        columns = _find_columns(header)
        if columns is not None:
            table = csv.reader(stream, delimiter=separator)
            rows = _table_rows(table, columns, num_columns=len(header))
            return rows, TABLE, 1

    fields = first.split()
    matches: list[Format] = []
    if len(fields) == 3:
        for name, (label_column, labels) in FORMATS.items():
            if fields[label_column].lower() in labels:
                matches.append((name, label_column, labels))
    # Guessing between two formats could silently take an id as the label.
    if first and len(matches) != 1:
        problem = "can be read in two ways" if matches else "is not a trial"
        format_names = "', '".join(FORMATS)
        fix = f"write '{format_names}', or a table whose header names enrol, test and label"
        if len(fields) > 2 and not matches:
            fix += "; give paths with blanks an id without blanks, in a wav.scp"
        raise ValueError(f"{path}:1: {' '.join(fields)!r} {problem}; {fix}")
    rows = map(str.split, chain([first], stream))
    # For an empty file, any format is fine.
    row_format = matches[0] if matches else TABLE
    return rows, row_format, 0


def _find_columns(header: Sequence[str]) -> list[int] | None:
    """Return the columns of label, enrolment and test; None unless there is exactly one of each."""
    cells = [cell.strip() for cell in header]
    columns: list[int] = []
    for names in HEADERS:
        matches = [column for column, cell in enumerate(cells) if cell in names]
        if len(matches) != 1:
            return None
        columns += matches
    return columns


def _table_rows(
    table: Iterable[list[str]], columns: Sequence[int], *, num_columns: int
) -> Iterator[list[str]]:
    """Yield these columns of each line; lines with more or fewer columns as one text."""
    for row in table:
        # A separator in a name shifts the columns after it.
        if row and len(row) != num_columns:
            yield [", ".join(row)]
            continue
        cells = [row[column] for column in columns if row]
        # A cell with several words yields more than three fields, which the caller refuses.
        yield " ".join(cells).split()
