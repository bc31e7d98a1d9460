"""Lines of trial lists. In: a text file. Out: the ids and the label of each trial.

The first line decides the format of the whole file: `enrol test target|nontarget` (Kaldi),
`1|0 enrol test` (VoxCeleb), `enrol test 1|0` (CN-Celeb), or a table with a header, separated by
commas, semicolons or tabs (such as NIST's keys). Labels may have capitals. Lists of pairs have no
labels: `enrol test`, or a table with a header.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
from numpy.typing import ArrayLike

from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text

TrialLine = tuple[int, str, str, bool]  # number of the line, both ids, is_target
PairLine = tuple[int, str, str]  # number of the line, both ids
# The fields of a line; [] for a blank line. A text says what is wrong with the line.
Row = list[str] | str
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


class Format(NamedTuple):
    """Format of the lines of a trial list."""

    name: str  # as in error lines
    label_column: int
    labels: set[str]  # spellings of the label, in lower case


FORMATS = (
    Format(
        "enrol test target|nontarget", label_column=2, labels={"target", "nontarget"}
    ),
    Format("1|0 enrol test", label_column=0, labels={"1", "0"}),
    Format("enrol test 1|0", label_column=2, labels={"1", "0"}),
)
# Of a table, three columns are read, in this order.
TABLE = Format(
    name=f"{'|'.join(TRUTH)} enrol test",
    label_column=0,
    labels=set(TRUTH),
)
# Names of the columns that occur in tables, in lower case.
LABEL_NAMES = ("label", "target", "targettype", "is_target", "key")
PAIR_HEADERS = (
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
HEADERS = (LABEL_NAMES, *PAIR_HEADERS)
Headers = Sequence[Sequence[str]]


def read_trial_lines(path: Path, faults: Faults) -> Iterator[TrialLine]:
    """Yield the trials of a list; lines of another format than the first go to `faults`.

    Raises ValueError with file and line if the first line is no trial, or for a blank line between
    trials.
    """
    # The list is opened once, because it may be a pipe.
    with open_text(path, newline="") as stream:
        first = stream.readline()
        yield from _trials(first, stream, path, faults, number=1)


def read_pair_lines(path: Path, faults: Faults) -> Iterator[PairLine]:
    """Yield the pairs of a list, with labels or without; lines of another format go to `faults`.

    Names in a table without labels may have blanks. Raises ValueError with file and line if the
    first line is neither a pair nor a trial, and as `read_trial_lines` for a list with labels.
    """
    with open_text(path, newline="") as stream:
        number, first = _first_line(stream)
        if _has_labels(first):
            trials = _trials(first, stream, path, faults, number=number)
            for line_number, enrol_id, test_id, _ in trials:
                yield line_number, enrol_id, test_id
        else:
            yield from _pairs(first, stream, path, faults, number=number)


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

    ids: enrolment ids and test ids. enrol_N, test_N: for each of N trials, in the order of the
    lines, the index of its ids in these. line_N: the number of its line. Letters: R repeats.
    """
    enrol_ids, test_ids = ids
    # One number for each pair of ids.
    pair_N = np.asarray(enrol_N, dtype=np.int64) * len(test_ids) + np.asarray(test_N)
    # Equal pairs become neighbours, in the order of their lines.
    order_N = np.argsort(pair_N, kind="stable")
    ascending_N = pair_N[order_N]
    is_repeated = ascending_N[1:] == ascending_N[:-1]
    earlier_R = order_N[:-1][is_repeated]
    later_R = order_N[1:][is_repeated]
    if not len(later_R):
        return

    def describe() -> Iterator[str]:
        # In the order of the lines, so that the list can be corrected from its start.
        for repeat in np.argsort(later_R):
            earlier = int(earlier_R[repeat])
            later = int(later_R[repeat])
            enrol, test = divmod(int(pair_N[later]), len(test_ids))
            pair = f"{enrol_ids[enrol]} {test_ids[test]}"
            yield (
                f"{path}:{line_N[later]}: {pair} repeats line {line_N[earlier]}; keep one"
                " of them"
            )

    faults.add_first("duplicate trials", describe(), len(later_R))


def _has_labels(first: str) -> bool:
    """Return whether the first line of a list is that of a trial list."""
    if _find_separator(first, HEADERS) is not None:
        return True
    # A name in quotes may have blanks.
    return len(first.split()) == 3 and not first.startswith('"')


def _trials(
    first: str, lines: Iterable[str], path: Path, faults: Faults, *, number: int
) -> Iterator[TrialLine]:
    """Yield the trials of a list; number: of its first line."""
    first_blank = 0
    rows, row_format, num_before = _trial_rows(first, lines, path, number)
    for row_number, row in enumerate(rows, number + num_before):
        # Blank lines are allowed at the end of the file only.
        if not row:
            first_blank = first_blank or row_number
            continue
        if first_blank:
            problem = "blank line between trials; remove the line"
            raise ValueError(f"{path}:{first_blank}: {problem}")
        if isinstance(row, str):
            faults.add("unreadable lines", f"{path}:{row_number}: {row}")
            continue
        label = ""
        if len(row) == 3:
            label = row[row_format.label_column].lower()
        if label not in row_format.labels:
            faults.add(
                "unreadable lines",
                f"{path}:{row_number}: {' '.join(row)!r} is not of the format"
                f" '{row_format.name}' of the first line; use one format for all lines",
            )
            continue
        del row[row_format.label_column]
        enrol_id, test_id = row
        yield row_number, enrol_id, test_id, TRUTH[label]


