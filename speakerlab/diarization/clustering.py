"""From windows to speakers. In: the embeddings of a recording's windows. Out: a speaker for each.

A method of `METHODS` divides the windows into groups, or a sample of them if they are many, so that
time and memory for hours of audio stay bounded. `cluster` then gives the windows of tiny groups
and those outside the sample to the nearest of the other groups, and merges groups of one voice.

To add a method: a file here, and a line below. Its class takes keyword arguments only, and a call
`method(unit_ND, least, most)` returns group_N: the group of each window, -1 for none. There should
be `least` to `most` groups of MIN_WINDOWS windows or more; smaller ones may be dropped.
Letters: N windows, K speakers, D dimensions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.reading import ONLY_FINITE
from speakerlab.core.registry import Registry

MAX_SPEAKERS = 20  # unless more are asked for
MIN_WINDOWS = 5  # of a group that counts as a speaker, as in 3D-Speaker
MIN_SHARE = 0.1  # of the windows, from which fewer count too; but one window never does
THRESHOLD = 0.4  # of ahc, for CAM++ (3D-Speaker); what fits depends on the model
MERGE_COSINE = 0.8  # groups whose centres are closer are one speaker, as in 3D-Speaker
MAX_SAMPLE = 800  # windows that a method of quadratic or cubic cost takes


Method = Callable[[NDArray[np.float64], int, int], NDArray[np.int64]]
METHODS: Mapping[str, Callable[..., Method]] = Registry(
    __name__.rpartition(".")[0],
    {"ahc": "ahc:Ahc", "spectral": "spectral:Spectral", "vbx": "vbx:Vbx"},
)


@dataclass(frozen=True)
class Tuning:
    """The clustering that fits a model, learned on recordings with known turns; stored with it.

    That is the method of the lowest DER, and the threshold of ahc. The defaults were not learned.
    """

    __pydantic_config__ = ONLY_FINITE

    method: Literal["ahc", "spectral"] = "spectral"
    threshold: float = THRESHOLD
    der: Mapping[str, float] = field(default_factory=dict)  # method -> DER on these recordings
    source: str | None = None  # description of these recordings

    def build(self, name: str | None = None) -> Method:
        """Build a method by its name (None: the learned one); ValueError if that is not enough."""
        name = name or self.method
        if name not in METHODS or name == "vbx":
            raise ValueError(
                "method: must be ahc, spectral or an object such as that of `learn_vbx`, got "
                f"'{name}'"
            )
        return METHODS[name](**({"threshold": self.threshold} if name == "ahc" else {}))


@dataclass(frozen=True, eq=False)
class Clusters:
    """The speakers of a recording, numbered in the order in which they first speak."""

    speaker_N: NDArray[np.int64]
    centre_KD: NDArray[np.float64]  # mean of a speaker's embeddings, each scaled to unit length
    cosine_NK: NDArray[np.float64]  # of each window and each centre
    num_dropped: int = 0  # windows of groups too small for a speaker, now of the nearest one


def cluster(
    emb_ND: np.ndarray, method: Method, *, min_speakers: int = 1, max_speakers: int = MAX_SPEAKERS
) -> Clusters:
    """Find the speakers of a recording from the embeddings of its windows, in order of time.

    min_speakers, max_speakers: equal for a known number; there may be fewer if windows are too
    alike. Raises ValueError for embeddings that have no direction and for impossible numbers.
    """
    num_windows = len(emb_ND)
    if not 1 <= min_speakers <= max_speakers:
        raise ValueError(
            f"speakers: must be at least 1 and in order, got {min_speakers} to {max_speakers}; "
            "correct the numbers"
        )
    if num_windows == 0:
        none = np.zeros(0)
        return Clusters(none.astype(np.int64), none.reshape(0, emb_ND.shape[1]), none[:, None])
    if num_windows < min_speakers:
        raise ValueError(
            f"speakers: {min_speakers} requested, but there are only {num_windows} windows of "
            "speech; lower the number, or use shorter windows"
        )
    unit_ND = unit_rows(emb_ND)
    group_N = method(unit_ND, min_speakers, min(max_speakers, num_windows))
    kept_N = drop_tiny(group_N, min_speakers)
    nearest_N = (unit_ND @ unit_rows(centres(unit_ND, kept_N)).T).argmax(axis=1)
    merged_N = merge_groups(unit_ND, np.where(kept_N < 0, nearest_N, kept_N), min_speakers)
    first = np.unique(merged_N, return_index=True)[1]
    speaker_N = np.argsort(np.argsort(first))[merged_N]
    centre_KD = centres(unit_ND, speaker_N)
    num_dropped = int(np.count_nonzero((group_N >= 0) & (kept_N < 0)))
    return Clusters(speaker_N, centre_KD, unit_ND @ unit_rows(centre_KD).T, num_dropped)


def unit_rows(emb_ND: np.ndarray) -> NDArray[np.float64]:
    """Scale rows to length 1; ValueError with the first that is not finite or 0."""
    norm_N = np.sqrt(np.square(emb_ND, dtype=np.float64).sum(axis=1))
    wrong = np.flatnonzero(~(np.isfinite(norm_N) & (norm_N > 0)))
    if len(wrong):
        raise ValueError(
            f"embeddings: window {wrong[0]} has length {norm_N[wrong[0]]:g}; check the recording "
            "and the model"
        )
    return emb_ND / norm_N[:, None]


def sample_rows(num_windows: int, most: int = MAX_SAMPLE) -> NDArray[np.int64]:
    """Return at most `most` windows, evenly spaced in time, and all if there are fewer."""
    return np.linspace(0, num_windows - 1, min(num_windows, most)).round().astype(np.int64)


def centres(unit_ND: np.ndarray, group_N: np.ndarray) -> NDArray[np.float64]:
    """Return the mean of each group 0, 1, ..., (K, D); -1 is none. No group may be empty."""
    return np.stack([unit_ND[group_N == k].mean(axis=0) for k in range(group_N.max() + 1)])


def drop_tiny(group_N: NDArray[np.int64], least: int) -> NDArray[np.int64]:
    """Number the groups from 0, largest first; -1 for those that are too small for a speaker.

    The `least` largest are kept at any size.
    """
    enough = max(min(MIN_WINDOWS, int(MIN_SHARE * len(group_N))), 2)
    names, count_K = np.unique(group_N[group_N >= 0], return_counts=True)
    order_K = np.argsort(-count_K, kind="stable")
    num_kept = max(int((count_K >= enough).sum()), least)
    kept = np.full(len(group_N), -1)
    for number, name in enumerate(names[order_K[:num_kept]]):
        kept[group_N == name] = number
    return kept


def merge_groups(unit_ND: np.ndarray, group_N: NDArray[np.int64], least: int) -> NDArray[np.int64]:
    """Merge the nearest two groups while more than `least` are left and they are one voice."""
    while True:
        direction_KD = unit_rows(centres(unit_ND, group_N))
        cosine_KK = np.triu(direction_KD @ direction_KD.T, k=1)
        first, second = np.unravel_index(cosine_KK.argmax(), cosine_KK.shape)
        if len(direction_KD) <= least or cosine_KK[first, second] < MERGE_COSINE:
            return group_N
        group_N = np.where(group_N == second, first, group_N)
        group_N = np.where(group_N > second, group_N - 1, group_N)
