"""Trial lists: a text file in, index arrays out.

Letters: N trials.
The first line decides the format of the whole file: `enrol test target|nontarget` (Kaldi),
`1|0 enrol test` (VoxCeleb), `enrol test 1|0` (CN-Celeb), or a table with a header, separated by
commas, semicolons or tabs (such as NIST's keys).
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.faults import Faults

LINES_AT_ONCE = 2_048  # a block that fits the cache: larger ones take twice as long to split

LABELS = ("nontarget", "target")  # as written, by truth
TRUTH = {"target": True, "nontarget": False, "1": True, "0": False}
# name -> (column of the label, spellings of the label)
FORMATS = {
    "enrol test target|nontarget": (2, {"target", "nontarget"}),
    "1|0 enrol test": (0, {"1", "0"}),
    "enrol test 1|0": (2, {"1", "0"}),
}
# known names of the three columns of a table, in lower case
HEADERS = (
    ("label", "target", "targettype", "is_target", "key"),
    ("enrol", "enroll", "enrolment", "enrollment", "model", "modelid", "utt1", "wav1", "file1"),
    ("test", "segment", "segmentid", "utt2", "wav2", "file2"),
)
TABLE_TRUTH = TRUTH | {"true": True, "false": False, "imp": False, "tgt": True}


@dataclass(frozen=True)
class Trials:
    """Pairs of an enrolment and a test utterance, as indices into lists of distinct ids."""

    enrol_ids: list[str]
    test_ids: list[str]
    enrol_N: NDArray[np.int32]  # index into enrol_ids
    test_N: NDArray[np.int32]  # index into test_ids
    is_target_N: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.is_target_N)

    @property
    def ids(self) -> list[str]:
        """Every utterance of either side, once: those that need an embedding."""
        return list(dict.fromkeys([*self.enrol_ids, *self.test_ids]))

    def check_known(self, ids: Collection[str], *, where: str = "trials") -> None:
        """Raise ValueError naming utterances that are not among `ids`."""
        faults = Faults()
        for utterance in self.ids:
            if utterance not in ids:
                faults.add(
                    "unknown utterances",
                    f"{where}: a trial names {utterance}, which is not in the data; "
                    "add the utterance or remove the trial",
                )
        faults.raise_if_any(f"{where}: refused, trials must name known utterances")

    def speakers(self, speaker_of: Mapping[str, str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of both speakers of each trial, equal for equal speakers."""
        code_of = defaultdict[str, int](count().__next__)
        return self.look_up(lambda name: code_of[speaker_of[name]])

    def look_up(self, value_of: Callable[[str], float]) -> tuple[np.ndarray, np.ndarray]:
        """Return the value of the enrolment id and of the test id of each trial, (N) each."""
        enrol, test = (np.array(list(map(value_of, i))) for i in (self.enrol_ids, self.test_ids))
        return enrol[self.enrol_N], test[self.test_N]


