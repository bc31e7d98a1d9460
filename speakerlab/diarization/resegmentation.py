"""From windows to turns. In: what each window has in common with each speaker. Out: turns.

Windows overlap and may hold two speakers. So each moment of speech goes to the speaker with the
highest mean cosine over the windows around it, which weigh less towards their ends: a change of
speakers is found between the middles of two windows.
Letters: N windows, K speakers, T frames of a region.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from speakerlab.diarization.regions import Region

FRAME_SECONDS = 0.01


class Segment(NamedTuple):
    """A turn, and how sure it is."""

    start: float  # seconds
    end: float
    speaker: str
    # 0: between two speakers, 1: on the speaker's centre, or the only speaker; of overlap.py: the
    # probability that a second speaker speaks
    confidence: float


def find_segments(
    regions: Sequence[Region], windows: Sequence[Region], cosine_NK: np.ndarray
) -> list[Segment]:
    """Return the turns of "speaker1" to "speakerK"; a region without windows has none.

    regions: disjoint. windows: of `cut_windows`, perhaps without some. cosine_NK: of each window
    with the centre of each speaker.
    """
    starts_N = np.array([start for start, _ in windows])
    segments: list[Segment] = []
    for region in sorted(regions):
        first, stop = np.searchsorted(starts_N, [region[0] - 1e-6, region[1] - 1e-6])
        if first < stop:
            segments += _of_region(region, windows[first:stop], cosine_NK[first:stop])
    return segments


def _of_region(region: Region, windows: Sequence[Region], cosine_NK: np.ndarray) -> list[Segment]:
    cosine_TK = _cosines(region, windows, cosine_NK)
    speaker_T = cosine_TK.argmax(axis=1)
    inner = np.flatnonzero(np.diff(speaker_T)) + 1
    frames = [0, *inner.tolist(), len(speaker_T)]
    times = [region[0], *(region[0] + inner * FRAME_SECONDS).tolist(), region[1]]
    segments: list[Segment] = []
    for i, (first, stop) in enumerate(pairwise(frames)):
        sure = confidence(cosine_TK[first:stop].mean(axis=0))
        segments.append(Segment(times[i], times[i + 1], f"speaker{speaker_T[first] + 1}", sure))
    return segments


def _cosines(region: Region, windows: Sequence[Region], cosine_NK: np.ndarray) -> np.ndarray:
    """Return cosine_TK: the mean over the windows at each frame, weighed by a triangle."""
    num_frames = max(round((region[1] - region[0]) / FRAME_SECONDS), 1)
    sum_TK = np.zeros((num_frames, cosine_NK.shape[1]))
    weight_T1 = np.zeros((num_frames, 1))
    for (start, end), cosine_K in zip(windows, cosine_NK):
        first = min(round((start - region[0]) / FRAME_SECONDS), num_frames - 1)
        stop = max(min(round((end - region[0]) / FRAME_SECONDS), num_frames), first + 1)
        place_W = (np.arange(stop - first) + 0.5) / (stop - first)
        triangle_W1 = np.minimum(place_W, 1.0 - place_W)[:, None]
        sum_TK[first:stop] += triangle_W1 * cosine_K
        weight_T1[first:stop] += triangle_W1
    known = np.flatnonzero(weight_T1[:, 0])
    nearest_T = known[np.searchsorted((known[1:] + known[:-1]) / 2, np.arange(num_frames))]
    return (sum_TK / np.maximum(weight_T1, 1e-12))[nearest_T]


def confidence(cosine_K: np.ndarray) -> float:
    """Return how much nearer the best speaker is than the next.

    The simplified silhouette (Hruschka, de Castro and Campello, "Evolutionary algorithms for
    clustering gene-expression data", ICDM 2004), with 1 - cosine as distance.
    """
    if len(cosine_K) < 2:
        return 1.0
    own, other = np.sort(1.0 - cosine_K)[:2]
    return float(1.0 - own / max(other, 1e-12))
