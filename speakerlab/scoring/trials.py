"""Trial lists: a text file in, index arrays out.

Letters: N trials.
Spellings are told apart by the first line and held to for the whole file: `enrol test
target|nontarget` (Kaldi), `1|0 enrol test` (VoxCeleb), `enrol test 1|0` (CN-Celeb), and tables with
a header, separated by commas, semicolons or tabs (NIST's keys among them).
"""

import csv
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.atomic import replacing
from speakerlab.core.faults import Faults

LINES_AT_ONCE = 2_048  # a piece that fits the cache: larger ones take twice as long to split

TRUTH = {"target": True, "nontarget": False, "1": True, "0": False}
# name -> (column of the label, spellings of the label)
FORMATS = {
    "enrol test target|nontarget": (2, {"target", "nontarget"}),
    "1|0 enrol test": (0, {"1", "0"}),
    "enrol test 1|0": (2, {"1", "0"}),
}
# what the three columns of a table may be called, in lower case
HEADERS = (
    ("label", "target", "targettype", "is_target", "key"),
    ("enrol", "enroll", "enrolment", "enrollment", "model", "modelid", "utt1", "wav1", "file1"),
    ("test", "segment", "segmentid", "utt2", "wav2", "file2"),
)
TABLE_TRUTH = TRUTH | {"true": True, "false": False, "imp": False, "tgt": True}


