"""Score pairs of embeddings, and normalise the scores against a cohort.

Letters: N trials, E enrolment rows, T test rows, R rows of either, C rows of the cohort, D and K
dimensions, M rows of a small set.
In: rows of embeddings and a list of trials. Out: a score per trial, higher for the same speaker.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.faults import Faults
from speakerlab.scoring.metrics import eer
from speakerlab.scoring.trials import Trials

VALUES_AT_ONCE = 8_000_000  # numbers in memory beside the tables (32 MB of float32)
Statistics = tuple[NDArray[np.float64], NDArray[np.float64]]  # mean_R, deviation_R
# A cell of a matrix product takes less than 1/16 of the time of a pair gathered by index.
CELLS_PER_TRIAL = 16


def dot_scores(
    enrol_ED: np.ndarray,
    test_TD: np.ndarray,
    trials: Trials,
) -> NDArray[np.float32]:
    """Return the inner product of the two rows of every trial, (N).

    Rows are in the order of `trials.enrol_ids` and `trials.test_ids`. If the trials fill a large
    part of the E x T matrix, the matrix is computed in blocks of rows; else pairs are gathered.
    """
    assert len(enrol_ED) == len(trials.enrol_ids)
    assert len(test_TD) == len(trials.test_ids)
    # The product of all rows is cheaper, unless most of its cells have no trial.
    num_cells = len(enrol_ED) * len(test_TD)
    if num_cells <= CELLS_PER_TRIAL * len(trials):
        return _scores_by_matrix(enrol_ED, test_TD, trials.enrol_N, trials.test_N)
    return _scores_by_pair(enrol_ED, test_TD, trials.enrol_N, trials.test_N)


def pairwise_eer(
    emb_MD: np.ndarray, speaker_M: np.ndarray
) -> tuple[float, NDArray[np.float32], NDArray[np.bool_]]:
    """Return (eer, scores, is_target) of all pairs i < j of a small set (a few thousand rows)."""
    num_rows = len(emb_MD)
    assert num_rows == len(speaker_M), (num_rows, len(speaker_M))
    ids = [f"row {row}" for row in range(num_rows)]
    unit_MD = unit_rows(emb_MD, ids)
    cosine_MM = unit_MD @ unit_MD.T
    # Each pair once, without pairs of a row with itself.
    first, second = np.triu_indices(num_rows, k=1)
    scores = cosine_MM[first, second]
    is_target = speaker_M[first] == speaker_M[second]
    return eer(scores, is_target), scores, is_target


def unit_rows(
    emb_ND: np.ndarray,
    ids: Sequence[str],
    *,
    where: str = "embeddings",
) -> NDArray[np.float32]:
    """Scale rows to length 1; ValueError names rows of length 0."""
    norm_N = row_lengths(emb_ND, ids, where=where)
    return np.divide(emb_ND, norm_N[:, None], dtype=np.float32)


def row_lengths(
    emb_ND: np.ndarray,
    ids: Sequence[str],
    *,
    where: str = "embeddings",
) -> NDArray[np.float32]:
    """Return each row's Euclidean length, (N); ValueError names rows of length 0, NaN or inf."""
    # Sum in float64: squares of float32 could overflow or vanish.
    square_N = np.einsum("nd,nd->n", emb_ND, emb_ND, dtype=np.float64)
    norm_N = np.sqrt(square_N).astype(np.float32)
    has_direction_N = np.isfinite(norm_N) & (norm_N > 0)
    wrong_rows = np.flatnonzero(~has_direction_N).tolist()
    faults = Faults()
    for row in wrong_rows:
        faults.add(
            "embeddings without direction",
            f"{where}: {ids[row]} has length {norm_N[row]:g}; check its audio and the"
            " model",
        )
    faults.raise_if_any(
        f"{where}: refused, embeddings of length 0 or NaN cannot be scored"
    )
    return norm_N


