"""Results by condition: scores of trials and properties of each side in, a row per value out.

Letters: N trials. A condition is a column of the data, such as the device: id -> value. A trial's
value is that of both its sides if they agree, else the pair of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.scoring.bootstrap import bootstrap
from speakerlab.scoring.metrics import eer, min_dcf
from speakerlab.scoring.trials import Trials

MAX_PAIRS = 12  # of values; if there are more, rows are: same, different, each value of the test
NUM_REPLICATES = 200
P_TARGET = 0.01
SECONDS = (2.0, 4.0, 8.0, 16.0)  # edges of the duration bins


def condition_rows(
    scores: ArrayLike,
    trials: Trials,
    speakers: tuple[np.ndarray, np.ndarray],
    columns: Mapping[str, Mapping[str, str]],
    seconds: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Measure each value of each condition of which at least two values have trials.

    columns: condition -> (id -> value). seconds: id -> duration; trials are binned by their shorter
    side. A trial with a side of unknown value is in no row of that condition. speakers:
    (enrol_speaker_N, test_speaker_N) for the intervals (200 replicates). Rates are None if one kind
    of trial is missing, the interval also with too few speakers.
    """
    scores_N, rows = np.asarray(scores), list[dict[str, Any]]()
    groups = {condition: _by_value(trials, table) for condition, table in columns.items()}
    groups["shorter side"] = _by_duration(trials, seconds)
    for condition, parts in groups.items():
        filled = [(value, chosen) for value, chosen in parts if len(chosen)]
        if len(filled) < 2:
            continue
        for value, chosen in filled:
            sides = speakers[0][chosen], speakers[1][chosen]
            row = measure_condition(scores_N[chosen], trials.is_target_N[chosen], sides)
            rows.append({"condition": condition, "value": value, **row})
    return rows


def measure_condition(
    scores_N: np.ndarray, is_target_N: np.ndarray, speakers: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    """Measure the trials of one value of a condition; arguments as in `condition_rows`."""
    num_target = int(np.count_nonzero(is_target_N))
    row: dict[str, Any] = {
        "num_target": num_target,
        "num_nontarget": len(is_target_N) - num_target,
        **dict.fromkeys(("eer", "eer_ci95", "num_speakers", "min_dcf")),
    }
    if 0 < num_target < len(is_target_N):
        drawn = bootstrap(
            scores_N, is_target_N, *speakers, p_targets=(), num_replicates=NUM_REPLICATES
        )
        row["eer"] = eer(scores_N, is_target_N)
        row["eer_ci95"] = drawn.interval("eer")
        row["num_speakers"] = drawn.num_speakers
        row["min_dcf"] = {f"{P_TARGET:g}": min_dcf(scores_N, is_target_N, p_target=P_TARGET)}
    return row


def _by_duration(
    trials: Trials, seconds: Mapping[str, float]
) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """Return (bin, trials whose shorter side falls into it), shortest first."""
    sides = trials.look_up(lambda name: seconds.get(name, np.nan))
    shorter_N = np.minimum(*sides)  # NaN where a side is unknown
    for low, high in zip((0.0, *SECONDS), (*SECONDS, np.inf)):
        name = f"{low:g} s and more" if high == np.inf else f"{low:g} to {high:g} s"
        yield name, np.flatnonzero((shorter_N >= low) & (shorter_N < high))


def _by_value(trials: Trials, table: Mapping[str, str]) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """Return (value, trials that have it), in the order of the values."""
    names = sorted(set(table.values()))
    code_of = {name: code for code, name in enumerate(names)}
    enrol_N, test_N = trials.look_up(lambda name: code_of.get(table.get(name, ""), -1))
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
        yield f"test side: {name}", known[test_N[known] == code]