def read_trials(path: str | Path) -> Trials:
    """Read a trial list in any of the formats.

    Raises ValueError, naming file and line, for lines of another format than the first and for a
    pair that occurs twice.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such trial list; make it in stage 1")
    enrol = defaultdict[str, int](count().__next__)  # id -> number, in order of appearance
    test = defaultdict[str, int](count().__next__)
    blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    separator = _separator(path)
    columns = _read_columns(path) if separator is None else _read_table(path, separator)
    for (label, first, second), num in columns:
        blocks.append(
            (
                np.fromiter(map(enrol.__getitem__, first), np.int32, num),
                np.fromiter(map(test.__getitem__, second), np.int32, num),
                np.fromiter(map(TRUTH.__getitem__, label), np.bool_, num),
            )
        )
    if not blocks:
        raise ValueError(f"{path}: has no trials; make it in stage 1")
    enrol_N, test_N, is_target_N = (np.concatenate(column) for column in zip(*blocks))
    trials = Trials(list(enrol), list(test), enrol_N, test_N, is_target_N)
    _refuse_duplicates(trials, path, lines_before=0 if separator is None else 1)
    return trials


def _read_columns(path: Path) -> Iterator[tuple[Sequence[tuple[str, ...]], int]]:
    """Blocks of the file as (label, enrol, test) columns, and the number of lines of each."""
    style, num_lines, ended = "", 0, False
    with path.open(encoding="utf-8") as stream:
        while lines := list(islice(stream, LINES_AT_ONCE)):
            rows = [line.split() for line in lines]
            while rows and not rows[-1]:  # blank lines, allowed at the end of the file
                rows.pop()
            if rows and ended:
                raise ValueError(
                    f"{path}:{num_lines + 1}: blank line between trials; remove the line"
                )
            ended = len(rows) < len(lines)
            if not rows:
                continue
            style = style or _style_of(rows[0], path)
            column, labels = FORMATS[style]
            if set(map(len, rows)) != {3} or not labels.issuperset(row[column] for row in rows):
                _refuse_lines(rows, style, path, num_lines)
            columns = list(zip(*rows))
            num_lines += len(rows)
            yield [columns.pop(column), *columns], len(rows)


def _separator(path: Path) -> str | None:
    """The separator of a table with a header; None for the other formats."""
    with path.open(encoding="utf-8-sig") as stream:
        first = stream.readline()
    for separator in ",;\t":
        if _places(next(csv.reader([first], delimiter=separator), [])) is not None:
            return separator
    return None


def _places(header: Sequence[str]) -> list[int] | None:
    """The label, enrolment and test columns; None if this is no header."""
    words = [word.strip().lower() for word in header]
    found = [[i for i, word in enumerate(words) if word in names] for names in HEADERS]
    return [places[0] for places in found] if all(len(places) == 1 for places in found) else None


def _read_table(path: Path, separator: str) -> Iterator[tuple[Sequence[tuple[str, ...]], int]]:
    """Like `_read_columns`, from a table with a header; labels are spelled like the others."""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.reader(stream, delimiter=separator)
        places = _places(next(rows)) or []
        faults = Faults()
        while block := list(islice(rows, LINES_AT_ONCE)):
            kept: list[tuple[str, ...]] = []
            for number, row in enumerate(block, rows.line_num - len(block) + 1):
                words = tuple(row[i].strip() for i in places if i < len(row))
                if len(words) < 3 or words[0].lower() not in TABLE_TRUTH or not all(words):
                    faults.add(
                        "unreadable lines",
                        f"{path}:{number}: needs an enrolment id, a test id and one of the labels "
                        f"{', '.join(TABLE_TRUTH)}, got {separator.join(row)!r}; correct it",
                    )
                else:
                    kept.append((LABELS[TABLE_TRUTH[words[0].lower()]], *words[1:]))
            if kept:
                yield list(zip(*kept)), len(kept)
        faults.raise_if_any(f"{path}: refused, no trial was read")


def _style_of(row: Sequence[str], path: Path) -> str:
    matches = [
        style for style, (i, labels) in FORMATS.items() if len(row) == 3 and row[i] in labels
    ]
    if len(matches) != 1:
        problem = "can be read in two ways" if matches else "is not a trial"
        known = "', '".join(FORMATS)
        raise ValueError(
            f"{path}:1: {' '.join(row)!r} {problem}; write '{known}', or a table whose header "
            "names enrol, test and label"
        )
    return matches[0]


def _refuse_lines(rows: Sequence[Sequence[str]], style: str, path: Path, num_before: int) -> None:
    column, labels = FORMATS[style]
    faults = Faults()
    for number, row in enumerate(rows, start=num_before + 1):
        if len(row) != 3 or row[column] not in labels:
            faults.add(
                "unreadable lines",
                f"{path}:{number}: {' '.join(row)!r} is not of the format '{style}' of the first "
                "line; use one format for all lines",
            )
    faults.raise_if_any(f"{path}: refused, no trial was read")


def _refuse_duplicates(trials: Trials, path: Path, *, lines_before: int) -> None:
    pair_N = trials.enrol_N.astype(np.int64) * len(trials.test_ids) + trials.test_N
    order_N = np.argsort(pair_N, kind="stable")
    repeats_N = pair_N[order_N[1:]] == pair_N[order_N[:-1]]
    faults = Faults()
    for i in np.flatnonzero(repeats_N):
        first, again = order_N[i], order_N[i + 1]
        enrol, test = trials.enrol_ids[trials.enrol_N[again]], trials.test_ids[trials.test_N[again]]
        faults.add(
            "duplicate trials",
            f"{path}:{again + 1 + lines_before}: {enrol} {test} repeats line "
            f"{first + 1 + lines_before}; keep one of them",
        )
    faults.raise_if_any(f"{path}: refused, a trial may occur once")
