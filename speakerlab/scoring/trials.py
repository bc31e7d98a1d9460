"""Trial lists: a text file in, index arrays out.

Letters: N trials.
The first line decides the format of the whole file: `enrol test target|nontarget` (Kaldi),
`1|0 enrol test` (VoxCeleb), `enrol test 1|0` (CN-Celeb), or a table with a header, separated by
commas, semicolons or tabs (such as NIST's keys).
"""

import csv
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text

Format = tuple[str, int, set[str]]
LINES_AT_ONCE = 2_048  # a block that fits the cache: larger ones take twice as long to split

LABELS = ("nontarget", "target")  # as written, by truth
TRUTH = {"target": True, "nontarget": False, "1": True, "0": False}
TRUTH |= {"true": True, "false": False, "tgt": True, "imp": False}  # in tables
# name -> (column of the label, spellings of the label)
FORMATS = {
    "enrol test target|nontarget": (2, {"target", "nontarget"}),
    "1|0 enrol test": (0, {"1", "0"}),
    "enrol test 1|0": (2, {"1", "0"}),
}
TABLE = (f"{'|'.join(TRUTH)} enrol test", 0, set(TRUTH))  # the columns that are taken from a table
# known names of the three columns of a table, in lower case
HEADERS = (
    ("label", "target", "targettype", "is_target", "key"),
    ("enrol", "enroll", "enrolment", "enrollment", "model", "modelid", "utt1", "wav1", "file1"),
    ("test", "segment", "segmentid", "utt2", "wav2", "file2"),
)


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
        """Return every utterance of either side, once: those that need an embedding."""
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

    def check_both_kinds(self, *, where: str) -> None:
        """Raise ValueError unless there are targets and nontargets."""
        num_target = int(self.is_target_N.sum())
        if not 0 < num_target < len(self):
            raise ValueError(
                f"{where}: {num_target} of {len(self)} trials are targets; an error rate needs "
                "both targets and nontargets, add the others"
            )

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
    enrol_N, test_N, is_target_N = array("i"), array("i"), bytearray()
    faults, first_blank = Faults(), 0
    with open_text(path, newline="") as stream:
        rows, (name, place, labels), num_before = _read_rows(stream, path)
        for number, row in enumerate(rows, num_before + 1):
            if not row:  # allowed at the end of the file
                first_blank = first_blank or number
                continue
            if first_blank:
                problem = "blank line between trials; remove the line"
                raise ValueError(f"{path}:{first_blank}: {problem}")
            label = row[place].lower() if len(row) == 3 else ""
            if label not in labels:
                faults.add(
                    "unreadable lines",
                    f"{path}:{number}: {' '.join(row)!r} is not of the format '{name}' of the "
                    "first line; use one format for all lines",
                )
                continue
            del row[place]
            enrol_N.append(enrol[row[0]])
            test_N.append(test[row[1]])
            is_target_N.append(TRUTH[label])
    faults.raise_if_any(f"{path}: refused, no trial was read")
    if not enrol_N:
        raise ValueError(f"{path}: has no trials; make it in stage 1")
    numbers = np.array(enrol_N, np.int32), np.array(test_N, np.int32)
    trials = Trials(list(enrol), list(test), *numbers, np.frombuffer(is_target_N, np.bool_))
    _refuse_duplicates(trials, path, lines_before=num_before)
    return trials


def _read_rows(stream: TextIO, path: Path) -> tuple[Iterable[list[str]], Format, int]:
    """Return the lines of a file as words, their format, and the number of lines before them."""
    first = stream.readline()
    for separator in ",;\t":
        header = next(csv.reader([first.lower()], delimiter=separator), [])
        found = [[i for i, h in enumerate(header) if h.strip() in names] for names in HEADERS]
        if all(len(places) == 1 for places in found):
            table = csv.reader(stream, delimiter=separator)
            cells = ([cell for (i,) in found for cell in row[i : i + 1]] for row in table)
            return (" ".join(row).split() for row in cells), TABLE, 1
    row = first.split()
    matches = [
        (name, place, labels)
        for name, (place, labels) in FORMATS.items()
        if len(row) == 3 and row[place].lower() in labels
    ]
    if first and len(matches) != 1:
        problem = "can be read in two ways" if matches else "is not a trial"
        known = "', '".join(FORMATS)
        raise ValueError(
            f"{path}:1: {' '.join(row)!r} {problem}; write '{known}', or a table whose header "
            "names enrol, test and label"
        )
    return map(str.split, chain([first], stream)), matches[0] if matches else TABLE, 0


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
