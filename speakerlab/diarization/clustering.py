"""From windows to speakers. In: the embeddings of a recording's windows. Out: a speaker for each.

A method of `METHODS` divides the windows into groups. If there are many windows, it divides only a
sample of them, so that time and memory for hours of audio stay bounded. `cluster` then assigns the
windows of tiny groups, and windows outside the sample, to the nearest of the other groups, and
merges groups of one voice.

To add a method: a file here, and a line below. Its class takes keyword arguments only, and a call
`method(unit_ND, least, most)` returns group_N: the group of each window, -1 for no group. There
should be `least` to `most` groups of MIN_WINDOWS windows or more; smaller groups may be dropped.
Letters: N windows, M windows of a group, K speakers, D dimensions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.registry import Registry
from speakerlab.core.tuning import Tuning

MAX_SPEAKERS = 20  # default maximum
MIN_WINDOWS = 5  # smallest group that counts as a speaker, as in 3D-Speaker
MIN_SHARE = 0.1  # of the windows: a smaller group counts too, but not a single window
MERGE_COSINE = 0.8  # groups with closer centres are one speaker, as in 3D-Speaker
MAX_SAMPLE = 800  # windows for methods of quadratic or cubic cost


Method = Callable[[NDArray[np.float64], int, int], NDArray[np.int64]]
METHODS: Mapping[str, Callable[..., Method]] = Registry(
    __name__.rpartition(".")[0],
    {"ahc": "ahc:Ahc", "spectral": "spectral:Spectral", "vbx": "vbx:Vbx"},
)


def build_method(
    tuning: Tuning,
    name: str | None = None,
    *,
    read_plda: Callable[[], Any],
) -> Method:
    """Build a method by its name (None: the tuned method).

    read_plda: return the PLDA model for vbx, with the names of `Vbx`. Raises ValueError for other
    names, and the error of `read_plda`.
    """
    name = name or tuning.method
    if name not in METHODS:
        raise ValueError(
            "method: must be ahc, spectral, vbx or an object such as that of"
            f" `learn_vbx`, got '{name}'"
        )
    if name == "ahc":
        return METHODS[name](threshold=tuning.threshold)
    if name == "vbx":
        return METHODS[name](**vars(read_plda()), fb=tuning.fb)
    return METHODS[name]()


@dataclass(frozen=True, eq=False)
class Clusters:
    """Speakers of a recording, numbered in order of appearance."""

    speaker_N: NDArray[np.int64]
    # Mean of a speaker's embeddings, each scaled to unit length.
    centre_KD: NDArray[np.float64]
    cosine_NK: NDArray[np.float64]  # between each window and each centre
    # Number of windows in groups too small for a speaker, assigned to the nearest speaker.
    num_dropped: int = 0


def cluster(
    emb_ND: np.ndarray,
    method: Method,
    *,
    min_speakers: int = 1,
    max_speakers: int = MAX_SPEAKERS,
) -> Clusters:
    """Find the speakers of a recording from the embeddings of its windows, in order of time.

    min_speakers, max_speakers: equal if the number is known; the result may have fewer speakers if
    windows are too similar. Raises ValueError for embeddings of length 0 and for impossible
    numbers.
    """
    num_windows = len(emb_ND)
    if not 1 <= min_speakers <= max_speakers:
        raise ValueError(
            f"speakers: must be at least 1 and in order, got {min_speakers} to"
            f" {max_speakers}; correct the numbers"
        )
    if num_windows == 0:
        num_dimensions = emb_ND.shape[1]
        return Clusters(
            speaker_N=np.zeros(0, dtype=np.int64),
            centre_KD=np.zeros((0, num_dimensions)),
            cosine_NK=np.zeros((0, 1)),
        )
    if num_windows < min_speakers:
        raise ValueError(
            f"speakers: {min_speakers} requested, but there are only {num_windows}"
            " windows of speech; lower the number (in Python, a smaller"
            " window_seconds gives more windows)"
        )
    unit_ND = unit_rows(emb_ND)
    most = min(max_speakers, num_windows)
    group_N = method(unit_ND, min_speakers, most)
    large_group_N = drop_tiny(group_N, min_speakers)
    is_without_group_N = large_group_N < 0

    # Windows of tiny groups and outside the sample go to the nearest of the other groups.
    direction_KD = unit_rows(centres(unit_ND, large_group_N))
    cosine_NK = unit_ND @ direction_KD.T
    nearest_N = cosine_NK.argmax(axis=1)
    complete_N = np.where(is_without_group_N, nearest_N, large_group_N)
    merged_N = merge_groups(unit_ND, complete_N, min_speakers)

    speaker_N = number_by_appearance(merged_N)
    centre_KD = centres(unit_ND, speaker_N)
    # Windows outside the sample had no group from the start.
    is_dropped_N = (group_N >= 0) & is_without_group_N
    return Clusters(
        speaker_N=speaker_N,
        centre_KD=centre_KD,
        cosine_NK=unit_ND @ unit_rows(centre_KD).T,
        num_dropped=int(np.count_nonzero(is_dropped_N)),
    )


def unit_rows(emb_ND: np.ndarray) -> NDArray[np.float64]:
    """Scale rows to length 1; ValueError with the first row of length 0, NaN or infinity."""
    # Sum in float64: squares of float32 could overflow or vanish.
    square_N = np.square(emb_ND, dtype=np.float64).sum(axis=1)
    norm_N = np.sqrt(square_N)
    has_direction_N = np.isfinite(norm_N) & (norm_N > 0)
    wrong_rows = np.flatnonzero(~has_direction_N)
    if len(wrong_rows):
        first = wrong_rows[0]
        raise ValueError(
            f"embeddings: window {first} has length {norm_N[first]:g}; check the"
            " recording and the model"
        )
    return emb_ND / norm_N[:, None]


def sample_rows(num_windows: int, most: int = MAX_SAMPLE) -> NDArray[np.int64]:
    """Return the rows of at most `most` windows, evenly spaced in time; all if there are fewer."""
    num_sampled = min(num_windows, most)
    places = np.linspace(0, num_windows - 1, num_sampled)
    return places.round().astype(np.int64)


def centres(unit_ND: np.ndarray, group_N: np.ndarray) -> NDArray[np.float64]:
    """Return the mean of each group 0, 1, ..., (K, D); -1 is no group. No group may be empty."""
    num_groups = group_N.max() + 1
    means: list[np.ndarray] = []
    for group in range(num_groups):
        members_MD = unit_ND[group_N == group]
        means.append(members_MD.mean(axis=0))
    return np.stack(means)


def drop_tiny(group_N: NDArray[np.int64], least: int) -> NDArray[np.int64]:
    """Number the groups from 0, largest first; -1 for groups too small for a speaker.

    The `least` largest groups are kept at any size.
    """
    # In a short recording, a speaker has fewer windows, but a single window is noise: 2 windows of
    # up to 29, 3 of 30 to 39, 4 of 40 to 49, then 5.
    num_windows = len(group_N)
    share_of_windows = int(MIN_SHARE * num_windows)
    min_size = min(MIN_WINDOWS, share_of_windows)
    min_size = max(min_size, 2)
    has_group_N = group_N >= 0
    group_K, size_K = np.unique(group_N[has_group_N], return_counts=True)
    num_large = int(np.count_nonzero(size_K >= min_size))
    num_kept = max(num_large, least)

    # A stable sort, so that groups of equal size keep their order.
    order_K = np.argsort(-size_K, kind="stable")
    kept_groups = group_K[order_K[:num_kept]]
    number_N = np.full(num_windows, -1)
    for number, group in enumerate(kept_groups):
        number_N[group_N == group] = number
    return number_N


def number_by_appearance(group_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the groups numbered from 0 in order of appearance: 7 3 7 5 becomes 0 1 0 2."""
    # For example, the different groups 3, 5 and 7 appear first at the rows 1, 3 and 0.
    _, first_row_K, place_N = np.unique(
        group_N,
        return_index=True,
        return_inverse=True,
    )
    # So they are sorted by these rows as 7, 3, 5; the rank of 3 is 1, of 5 is 2, of 7 is 0.
    by_first_row_K = np.argsort(first_row_K)
    rank_K = np.argsort(by_first_row_K)  # inverts the permutation
    return rank_K[place_N]


def merge_groups(
    unit_ND: np.ndarray,
    group_N: NDArray[np.int64],
    least: int,
) -> NDArray[np.int64]:
    """Merge the nearest two groups while more than `least` remain and the two are one voice."""
    while True:
        direction_KD = unit_rows(centres(unit_ND, group_N))
        num_groups = len(direction_KD)
        # Each pair once, in the triangle above the diagonal, so that first < second.
        cosine_KK = np.triu(direction_KD @ direction_KD.T, k=1)
        first, second = np.unravel_index(cosine_KK.argmax(), cosine_KK.shape)
        is_one_voice = cosine_KK[first, second] >= MERGE_COSINE
        if num_groups <= least or not is_one_voice:
            return group_N
        group_N = np.where(group_N == second, first, group_N)
        # Numbers must be consecutive: later groups move down by one.
        group_N = np.where(group_N > second, group_N - 1, group_N)
