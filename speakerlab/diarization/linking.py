"""Speakers of many recordings -> people: which of them are the same person.

In: an embedding, seconds of speech and the recording of each speaker that a diarization has found.
Out: a group for each speaker. Speakers of one recording are never in one group.

Two groups are as similar as the mean cosine of their pairs, weighted by the seconds of both; the
most similar two are merged while they reach the threshold (`ahc.merge_weighted`). If a mean reaches
a threshold, at least one of its pairs does. So a group never leaves a connected component of the
graph of such pairs: each component is clustered by itself, with the same result, and memory is
bounded by the largest one.
Letters: N speakers of recordings, G groups, M members of a component, R recordings, D dimensions.
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

    unit_ND: embeddings of length 1. seconds_N: positive. apart: sparse (N, R); two speakers with a
    value in the same column are never in one group. threshold: mean cosine from which two groups
    are one. start_N: groups to begin with, whose speakers are one person already (None: none).
    num_groups: merge until so many remain, however different they are; more remain where `apart`
    demands it.
    """
    if start_N is None:
        start_N = np.arange(len(unit_ND))
    mean_GD, weight_G = weighted_means(unit_ND, seconds_N, start_N)
    membership = coo_array(
        (np.ones(len(start_N)), (start_N, np.arange(len(start_N)))),
        shape=(len(mean_GD), len(start_N)),
    ).tocsr()
    apart_groups = csr_array(membership @ apart)

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
        apart_members = csr_array(apart_groups[members_M])
        shared = coo_array(apart_members @ apart_members.T)
        cosine_MM[shared.row, shared.col] = -np.inf
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
    weight_G = np.bincount(group_N, weights=seconds_N)
    num_dimensions = unit_ND.shape[1]
    sum_GD = np.zeros((len(weight_G), num_dimensions))
    weighted_ND = seconds_N[:, None] * unit_ND
    np.add.at(sum_GD, group_N, weighted_ND)
    mean_GD = sum_GD / weight_G[:, None]
    return mean_GD.astype(np.float32), weight_G.astype(np.float64)


def find_components(mean_GD: np.ndarray, threshold: float) -> NDArray[np.int64]:
    """Return the connected component of each row, where pairs that reach the threshold connect."""
    num_rows = len(mean_GD)
    component_G = np.arange(num_rows)
    for start, cosine_BG in cosine_blocks(mean_GD):
        first, second = np.nonzero(cosine_BG >= threshold)
        # Edges join the components of the blocks before, so only those of a block are in memory.
        edges = coo_array(
            (
                np.ones(len(first), dtype=bool),
                (component_G[start + first], component_G[start + second]),
            ),
            shape=(num_rows, num_rows),
        )
        _, joined = connected_components(edges, directed=False)
        component_G = joined[component_G]
    return component_G.astype(np.int64)


def cosine_blocks(mean_GD: np.ndarray) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield the first row of a block, and its products with this and all later rows."""
    num_rows = len(mean_GD)
    rows_at_once = max(1, VALUES_AT_ONCE // max(num_rows, 1))
    for start in range(0, num_rows, rows_at_once):
        block_BD = mean_GD[start : start + rows_at_once]
        yield start, block_BD @ mean_GD[start:].T


def _members(component_G: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the rows of each component, in order."""
    order_G = np.argsort(component_G, kind="stable")
    bounds = np.flatnonzero(np.diff(component_G[order_G])) + 1
    return np.split(order_G, bounds) if len(order_G) else []


def purity_and_coverage(
    reference: Mapping[str, Sequence[Turn]],
    hypothesis: Mapping[str, Sequence[Turn]],
) -> tuple[float, float]:
    """Return purity and coverage of speakers over all recordings, from 0 to 1.

    As in pyannote.metrics (Bredin, "pyannote.metrics: a toolkit for reproducible evaluation,
    diagnostic, and error analysis of speaker diarization systems", Interspeech 2017): purity is the
    share of the speech of the hypothesis in which each of its speakers meets one speaker of the
    reference, the one that it meets for longest; coverage is the same with the sides exchanged. So
    false alarms lower the purity, and missed speech lowers the coverage. reference, hypothesis:
    recording -> turns; a speaker has one name in all recordings. Raises ValueError if one of the
    two has no turns.
    """
    return _purity(reference, hypothesis), _purity(hypothesis, reference)


def _purity(
    reference: Mapping[str, Sequence[Turn]], hypothesis: Mapping[str, Sequence[Turn]]
) -> float:
    common: dict[str, dict[str, float]] = {}  # hypothesis -> reference -> seconds
    total = 0.0
    for recording, turns in hypothesis.items():
        # Overlapping turns of one speaker count once.
        found_turns, _ = merge_turns(turns)
        true_turns, _ = merge_turns(reference.get(recording, ()))
        for found in found_turns:
            total += found.end - found.start
            met = common.setdefault(found.speaker, {})
            for true in true_turns:
                seconds = min(true.end, found.end) - max(true.start, found.start)
                if seconds > 0:
                    met[true.speaker] = met.get(true.speaker, 0.0) + seconds
    if not total:
        raise ValueError("purity: one of the two sides has no turns; give turns")
    return sum(max(met.values(), default=0.0) for met in common.values()) / total
