"""Results by condition. In: scores of trials, values of each side. Out: a row per value.

Letters: N trials. A condition is a column of the data, such as the device: id -> value. The value
of a trial is the common value of both sides or, if they differ, the pair of their values.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.scoring.bootstrap import bootstrap
from speakerlab.scoring.metrics import eer, min_dcf
from speakerlab.scoring.trials import Trials

Group = tuple[str, NDArray[np.intp]]  # a value, and the rows of its trials

# Pairs of values; if there are more, the rows are: same, different, each value of the test side.
MAX_PAIRS = 12
NUM_REPLICATES = 200
P_TARGET = 0.01
SHORTER_SIDE = "shorter side"  # condition: its duration
SECONDS = (2.0, 4.0, 8.0, 16.0)  # edges of the duration bins


def condition_rows(
    scores: ArrayLike,
    trials: Trials,
    speakers: tuple[np.ndarray, np.ndarray],
    columns: Mapping[str, Mapping[str, str]],
    seconds: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Measure each value of each condition that has trials for at least two values.

    speakers: (enrol_speaker_N, test_speaker_N), for the intervals (200 replicates).
    columns: condition -> (id -> value).
    seconds: id -> duration; trials are binned by their shorter side.
    A trial with an unknown value on a side is in no row of that condition. Rates are None if one
    kind of trial is missing; the interval is also None with too few speakers.
    """
    scores_N = np.asarray(scores)
    enrol_speaker_N, test_speaker_N = speakers
    groups_of: dict[str, Iterator[Group]] = {}
    for condition, table in columns.items():
        groups_of[condition] = _by_value(trials, table)
    groups_of[SHORTER_SIDE] = _by_duration(trials, seconds)

    rows: list[dict[str, Any]] = []
    for condition, groups in groups_of.items():
        with_trials = [(value, chosen) for value, chosen in groups if len(chosen)]
        # A condition with a single value would repeat the result of the whole list.
        if len(with_trials) < 2:
            continue
        for value, chosen in with_trials:
            measures = measure_condition(
                scores_N[chosen],
                trials.is_target_N[chosen],
                (enrol_speaker_N[chosen], test_speaker_N[chosen]),
            )
            rows.append({"condition": condition, "value": value, **measures})
    return rows


def measure_condition(
    scores_N: np.ndarray,
    is_target_N: np.ndarray,
    speakers: tuple[np.ndarray, np.ndarray],
) -> dict[str, Any]:
    """Measure the trials of one value of a condition; arguments as in `condition_rows`."""
    num_target = int(np.count_nonzero(is_target_N))
    num_nontarget = len(is_target_N) - num_target
    row: dict[str, Any] = {
        "num_target": num_target,
        "num_nontarget": num_nontarget,
        "eer": None,
        "eer_ci95": None,
        "num_speakers": None,
        "min_dcf": None,
    }
    if num_target and num_nontarget:
        enrol_speaker_N, test_speaker_N = speakers
        replicates = bootstrap(
            scores_N,
            is_target_N,
            enrol_speaker_N,
            test_speaker_N,
            p_targets=(),
            num_replicates=NUM_REPLICATES,
        )
        row["eer"] = eer(scores_N, is_target_N)
        row["eer_ci95"] = replicates.interval("eer")
        row["num_speakers"] = replicates.num_speakers
        cost = min_dcf(scores_N, is_target_N, p_target=P_TARGET)
        row["min_dcf"] = {f"{P_TARGET:g}": cost}
    return row


def _by_duration(trials: Trials, seconds: Mapping[str, float]) -> Iterator[Group]:
    """Yield (bin, trials whose shorter side is in the bin), shortest first."""
    enrol_N, test_N = trials.look_up(lambda name: seconds.get(name, np.nan))
    # NaN if a side is unknown; it is in no bin, because comparisons with NaN are false.
    shorter_N = np.minimum(enrol_N, test_N)
    for low, high in pairwise([0.0, *SECONDS, np.inf]):
        name = f"{low:g} to {high:g} s"
        if high == np.inf:
            name = f"{low:g} s and more"
        is_inside_N = (shorter_N >= low) & (shorter_N < high)
        yield name, np.flatnonzero(is_inside_N)


def _by_value(trials: Trials, table: Mapping[str, str]) -> Iterator[Group]:
    """Yield (value, trials with this value), in the order of the values."""
    values = sorted(set(table.values()))
    code_of = {value: code for code, value in enumerate(values)}

    def find_code(name: str) -> int:
        """Return the index of an utterance's value in `values`, -1 if it is unknown."""
        return code_of.get(table.get(name, ""), -1)

    enrol_N, test_N = trials.look_up(find_code)
    # Trials with known values on both sides.
    labelled_rows = np.flatnonzero((enrol_N >= 0) & (test_N >= 0))
    enrol = enrol_N[labelled_rows]
    test = test_N[labelled_rows]
    # Sorted, because a pair of values does not depend on the order of the sides.
    low = np.minimum(enrol, test)
    high = np.maximum(enrol, test)
    pairs = low * len(values) + high
    distinct_pairs = np.unique(pairs)
    if len(distinct_pairs) <= MAX_PAIRS:
        for pair in distinct_pairs.tolist():
            # The inverse of `pairs`.
            low_code, high_code = divmod(pair, len(values))
            value = values[low_code]
            if low_code != high_code:
                value = f"{values[low_code]} / {values[high_code]}"
            yield value, labelled_rows[pairs == pair]
        return
    yield "same", labelled_rows[low == high]
    yield "different", labelled_rows[low != high]
    for code, value in enumerate(values):
        yield f"test side: {value}", labelled_rows[test == code]
