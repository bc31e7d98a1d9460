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
CELLS_PER_TRIAL = 16  # a cell of a matrix product costs less than 1/16 of a pair gathered by index


def dot_scores(enrol_ED: np.ndarray, test_TD: np.ndarray, trials: Trials) -> NDArray[np.float32]:
    """Return the inner product of the two rows of every trial, (N).

    Rows are in the order of `trials.enrol_ids` and `trials.test_ids`. If the trials fill a
    large part of the E x T matrix, it is computed by blocks of rows, else pairs are gathered.
    """
    assert len(enrol_ED) == len(trials.enrol_ids) and len(test_TD) == len(trials.test_ids)
    num_cells = len(enrol_ED) * len(test_TD)
    by_matrix = num_cells <= CELLS_PER_TRIAL * len(trials)
    score = _scores_by_matrix if by_matrix else _scores_by_pair
    return score(enrol_ED, test_TD, trials.enrol_N, trials.test_N)


def pairwise_eer(
    emb_MD: np.ndarray, speaker_M: np.ndarray
) -> tuple[float, NDArray[np.float32], NDArray[np.bool_]]:
    """Return (eer, scores, is_target) of all pairs i < j of a small set (a few thousand rows)."""
    assert len(emb_MD) == len(speaker_M), (emb_MD.shape, speaker_M.shape)
    unit_MD = unit_rows(emb_MD, [f"row {row}" for row in range(len(emb_MD))])
    first, second = np.triu_indices(len(unit_MD), k=1)
    scores = (unit_MD @ unit_MD.T)[first, second]
    is_target = speaker_M[first] == speaker_M[second]
    return eer(scores, is_target), scores, is_target


def unit_rows(
    emb_ND: np.ndarray, ids: Sequence[str], *, where: str = "embeddings"
) -> NDArray[np.float32]:
    """Scale rows to length 1; ValueError naming rows of length 0."""
    return np.divide(emb_ND, row_lengths(emb_ND, ids, where=where)[:, None], dtype=np.float32)


def row_lengths(
    emb_ND: np.ndarray, ids: Sequence[str], *, where: str = "embeddings"
) -> NDArray[np.float32]:
    """Return each row's Euclidean length, (N); ValueError names those that are 0 or not finite."""
    norm_N = np.sqrt(np.einsum("nd,nd->n", emb_ND, emb_ND, dtype=np.float64)).astype(np.float32)
    faults = Faults()
    for row in np.flatnonzero(~(np.isfinite(norm_N) & (norm_N > 0))).tolist():
        faults.add(
            "embeddings without direction",
            f"{where}: {ids[row]} has length {norm_N[row]:g}; check its audio and the model",
        )
    faults.raise_if_any(f"{where}: refused, embeddings of length 0 or NaN cannot be scored")
    return norm_N


def cohort_statistics(
    side_RK: np.ndarray, cohort_CK: np.ndarray, *, top_n: int, ids: Sequence[str], where: str
) -> Statistics:
    """Return mean and standard deviation of the `top_n` highest products with the cohort.

    Works on blocks of rows, so memory is bounded. Raises ValueError, naming ids, for rows whose
    scores are all equal.
    """
    assert 1 < top_n <= len(cohort_CK), (top_n, cohort_CK.shape)
    mean_R, deviation_R = np.empty(len(side_RK)), np.empty(len(side_RK))
    rows_at_once = max(1, VALUES_AT_ONCE // len(cohort_CK))
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
            f"{where}: {ids[row]} has the score {mean_R[row]:g} with all of the cohort; use "
            "distinct development speakers",
        )
    faults.raise_if_any(f"{where}: refused, scores cannot be normalised")
    return mean_R, deviation_R


def normalised(
    scores_N: np.ndarray, trials: Trials, enrol: Statistics, test: Statistics
) -> NDArray[np.float32]:
    """Normalise scores by either side and average both, (N).

    ((s - mean_e) / deviation_e + (s - mean_t) / deviation_t) / 2: S-Norm where the statistics are
    of the whole cohort (Kenny, "Bayesian speaker verification with heavy-tailed priors", Odyssey
    2010), AS-Norm where they are of each row's nearest (Matejka et al., "Analysis of score
    normalization in multilingual speaker recognition", Interspeech 2017, AS-Norm1).
    """
    by_enrol_N = (scores_N - enrol[0][trials.enrol_N]) / enrol[1][trials.enrol_N]
    by_test_N = (scores_N - test[0][trials.test_N]) / test[1][trials.test_N]
    return ((by_enrol_N + by_test_N) / 2).astype(np.float32)


def _scores_by_matrix(
    enrol_ED: np.ndarray, test_TD: np.ndarray, enrol_N: np.ndarray, test_N: np.ndarray
) -> NDArray[np.float32]:
    """Compute blocks of the E x T matrix, each for the trials of its enrolment rows."""
    scores_N = np.empty(len(enrol_N), dtype=np.float32)
    order_N = np.argsort(enrol_N, kind="stable")
    rows_at_once = max(1, VALUES_AT_ONCE // len(test_TD))
    for start in range(0, len(enrol_ED), rows_at_once):
        stop = start + rows_at_once
        low, high = np.searchsorted(enrol_N, [start, stop], sorter=order_N)
        chosen = order_N[low:high]
        block_ET = enrol_ED[start:stop] @ test_TD.T
        scores_N[chosen] = block_ET[enrol_N[chosen] - start, test_N[chosen]]
    return scores_N


def _scores_by_pair(
    enrol_ED: np.ndarray, test_TD: np.ndarray, enrol_N: np.ndarray, test_N: np.ndarray
) -> NDArray[np.float32]:
    """Gather the rows of a chunk of trials at a time."""
    scores_N = np.empty(len(enrol_N), dtype=np.float32)
    trials_at_once = max(1, VALUES_AT_ONCE // (2 * enrol_ED.shape[1]))
    for start in range(0, len(enrol_N), trials_at_once):
        chunk = slice(start, start + trials_at_once)
        enrol_rows, test_rows = enrol_ED[enrol_N[chunk]], test_TD[test_N[chunk]]
        scores_N[chunk] = np.einsum("nd,nd->n", enrol_rows, test_rows)
    return scores_N
