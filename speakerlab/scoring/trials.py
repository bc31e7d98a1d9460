"""Trial lists. In: a text file. Out: index arrays.

Letters: N trials.
The first line decides the format of the whole file: `enrol test target|nontarget` (Kaldi),
`1|0 enrol test` (VoxCeleb), `enrol test 1|0` (CN-Celeb), or a table with a header, separated by
commas, semicolons or tabs (such as NIST's keys).
"""

import csv
from array import array
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text, show_invisible

Format = tuple[str, int, set[str]]
# A block that fits in the cache: larger blocks take twice as long to split.
LINES_AT_ONCE = 2_048

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


@dataclass(frozen=True)
class Trials:
    """Trials, pairs of an enrolment and a test utterance, as indices into lists of distinct ids."""

    enrol_ids: list[str]
    test_ids: list[str]
    enrol_N: NDArray[np.int32]  # index into enrol_ids
    test_N: NDArray[np.int32]  # index into test_ids
    is_target_N: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.is_target_N)

    @property
    def ids(self) -> list[str]:
        """Return every utterance of either side once; all of them need an embedding."""
        return list(dict.fromkeys([*self.enrol_ids, *self.test_ids]))

    def check_known(self, ids: Collection[str], *, where: str = "trials") -> None:
        """Raise ValueError with the utterances that are not in `ids`."""
        faults = Faults()
        for utterance in self.ids:
            if utterance not in ids:
                # An invisible character may be all that differs.
                shown = show_invisible(utterance)
                faults.add(
                    "unknown utterances",
                    f"{where}: a trial names {shown}, which is not in the data; "
                    "add the utterance or remove the trial",
                )
        faults.raise_if_any(f"{where}: refused, trials must name known utterances")

    def check_both_kinds(self, *, where: str) -> None:
        """Raise ValueError unless there are both target and non-target trials."""
        num_target = int(self.is_target_N.sum())
        has_both = 0 < num_target < len(self)
        if not has_both:
            raise ValueError(
                f"{where}: {num_target} of {len(self)} trials are targets; an error"
                " rate needs both targets and nontargets, add the others"
            )

    def speakers(self, speaker_of: Mapping[str, str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the speakers of both sides of each trial as numbers, (N) each."""
        # Each new name gets the next number, from 0.
        code_of = defaultdict[str, int](count().__next__)
        return self.look_up(lambda name: code_of[speaker_of[name]])

    def look_up(
        self, value_of: Callable[[str], float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the value of the enrolment id and of the test id of each trial, (N) each."""
        # Look up each id once, then index by trial: there are many more trials than ids.
        enrol_values = np.array([value_of(name) for name in self.enrol_ids])
        test_values = np.array([value_of(name) for name in self.test_ids])
        return enrol_values[self.enrol_N], test_values[self.test_N]


def read_trials(path: str | Path) -> Trials:
    """Read a trial list in any of the formats.

    Raises ValueError with file and line for lines whose format differs from the first line, and for
    a pair that occurs twice.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"{path}: is a folder, not a trial list; give one of its lists"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such trial list; correct the path")
    # Id -> number, in order of appearance.
    enrol_number = defaultdict[str, int](count().__next__)
    test_number = defaultdict[str, int](count().__next__)
    # Arrays, because lists would take several times the memory.
    enrol_N = array("i")
    test_N = array("i")
    is_target_N = bytearray()
    faults = Faults()
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
            enrol_N.append(enrol_number[enrol_id])
            test_N.append(test_number[test_id])
            is_target_N.append(TRUTH[label.lower()])
    faults.raise_if_any(f"{path}: refused, no trial was read")
    if not enrol_N:
        raise ValueError(f"{path}: has no trials; correct the list")
    trials = Trials(
        enrol_ids=list(enrol_number),
        test_ids=list(test_number),
        enrol_N=np.array(enrol_N, np.int32),
        test_N=np.array(test_N, np.int32),
        is_target_N=np.frombuffer(is_target_N, np.bool_),
    )
    _refuse_duplicates(trials, path, lines_before=num_before)
    return trials


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
        raise ValueError(
            f"{path}:1: {' '.join(fields)!r} {problem}; write '{format_names}', or a table"
            " whose header names enrol, test and label"
        )
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


def _refuse_duplicates(trials: Trials, path: Path, *, lines_before: int) -> None:
    """Raise ValueError with the lines that repeat a pair."""
    enrol_N = trials.enrol_N.astype(np.int64)
    pair_N = enrol_N * len(trials.test_ids) + trials.test_N
    # Equal pairs become neighbours, in the order of their lines.
    order_N = np.argsort(pair_N, kind="stable")
    ascending_N = pair_N[order_N]
    is_repeated = ascending_N[1:] == ascending_N[:-1]
    faults = Faults()
    for place in np.flatnonzero(is_repeated):
        earlier = order_N[place]
        later = order_N[place + 1]
        enrol_id = trials.enrol_ids[trials.enrol_N[later]]
        test_id = trials.test_ids[trials.test_N[later]]
        faults.add(
            "duplicate trials",
            f"{path}:{later + 1 + lines_before}: {enrol_id} {test_id} repeats line "
            f"{earlier + 1 + lines_before}; keep one of them",
        )
    faults.raise_if_any(f"{path}: refused, a trial may occur once")
