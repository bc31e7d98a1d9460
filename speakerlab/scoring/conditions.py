"""Results by condition. In: scores of trials, what is known of each side. Out: a row per condition.

Letters: N trials. A condition is a column of the data, such as the device: id -> value. A trial's
value is that of both its sides where they agree, and the pair of them where they do not.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.scoring.bootstrap import bootstrap, interval
from speakerlab.scoring.metrics import eer_of_points, min_dcf_of_points, operating_points
from speakerlab.scoring.trials import Trials

MAX_PAIRS = 12  # of values; where there are more, trials are told apart by same, different and test
NUM_REPLICATES = 200
P_TARGET = 0.01
SECONDS = (2.0, 4.0, 8.0, 16.0)  # where one bin of durations ends and the next begins
OF_TEST = "test side: "
DURATION = "shorter side"


class ConditionRow(TypedDict):
    """The trials of one value of a condition; rates are null where one kind of trial is missing."""

    condition: str
    value: str
    num_target: int
    num_nontarget: int
    eer: float | None
    eer_ci95: list[float] | None
    min_dcf: dict[str, float] | None


def condition_rows(
    scores: ArrayLike,
    trials: Trials,
    speakers: tuple[np.ndarray, np.ndarray],
    columns: Mapping[str, Mapping[str, str]],
    seconds: Mapping[str, float],
) -> list[ConditionRow]:
    """A row for each value of each condition of which at least two values have trials.

    columns: condition -> (id -> value). seconds: id -> duration, by which trials are told apart by
    their shorter side. A trial with a side that nothing is known of is in no row of the condition.
    speakers: (enrol_speaker_N, test_speaker_N), by which intervals are made (200 replicates).
    """
    scores_N, rows = np.asarray(scores), list[ConditionRow]()
    found = {condition: _values(trials, table) for condition, table in columns.items()}
    for condition, groups in (found | {DURATION: _durations(trials, seconds)}).items():
        filled = [(value, chosen) for value, chosen in groups if len(chosen)]
        if len(filled) > 1:
            rows += [
                _row(condition, value, chosen, scores_N, trials.is_target_N, speakers)
                for value, chosen in filled
            ]
    return rows


def _durations(
    trials: Trials, seconds: Mapping[str, float]
) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """(bin, the trials whose shorter side is so long), shortest first."""
    enrol_N, test_N = (
        np.array([seconds.get(i, np.nan) for i in ids])[index_N]
        for ids, index_N in ((trials.enrol_ids, trials.enrol_N), (trials.test_ids, trials.test_N))
    )
    shorter_N = np.minimum(enrol_N, test_N)  # not a number where one of them is not known
    for low, high in zip((0.0, *SECONDS), (*SECONDS, np.inf)):
        name = f"{low:g} s and more" if high == np.inf else f"{low:g} to {high:g} s"
        yield name, np.flatnonzero((shorter_N >= low) & (shorter_N < high))


def _values(trials: Trials, table: Mapping[str, str]) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """(value, the trials that have it), in the order of the values."""
    names = sorted(set(table.values()))
    code_of = {name: code for code, name in enumerate(names)}
    enrol_N, test_N = (
        np.array([code_of.get(table.get(i, ""), -1) for i in ids], np.int64)[index_N]
        for ids, index_N in ((trials.enrol_ids, trials.enrol_N), (trials.test_ids, trials.test_N))
    )
    known = np.flatnonzero((enrol_N >= 0) & (test_N >= 0))
    low, high = np.minimum(enrol_N, test_N)[known], np.maximum(enrol_N, test_N)[known]
    pairs = low * len(names) + high
    found = np.unique(pairs)
    if len(found) <= MAX_PAIRS:
        for pair in found.tolist():
            a, b = names[pair // len(names)], names[pair % len(names)]
            yield a if a == b else f"{a} / {b}", known[pairs == pair]
        return
    yield "same", known[low == high]
    yield "different", known[low != high]
    for code, name in enumerate(names):
        yield f"{OF_TEST}{name}", known[test_N[known] == code]


def _row(
    condition: str,
    value: str,
    chosen: np.ndarray,
    scores_N: np.ndarray,
    is_target_N: np.ndarray,
    speakers: Sequence[np.ndarray],
) -> ConditionRow:
    truth = is_target_N[chosen]
    num_target = int(np.count_nonzero(truth))
    row: ConditionRow = {
        "condition": condition,
        "value": value,
        "num_target": num_target,
        "num_nontarget": len(chosen) - num_target,
        "eer": None,
        "eer_ci95": None,
        "min_dcf": None,
    }
    if not 0 < num_target < len(chosen):
        return row
    scores = scores_N[chosen]
    p_miss_K, p_fa_K, _ = operating_points(scores, truth)
    sides = [side_N[chosen] for side_N in speakers]
    drawn = bootstrap(scores, truth, *sides, p_targets=(), num_replicates=NUM_REPLICATES)
    row["eer"] = eer_of_points(p_miss_K, p_fa_K)
    row["eer_ci95"] = interval(drawn["eer"])
    row["min_dcf"] = {f"{P_TARGET:g}": min_dcf_of_points(p_miss_K, p_fa_K, p_target=P_TARGET)}
    return row
