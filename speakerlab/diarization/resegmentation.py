"""From windows to turns. In: the cosine between each window and each speaker. Out: turns.

Windows overlap and may contain two speakers. Each frame of speech is therefore assigned to the
speaker with the highest mean cosine over the windows around it. The weight of a window decreases
towards its ends, so that a speaker change is found between the middles of two windows.
With a segmentation model, which hears changes more exactly and two speakers at a time, the mean of
two probabilities takes the place of the cosine: of the model, and of the cosines.
Letters: N windows, K speakers, T frames of a region, W frames of a window.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

from speakerlab.diarization.local_speakers import MIN_PROB, Activity
from speakerlab.diarization.regions import Region
from speakerlab.diarization.windows import runs_of_true

FRAME_SECONDS = 0.01
# Cosines become probabilities by a softmax of cosine / TEMPERATURE.
TEMPERATURE = 0.1


class Segment(NamedTuple):
    """Speaker turn with a confidence."""

    start: float  # seconds
    end: float
    speaker: str
    # From 0 (halfway between two speakers) to 1 (at the speaker's centre, or the only speaker).
    # With a segmentation model: the probability that the speaker speaks.
    confidence: float


def find_segments(
    regions: Sequence[Region],
    windows: Sequence[Region],
    cosine_NK: np.ndarray,
    activity: Activity | None = None,
) -> list[Segment]:
    """Return the turns of "speaker1" to "speakerK"; a region without windows has no turns.

    regions: disjoint. windows: from `cut_windows`, some may be left out. cosine_NK: between each
    window and the centre of each speaker. activity: of the segmentation model; without it, one
    speaker speaks at a time.
    """
    starts_N = np.array([start for start, _ in windows])
    segments: list[Segment] = []
    for region in sorted(regions):
        start, end = region
        # 1e-6 tolerates rounding, so that a window at the region's start is inside.
        bounds = [start - 1e-6, end - 1e-6]
        first, stop = np.searchsorted(starts_N, bounds)
        if first == stop:
            continue
        segments += _segments_of_region(
            region,
            windows[first:stop],
            cosine_NK[first:stop],
            activity,
        )
    return segments


def _segments_of_region(
    region: Region,
    windows: Sequence[Region],
    cosine_NK: np.ndarray,
    activity: Activity | None,
) -> list[Segment]:
    """Return the segments of one region, given its windows, in order of time."""
    region_start, region_end = region
    cosine_TK = _cosines(region, windows, cosine_NK)
    num_frames, num_speakers = cosine_TK.shape
    # One or two columns: the speakers of each frame.
    prob_TK = None
    nearest_T = cosine_TK.argmax(axis=1)
    speakers_T2 = nearest_T[:, None]
    if activity is not None:
        middle_T = region_start + (np.arange(num_frames) + 0.5) * FRAME_SECONDS
        prob_TK, speakers_T2 = _most_probable(cosine_TK, activity.at(middle_T))

    segments: list[Segment] = []
    for speaker in range(num_speakers):
        speaks_T = (speakers_T2 == speaker).any(axis=1)
        for first, stop in runs_of_true(speaks_T).tolist():
            # The region's bounds may be between two frames.
            start, end = region
            if first > 0:
                start = region_start + first * FRAME_SECONDS
            if stop < num_frames:
                end = region_start + stop * FRAME_SECONDS
            if prob_TK is None:
                mean_cosine_K = cosine_TK[first:stop].mean(axis=0)
                turn_confidence = confidence(mean_cosine_K)
            else:
                turn_confidence = float(prob_TK[first:stop, speaker].mean())
            segment = Segment(
                start=start,
                end=end,
                speaker=f"speaker{speaker + 1}",
                confidence=turn_confidence,
            )
            segments.append(segment)
    # Segments sort by their start.
    return sorted(segments)


def _most_probable(
    cosine_TK: np.ndarray, activity: Activity
) -> tuple[np.ndarray, np.ndarray]:
    """Return prob_TK that a speaker speaks, and the one or two speakers of each frame.

    speakers_T2 has -1 where there is no second speaker.
    """
    cosine_prob_TK = softmax(cosine_TK / TEMPERATURE, axis=1)
    prob_TK = (activity.prob_TK + cosine_prob_TK) / 2
    num_frames, num_speakers = prob_TK.shape
    order_TK = np.argsort(-prob_TK, axis=1, kind="stable")
    speakers_T2 = np.full((num_frames, 2), -1)
    speakers_T2[:, 0] = order_TK[:, 0]
    if num_speakers == 1:
        return prob_TK, speakers_T2

    second_T = order_TK[:, 1]
    # A second speaker whom the model never hears here would be a guess.
    is_heard_T = activity.prob_TK[np.arange(num_frames), second_T] > 0
    is_two_T = (activity.two_T >= MIN_PROB) & is_heard_T
    speakers_T2[is_two_T, 1] = second_T[is_two_T]
    return prob_TK, speakers_T2


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
        stop = min(stop, num_frames)
        stop = max(stop, first + 1)
        # The middle of each frame, from 0 at the start of the window to 1 at its end: a window of
        # four frames has the weights 1/8, 3/8, 3/8 and 1/8.
        window_frames = stop - first
        middle_W = (np.arange(window_frames) + 0.5) / window_frames
        triangle_W = np.minimum(middle_W, 1.0 - middle_W)
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
