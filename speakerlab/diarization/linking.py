"""Speakers of many recordings -> people: which of them are the same person.

In: an embedding, seconds of speech and the recording of each speaker that a diarization has found.
Out: a group for each speaker. Speakers of one recording are never in one group.

Two groups are as similar as the mean cosine of their pairs, weighted by the seconds of both; the
most similar two are merged while they reach the threshold (`ahc.merge_weighted`). If a mean reaches
a threshold, at least one of its pairs does. So a group never leaves a connected component of the
graph of such pairs: each component is clustered by itself, with the same result, and memory is
bounded by the largest one.
Letters: N speakers of recordings, G groups, M members of a component, B rows of a block, R
recordings, D dimensions.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

from speakerlab.diarization.ahc import merge_weighted
from speakerlab.diarization.regions import Turn, merge_turns

VALUES_AT_ONCE = 8_000_000  # cosines of a block (32 MB)
MIN_SECONDS = 2.0  # of speech: less does not decide who is one person


def link_speakers(
    unit_ND: np.ndarray,
    seconds_N: np.ndarray,
    apart: csr_array,
    *,
    threshold: float,
    start_N: NDArray[np.int64] | None = None,
    num_groups: int | None = None,
) -> NDArray[np.int64]:
    """Return group_N, from 0, by average linkage with weights.

    unit_ND: embeddings of length 1.
    seconds_N: positive.
    apart: sparse (N, R); two speakers with a value in the same column are never in one group.
    threshold: mean cosine from which two groups are one.
    start_N: groups to begin with, whose speakers are one person already (None: none).
    num_groups: merge until so many remain, however different they are; more remain where `apart`
        demands it.
    """
    if start_N is None:
        start_N = np.arange(len(unit_ND))
    mean_GD, weight_G = weighted_means(unit_ND, seconds_N, start_N)
    # A group stays apart from the others of all recordings of its speakers: add their rows.
    num_speakers = len(start_N)
    speaker_rows = np.arange(num_speakers)
    membership_GN = coo_array(
        (np.ones(num_speakers), (start_N, speaker_rows)),
        shape=(len(mean_GD), num_speakers),
    )
    apart_GR = csr_array(membership_GN.tocsr() @ apart)

    if num_groups is None:
        component_G = find_components(mean_GD, threshold)
        least = 1
    else:
        # Groups may be merged at any similarity, so there is one component.
        component_G = np.zeros(len(mean_GD), dtype=np.int64)
        threshold = -np.inf
        least = num_groups

    group_G = np.zeros(len(mean_GD), dtype=np.int64)
    num_before = 0
    for members_M in _members(component_G):
        cosine_MM = mean_GD[members_M] @ mean_GD[members_M].T
        # The product has a value for each pair of members with a common recording.
        apart_MR = csr_array(apart_GR[members_M])
        common_MM = coo_array(apart_MR @ apart_MR.T)
        cosine_MM[common_MM.row, common_MM.col] = -np.inf
        number_M = merge_weighted(
            cosine_MM,
            weight_G[members_M],
            threshold=threshold,
            least=least,
        )
        group_G[members_M] = num_before + number_M
        num_before += int(number_M.max()) + 1
    return group_G[start_N]


def weighted_means(
    unit_ND: np.ndarray, seconds_N: np.ndarray, group_N: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return mean_GD, the means of each group weighted by seconds, and their seconds, (G).

    The inner product of two means is the weighted mean cosine of the pairs of the two groups.
    """
    seconds_G = np.bincount(group_N, weights=seconds_N)
    num_dimensions = unit_ND.shape[1]
    sum_GD = np.zeros((len(seconds_G), num_dimensions))
    weighted_ND = seconds_N[:, None] * unit_ND
    np.add.at(sum_GD, group_N, weighted_ND)
    mean_GD = sum_GD / seconds_G[:, None]
    return mean_GD.astype(np.float32), seconds_G.astype(np.float64)