def cohort_statistics(
    side_RK: np.ndarray,
    cohort_CK: np.ndarray,
    *,
    top_n: int,
    ids: Sequence[str],
    where: str,
) -> Statistics:
    """Return mean and standard deviation of the `top_n` highest products with the cohort.

    Works on blocks of rows, so memory is bounded. Raises ValueError with the ids of rows whose
    scores are all equal.
    """
    assert 1 < top_n <= len(cohort_CK), (top_n, cohort_CK.shape)
    num_rows = len(side_RK)
    num_cohort = len(cohort_CK)
    mean_R = np.empty(num_rows)
    deviation_R = np.empty(num_rows)
    rows_at_once = max(1, VALUES_AT_ONCE // num_cohort)
    for start in range(0, num_rows, rows_at_once):
        block = slice(start, start + rows_at_once)
        score_RC = side_RK[block] @ cohort_CK.T
        if top_n < num_cohort:
            # Move the `top_n` highest to the end, in any order: cheaper than sorting.
            score_RC.partition(num_cohort - top_n, axis=1)
            score_RC = score_RC[:, -top_n:]
        mean_R[block] = score_RC.mean(axis=1, dtype=np.float64)
        deviation_R[block] = score_RC.std(axis=1, dtype=np.float64)

    # A smaller deviation is float32 rounding error. The comparison is also false for NaN.
    varies_R = deviation_R > 1e-6 * np.abs(mean_R)
    constant_rows = np.flatnonzero(~varies_R).tolist()
    faults = Faults()
    for row in constant_rows:
        faults.add(
            "rows without deviation",
            f"{where}: {ids[row]} has the score {mean_R[row]:g} with all of the cohort;"
            " use distinct development speakers",
        )
    faults.raise_if_any(f"{where}: refused, scores cannot be normalised")
    return mean_R, deviation_R


def normalised(
    scores_N: np.ndarray,
    trials: Trials,
    enrol: Statistics,
    test: Statistics,
) -> NDArray[np.float32]:
    """Normalise scores by either side and average both, (N).

    ((s - mean_e) / deviation_e + (s - mean_t) / deviation_t) / 2. This is S-Norm for statistics of
    the whole cohort (Kenny, "Bayesian speaker verification with heavy-tailed priors", Odyssey
    2010), and AS-Norm for statistics of each row's nearest cohort rows (Matejka et al., "Analysis
    of score normalization in multilingual speaker recognition", Interspeech 2017, AS-Norm1).
    """
    enrol_mean_E, enrol_deviation_E = enrol
    test_mean_T, test_deviation_T = test
    enrol_N = trials.enrol_N
    test_N = trials.test_N
    by_enrol_N = (scores_N - enrol_mean_E[enrol_N]) / enrol_deviation_E[enrol_N]
    by_test_N = (scores_N - test_mean_T[test_N]) / test_deviation_T[test_N]
    mean_N = (by_enrol_N + by_test_N) / 2
    return mean_N.astype(np.float32)


def _scores_by_matrix(
    enrol_ED: np.ndarray,
    test_TD: np.ndarray,
    enrol_N: np.ndarray,
    test_N: np.ndarray,
) -> NDArray[np.float32]:
    """Compute blocks of the E x T matrix, each for the trials of its enrolment rows."""
    num_enrol = len(enrol_ED)
    scores_N = np.empty(len(enrol_N), dtype=np.float32)
    order_N = np.argsort(enrol_N, kind="stable")
    rows_at_once = max(1, VALUES_AT_ONCE // len(test_TD))
    for start in range(0, num_enrol, rows_at_once):
        stop = start + rows_at_once
        # The trials of these enrolment rows are consecutive in the sorted order.
        low, high = np.searchsorted(enrol_N, [start, stop], sorter=order_N)
        chosen = order_N[low:high]
        block_ET = enrol_ED[start:stop] @ test_TD.T
        block_rows = enrol_N[chosen] - start
        block_columns = test_N[chosen]
        scores_N[chosen] = block_ET[block_rows, block_columns]
    return scores_N


def _scores_by_pair(
    enrol_ED: np.ndarray,
    test_TD: np.ndarray,
    enrol_N: np.ndarray,
    test_N: np.ndarray,
) -> NDArray[np.float32]:
    """Gather the rows of a chunk of trials at a time."""
    num_trials = len(enrol_N)
    scores_N = np.empty(num_trials, dtype=np.float32)
    # Indexing copies two rows of D values for each trial.
    values_per_trial = 2 * enrol_ED.shape[1]
    trials_at_once = max(1, VALUES_AT_ONCE // values_per_trial)
    for start in range(0, num_trials, trials_at_once):
        chunk = slice(start, start + trials_at_once)
        enrol_rows = enrol_ED[enrol_N[chunk]]
        test_rows = test_TD[test_N[chunk]]
        scores_N[chunk] = np.einsum("nd,nd->n", enrol_rows, test_rows)
    return scores_N
