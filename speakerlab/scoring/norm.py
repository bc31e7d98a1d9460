"""Normalisation of scores by a cohort: S-Norm and AS-Norm.

In: scores of trials, and what their two sides score against a cohort of speakers that occur in no
trial. Out: scores that mean the same for every pair.
Letters: N trials, E enrolment rows, T test rows, R rows of either side, C rows of the cohort, K
numbers that describe a row to the scorer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.faults import Faults
from speakerlab.scoring import backend
from speakerlab.scoring.trials import Trials


@dataclass(frozen=True, eq=False)
class CohortStatistics:
    """What each row scores against the cohort."""

    mean_R: NDArray[np.float64]
    deviation_R: NDArray[np.float64]


def cohort_statistics(
    side_RK: np.ndarray, cohort_CK: np.ndarray, *, top_n: int, ids: Sequence[str], where: str
) -> CohortStatistics:
    """Mean and standard deviation of the `top_n` highest inner products with the cohort.

    Works on blocks of rows, so memory is bounded. Raises ValueError, by id, for a row whose scores
    are all equal.
    """
    assert 1 < top_n <= len(cohort_CK), (top_n, cohort_CK.shape)
    mean_R, deviation_R = np.empty(len(side_RK)), np.empty(len(side_RK))
    rows_at_once = max(1, backend.VALUES_AT_ONCE // len(cohort_CK))
    for start in range(0, len(side_RK), rows_at_once):
        block = slice(start, start + rows_at_once)
        score_RC = side_RK[block] @ cohort_CK.T
        if top_n < len(cohort_CK):
            score_RC.partition(len(cohort_CK) - top_n, axis=1)
            score_RC = score_RC[:, -top_n:]
        mean_R[block] = score_RC.mean(axis=1, dtype=np.float64)
        deviation_R[block] = score_RC.std(axis=1, dtype=np.float64)
    faults = Faults()
    for row in np.flatnonzero(~(deviation_R > 1e-6 * np.abs(mean_R))).tolist():
        faults.add(
            "rows without deviation",
            f"{where}: {ids[row]} scores the same against the whole cohort, got {mean_R[row]:g}; "
            "use development speakers that differ",
        )
    faults.raise_if_any(f"{where}: refused, scores cannot be normalised")
    return CohortStatistics(mean_R, deviation_R)


def normalised(
    scores_N: np.ndarray, trials: Trials, enrol: CohortStatistics, test: CohortStatistics
) -> NDArray[np.float32]:
    """The mean of the score normalised by either side, (N).

    ((s - mean_e) / deviation_e + (s - mean_t) / deviation_t) / 2: S-Norm where the statistics are
    of the whole cohort (Kenny, "Bayesian speaker verification with heavy-tailed priors", Odyssey
    2010), AS-Norm where they are of each row's nearest (Matejka et al., "Analysis of score
    normalization in multilingual speaker recognition", Interspeech 2017, AS-Norm1).
    """
    by_enrol_N = (scores_N - enrol.mean_R[trials.enrol_N]) / enrol.deviation_R[trials.enrol_N]
    by_test_N = (scores_N - test.mean_R[trials.test_N]) / test.deviation_R[trials.test_N]
    return ((by_enrol_N + by_test_N) / 2).astype(np.float32)