def find_components(mean_GD: np.ndarray, threshold: float) -> NDArray[np.int64]:
    """Return the connected component of each row, where pairs that reach the threshold connect."""
    num_rows = len(mean_GD)
    component_G = np.arange(num_rows)
    for start, cosine_BG in cosine_blocks(mean_GD):
        first, second = np.nonzero(cosine_BG >= threshold)
        # Edges join the components of the blocks before, so only those of a block are in memory.
        first_component = component_G[start + first]
        second_component = component_G[start + second]
        is_edge = np.ones(len(first), dtype=bool)
        edges_GG = coo_array(
            (is_edge, (first_component, second_component)),
            shape=(num_rows, num_rows),
        )
        _, joined_G = connected_components(edges_GG, directed=False)
        component_G = joined_G[component_G]
    return component_G.astype(np.int64)


def cosine_blocks(mean_GD: np.ndarray) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield the first row of each block, and the block's cosines with its own and all later rows.

    So each pair of rows is in one block, at least once: with blocks of 2 of 5 rows, the products
    are (2, 5), (2, 3) and (1, 1).
    """
    num_rows = len(mean_GD)
    if num_rows == 0:
        return
    rows_at_once = max(VALUES_AT_ONCE // num_rows, 1)
    for start in range(0, num_rows, rows_at_once):
        block_BD = mean_GD[start : start + rows_at_once]
        later_GD = mean_GD[start:]
        yield start, block_BD @ later_GD.T


def _members(component_G: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the rows of each component, in order."""
    if not len(component_G):
        return []
    order_G = np.argsort(component_G, kind="stable")
    # A component begins where the sorted numbers change.
    bounds = np.flatnonzero(np.diff(component_G[order_G])) + 1
    return np.split(order_G, bounds)


def purity_and_coverage(
    reference: Mapping[str, Sequence[Turn]],
    hypothesis: Mapping[str, Sequence[Turn]],
) -> tuple[float, float]:
    """Return purity and coverage of speakers over all recordings, from 0 to 1.

    As in pyannote.metrics (Bredin, "pyannote.metrics: a toolkit for reproducible evaluation,
    diagnostic, and error analysis of speaker diarization systems", Interspeech 2017): each speaker
    of the hypothesis is paired with the speaker of the reference who speaks at the same time for
    longest. Purity is the share of the hypothesis's speech in which the paired speaker speaks, too;
    coverage is the same with the sides exchanged. So false alarms lower the purity, and missed
    speech lowers the coverage.

    reference, hypothesis: recording -> turns; a speaker has one name in all recordings.
    Raises ValueError if one of the two has no turns.
    """
    purity = _purity(reference, hypothesis)
    coverage = _purity(hypothesis, reference)
    return purity, coverage


def _purity(
    reference: Mapping[str, Sequence[Turn]], hypothesis: Mapping[str, Sequence[Turn]]
) -> float:
    # Speaker of the hypothesis -> speaker of the reference -> seconds in which both speak.
    common_seconds: dict[str, dict[str, float]] = {}
    total_seconds = 0.0
    for recording, turns in hypothesis.items():
        # Overlapping turns of one speaker count once.
        hyp_turns, _ = merge_turns(turns)
        ref_turns, _ = merge_turns(reference.get(recording, ()))
        for hyp in hyp_turns:
            total_seconds += hyp.end - hyp.start
            seconds_of = common_seconds.setdefault(hyp.speaker, {})
            for ref in ref_turns:
                seconds = min(ref.end, hyp.end) - max(ref.start, hyp.start)
                if seconds > 0:
                    so_far = seconds_of.get(ref.speaker, 0.0)
                    seconds_of[ref.speaker] = so_far + seconds
    if not total_seconds:
        raise ValueError("purity: one of the two sides has no turns; give turns")
    pure_seconds: list[float] = []
    for seconds_of in common_seconds.values():
        pure_seconds.append(max(seconds_of.values(), default=0.0))
    return sum(pure_seconds) / total_seconds