def _pairs(
    first: str, lines: Iterable[str], path: Path, faults: Faults, *, number: int
) -> Iterator[PairLine]:
    """Yield the pairs of a list without labels; number: of its first line."""
    separator = _find_separator(first, PAIR_HEADERS)
    rows: Iterable[Row]
    if separator is not None:
        rows = _table_rows(first, lines, separator, PAIR_HEADERS)
        number += 1
    else:
        _check_pair(first, where=f"{path}:{number}")
        rows = map(str.split, chain([first], lines))
    for row_number, row in enumerate(rows, number):
        if isinstance(row, str):
            faults.add("unreadable lines", f"{path}:{row_number}: {row}")
        elif row and (len(row) != 2 or not all(row)):
            faults.add(
                "unreadable lines",
                f"{path}:{row_number}: must be a pair 'a b', got '{' '.join(row)}';"
                " correct it",
            )
        elif row:
            enrol_id, test_id = row
            yield row_number, enrol_id, test_id


def _check_pair(line: str, *, where: str) -> None:
    """Raise ValueError for the first line of a table without a header, or of paths with blanks."""
    is_empty = not line.strip()
    has_names_only = "," not in line and not line.startswith('"')
    if is_empty or (has_names_only and len(line.split()) == 2):
        return
    raise ValueError(
        f"{where}: must be a pair 'a b' or a trial, got '{line.strip()}'; give names with"
        " commas or blanks in a table, in quotes, after the line 'enrol,test' (with labels"
        " 'enrol,test,label')"
    )


def _trial_rows(
    first: str, lines: Iterable[str], path: Path, number: int
) -> tuple[Iterable[Row], Format, int]:
    """Return the fields of each line, their format, and the number of lines before them."""
    separator = _find_separator(first, HEADERS)
    if separator is not None:
        table_rows = _table_rows(first, lines, separator, HEADERS)
        return _label_rows(table_rows), TABLE, 1

    fields = first.split()
    matches: list[Format] = []
    if len(fields) == 3:
        for row_format in FORMATS:
            if fields[row_format.label_column].lower() in row_format.labels:
                matches.append(row_format)
    # Guessing between two formats could silently take an id as the label.
    if first and len(matches) != 1:
        problem = "can be read in two ways" if matches else "is not a trial"
        format_names = "', '".join(row_format.name for row_format in FORMATS)
        fix = f"write '{format_names}', or a table whose header names enrol, test and label"
        # Three fields, one of them a label, are in another order. More are names with blanks.
        has_label = any(field.lower() in TRUTH for field in fields)
        is_reordered = len(fields) == 3 and has_label
        if len(fields) > 2 and not is_reordered:
            fix += "; give paths with blanks an id without blanks, in a wav.scp"
        raise ValueError(f"{path}:{number}: {' '.join(fields)!r} {problem}; {fix}")
    rows = map(str.split, chain([first], lines))
    # For an empty file, any format is fine.
    row_format = matches[0] if matches else TABLE
    return rows, row_format, 0


def _first_line(stream: TextIO) -> tuple[int, str]:
    """Return number and text of the first line that is not blank; "" if there is none."""
    for number, line in enumerate(stream, 1):
        if line.strip():
            return number, line
    return 0, ""


def _find_separator(header: str, names: Headers) -> str | None:
    """Return the separator of a table, given its first line; None if that is no such header."""
    for separator in ",;\t":
        columns = _find_columns(_header_cells(header, separator), names)
        if columns is not None:
            return separator
    return None


def _header_cells(header: str, separator: str) -> list[str]:
    cells = next(csv.reader([header.lower()], delimiter=separator), [])
    return [cell.strip() for cell in cells]


def _find_columns(cells: Sequence[str], names: Headers) -> list[int] | None:
    """Return the columns with these names; None unless there is exactly one of each.

    A table with a label is no table of pairs.
    """
    if names is PAIR_HEADERS and any(cell in LABEL_NAMES for cell in cells):
        return None
    columns: list[int] = []
    for names_of_column in names:
        matches = [
            column for column, cell in enumerate(cells) if cell in names_of_column
        ]
        if len(matches) != 1:
            return None
        columns += matches
    return columns


def _table_rows(
    header: str, lines: Iterable[str], separator: str, names: Headers
) -> Iterator[Row]:
    """Yield the cells of these columns of each line."""
    header_cells = _header_cells(header, separator)
    columns = _find_columns(header_cells, names) or []
    num_columns = len(header_cells)
    for row in csv.reader(lines, delimiter=separator):
        if not row:
            yield []
        # A separator in a name shifts the columns after it.
        elif len(row) != num_columns:
            yield (
                f"has {len(row)} columns, not {num_columns} as the header, got"
                f" '{', '.join(row)}'; put names with separators in quotes"
            )
        else:
            yield [row[column].strip() for column in columns]


def _label_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield label, enrolment id and test id of each line, or what is wrong with them."""
    for row in rows:
        if isinstance(row, str) or not row:
            yield row
            continue
        label, *ids = row
        are_words = " ".join(ids).split() == ids
        if not are_words:
            quoted_ids = "' and '".join(ids)
            yield (
                f"ids must be one word each, got '{quoted_ids}'; correct them, or give"
                " paths with blanks an id in a wav.scp"
            )
        elif label.lower() not in TRUTH:
            yield f"label must be one of {', '.join(TRUTH)}, got '{label}'; correct it"
        else:
            yield row
