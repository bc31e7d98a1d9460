"""From windows to turns. In: the cosine between each window and each speaker. Out: turns.

Windows overlap and may contain two speakers. Each frame of speech is therefore assigned to the
speaker with the highest mean cosine over the windows around it. The weight of a window decreases
towards its ends, so that a speaker change is found between the middles of two windows.
Letters: N windows, K speakers, T frames of a region, W frames of a window.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from speakerlab.diarization.regions import Region

FRAME_SECONDS = 0.01


class Segment(NamedTuple):
    """Speaker turn with a confidence."""

    start: float  # seconds
    end: float
    speaker: str
    # From 0 (halfway between two speakers) to 1 (at the speaker's centre, or the only speaker). In
    # segments added by overlap.py: the probability that the second speaker speaks.
    confidence: float


def find_segments(
    regions: Sequence[Region],
    windows: Sequence[Region],
    cosine_NK: np.ndarray,
) -> list[Segment]:
    """Return the turns of "speaker1" to "speakerK"; a region without windows has no turns.

    regions: disjoint. windows: from `cut_windows`, some may be left out. cosine_NK: between each
    window and the centre of each speaker.
    """
    starts_N = np.array([start for start, _ in windows])
    segments: list[Segment] = []
    for region in sorted(regions):
        start, end = region
        # 1e-6 tolerates rounding, so that a window at the region's start is inside.
        bounds = [start - 1e-6, end - 1e-6]
        first, stop = np.searchsorted(starts_N, bounds)
        if first < stop:
            segments += _segments_of_region(
                region,
                windows[first:stop],
                cosine_NK[first:stop],
            )
    return segments


def _segments_of_region(
    region: Region,
    windows: Sequence[Region],
    cosine_NK: np.ndarray,
) -> list[Segment]:
    """Return the consecutive segments of one region, given its windows."""
    region_start, region_end = region
    cosine_TK = _cosines(region, windows, cosine_NK)
    speaker_T = cosine_TK.argmax(axis=1)

    # The first and last time are the region's bounds, which may be between two frames.
    changes = np.flatnonzero(np.diff(speaker_T)) + 1
    change_times = region_start + changes * FRAME_SECONDS
    frames = [0, *changes.tolist(), len(speaker_T)]
    times = [region_start, *change_times.tolist(), region_end]

    segments: list[Segment] = []
    frame_pairs = pairwise(frames)
    time_pairs = pairwise(times)
    for (first, stop), (start, end) in zip(frame_pairs, time_pairs):
        segment_TK = cosine_TK[first:stop]
        mean_cosine_K = segment_TK.mean(axis=0)
        segments.append(
            Segment(
                start=start,
                end=end,
                speaker=f"speaker{speaker_T[first] + 1}",
                confidence=confidence(mean_cosine_K),
            )
        )
    return segments


def _cosines(
    region: Region,
    windows: Sequence[Region],
    cosine_NK: np.ndarray,
) -> np.ndarray:
    """Return cosine_TK: the mean over the windows at each frame, weighted by a triangle."""
    region_start, region_end = region
    num_speakers = cosine_NK.shape[1]
    num_frames = round((region_end - region_start) / FRAME_SECONDS)
    num_frames = max(num_frames, 1)
    sum_TK = np.zeros((num_frames, num_speakers))
    weight_T1 = np.zeros((num_frames, 1))
    for (start, end), cosine_K in zip(windows, cosine_NK):
        # Frames first to stop - 1 of the region; at least one, even after rounding.
        first = round((start - region_start) / FRAME_SECONDS)
        first = min(first, num_frames - 1)
        stop = round((end - region_start) / FRAME_SECONDS)
        stop = max(min(stop, num_frames), first + 1)
        num_inside = stop - first
        # From 0 at the start of the window to 1 at its end, at the middle of each frame.
        place_W = (np.arange(num_inside) + 0.5) / num_inside
        triangle_W = np.minimum(place_W, 1.0 - place_W)
        triangle_W1 = triangle_W[:, None]
        sum_TK[first:stop] += triangle_W1 * cosine_K
        weight_T1[first:stop] += triangle_W1
    mean_TK = sum_TK / np.maximum(weight_T1, 1e-12)

    # A frame outside all windows takes the cosines of the nearest covered frame. The first half of
    # a gap is nearer to the covered frame before it.
    covered = np.flatnonzero(weight_T1[:, 0])
    middles = (covered[1:] + covered[:-1]) / 2
    frame_T = np.arange(num_frames)
    nearest_T = covered[np.searchsorted(middles, frame_T)]
    return mean_TK[nearest_T]


def confidence(cosine_K: np.ndarray) -> float:
    """Return the confidence of the best speaker, compared with the second best.

    This is the simplified silhouette (Hruschka, de Castro and Campello, "Evolutionary algorithms
    for clustering gene-expression data", ICDM 2004), with 1 - cosine as distance.
    """
    if len(cosine_K) < 2:
        return 1.0
    ascending_K = np.sort(1.0 - cosine_K)
    nearest = ascending_K[0]
    second_nearest = max(ascending_K[1], 1e-12)
    return float(1.0 - nearest / second_nearest)
