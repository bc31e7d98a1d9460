"""Trial lists. In: a text file in a format of `core.trial_lines`. Out: index arrays.

Letters: N trials.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.faults import Faults
from speakerlab.core.reading import show_invisible
from speakerlab.core.trial_lines import add_repeats, read_trial_lines

# A block that fits in the cache: larger blocks take twice as long to split.
LINES_AT_ONCE = 2_048


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
    if not path.exists():  # a file, or a pipe
        raise FileNotFoundError(f"{path}: no such trial list; correct the path")
    # Id -> number, in order of appearance.
    enrol_number = defaultdict[str, int](count().__next__)
    test_number = defaultdict[str, int](count().__next__)
    # Arrays, because lists would take several times the memory.
    enrol_N = array("i")
    test_N = array("i")
    is_target_N = bytearray()
    faults = Faults()
    last_number = 0
    for number, enrol_id, test_id, is_target in read_trial_lines(path, faults):
        enrol_N.append(enrol_number[enrol_id])
        test_N.append(test_number[test_id])
        is_target_N.append(is_target)
        last_number = number
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
    # The trials are consecutive lines, after the header of a table.
    first_number = last_number - len(trials) + 1
    add_repeats(
        faults,
        path,
        ids=(trials.enrol_ids, trials.test_ids),
        enrol_N=trials.enrol_N,
        test_N=trials.test_N,
        line_N=range(first_number, last_number + 1),
    )
    faults.raise_if_any(f"{path}: refused, a trial may occur once")
    return trials