@dataclass(frozen=True)
class Trials:
    """Pairs of an enrolment and a test utterance; both sides count into lists of distinct ids."""

    enrol_ids: list[str]
    test_ids: list[str]
    enrol_N: NDArray[np.int32]  # index into enrol_ids
    test_N: NDArray[np.int32]  # index into test_ids
    is_target_N: NDArray[np.bool_]

    def __post_init__(self) -> None:
        assert self.enrol_N.shape == self.test_N.shape == self.is_target_N.shape

    def __len__(self) -> int:
        return len(self.is_target_N)

    @property
    def ids(self) -> list[str]:
        """Every utterance of either side, once: what has to have an embedding."""
        return list(dict.fromkeys([*self.enrol_ids, *self.test_ids]))

    def check_known(self, ids: Collection[str], *, where: str = "trials") -> None:
        """Raise ValueError naming utterances that are not among `ids`."""
        known = ids if isinstance(ids, (set, frozenset, dict)) else set(ids)
        faults = Faults()
        for utterance in self.ids:
            if utterance not in known:
                faults.add(
                    "unknown utterances",
                    f"{where}: a trial names {utterance}, which is not in the data; "
                    "add the utterance or remove the trial",
                )
        faults.raise_if_any(f"{where}: refused, trials must name known utterances")

    def speakers(
        self, speaker_of: Mapping[str, str]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Numbers of the enrolment and the test speaker of each trial, equal for equal speakers."""
        code_of: dict[str, int] = {}

        def codes(ids: Sequence[str]) -> NDArray[np.int32]:
            numbers = (code_of.setdefault(speaker_of[u], len(code_of)) for u in ids)
            return np.fromiter(numbers, np.int32, len(ids))

        return codes(self.enrol_ids)[self.enrol_N], codes(self.test_ids)[self.test_N]


class _Numbering(dict[str, int]):
    """Gives every new id the next number."""

    def __missing__(self, key: str) -> int:
        self[key] = number = len(self)
        return number


def read_trials(path: str | Path) -> Trials:
    """Read a trial list in any of the spellings; what is wrong with it is named by file and line.

    Raises ValueError for lines of another shape than the first, and for a pair that occurs twice.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such trial list; make it in stage 1")
    enrol, test = _Numbering(), _Numbering()
    pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    separator = _separator(path)
    columns = _read_columns(path) if separator is None else _read_table(path, separator)
    for (label, first, second), count in columns:
        pieces.append(
            (
                np.fromiter(map(enrol.__getitem__, first), np.int32, count),
                np.fromiter(map(test.__getitem__, second), np.int32, count),
                np.fromiter(map(TRUTH.__getitem__, label), np.bool_, count),
            )
        )
    if not pieces:
        raise ValueError(f"{path}: no trials, got an empty file; make it in stage 1")
    enrol_N, test_N, is_target_N = (np.concatenate(column) for column in zip(*pieces))
    trials = Trials(list(enrol), list(test), enrol_N, test_N, is_target_N)
    _refuse_duplicates(trials, path, lines_before=0 if separator is None else 1)
    return trials


def write_trials(path: str | Path, rows: Iterable[tuple[str, str, bool]]) -> None:
    """Write (enrol id, test id, is target) rows, Kaldi style; the file appears when it is whole."""
    rows = iter(rows)
    with replacing(Path(path)) as partial, partial.open("w", encoding="utf-8") as stream:
        while piece := list(islice(rows, LINES_AT_ONCE)):
            stream.writelines(
                f"{enrol} {test} {label_of(is_target)}\n" for enrol, test, is_target in piece
            )


def label_of(is_target: bool) -> str:
    """How a trial's truth is written."""
    return "target" if is_target else "nontarget"


def _read_columns(path: Path) -> Iterator[tuple[Sequence[tuple[str, ...]], int]]:
    """Pieces of the file as (label, enrol, test) columns, and how many lines each has."""
    style, num_lines, ended = "", 0, False
    with path.open(encoding="utf-8") as stream:
        while lines := list(islice(stream, LINES_AT_ONCE)):
            rows = [line.split() for line in lines]
            while rows and not rows[-1]:  # blank lines, which are fine at the end of the file
                rows.pop()
            if rows and ended:
                raise ValueError(
                    f"{path}:{num_lines + 1}: blank, but trials follow, got ''; remove the line"
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
    """What separates the columns of a table with a header; None for the other spellings."""
    with path.open(encoding="utf-8-sig") as stream:
        first = stream.readline()
    for separator in ",;\t":
        if _places(next(csv.reader([first], delimiter=separator), [])) is not None:
            return separator
    return None


def _places(header: Sequence[str]) -> list[int] | None:
    """Where the label, the enrolment and the test column are, if this is a header."""
    words = [word.strip().lower() for word in header]
    found = [[i for i, word in enumerate(words) if word in names] for names in HEADERS]
    return [places[0] for places in found] if all(len(places) == 1 for places in found) else None


def _read_table(path: Path, separator: str) -> Iterator[tuple[Sequence[tuple[str, ...]], int]]:
    """As `_read_columns`, from a table with a header; labels in the spelling of the others."""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.reader(stream, delimiter=separator)
        places = _places(next(rows)) or []
        faults = Faults()
        while piece := list(islice(rows, LINES_AT_ONCE)):
            kept: list[tuple[str, ...]] = []
            for number, row in enumerate(piece, rows.line_num - len(piece) + 1):
                words = tuple(row[i].strip() for i in places if i < len(row))
                if len(words) < 3 or words[0].lower() not in TABLE_TRUTH or not all(words):
                    faults.add(
                        "unreadable lines",
                        f"{path}:{number}: needs an enrolment id, a test id and one of the labels "
                        f"{', '.join(TABLE_TRUTH)}, got {separator.join(row)!r}; correct it",
                    )
                else:
                    kept.append((label_of(TABLE_TRUTH[words[0].lower()]), *words[1:]))
            if kept:
                yield list(zip(*kept)), len(kept)
        faults.raise_if_any(f"{path}: refused, no trial was read")


def _style_of(row: Sequence[str], path: Path) -> str:
    matches = [
        style for style, (i, labels) in FORMATS.items() if len(row) == 3 and row[i] in labels
    ]
    if len(matches) != 1:
        problem = "could be read in two ways" if matches else "is no trial"
        known = "', '".join(FORMATS)
        raise ValueError(
            f"{path}:1: {problem}, got {' '.join(row)!r}; write '{known}', or a table whose header "
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
                f"{path}:{number}: not of the form '{style}' that the file begins with, "
                f"got {' '.join(row)!r}; write every line alike",
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
            f"{path}:{again + 1 + lines_before}: the trial of line {first + 1 + lines_before} "
            f"again, got {enrol} {test}; keep one of them",
        )
    faults.raise_if_any(f"{path}: refused, a trial may occur once")
