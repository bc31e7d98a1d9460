"""Overlapped speech. In: local speakers of a segmentation model, and turns. Out: more turns.

The model divides a window of 10 s into frames and gives the probability of each set of speakers:
nobody, one of up to three local speakers, or two of them (Plaquet and Bredin, "Powerset multi-class
cross entropy loss for neural speaker diarization", Interspeech 2023). Probabilities are averaged
over windows that overlap, as in Bredin, "pyannote.audio 2.1 speaker diarization pipeline:
principle, benchmark, and recipe", Interspeech 2023. The local speakers of each window are matched
to the speakers of the whole recording by the embeddings.
Letters: W windows of the model, F frames of each, C sets of speakers ("classes"), L local speakers,
T frames of the recording, N windows with an embedding, M of them in a window of the model, K
speakers of the recording.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from speakerlab.diarization.regions import Region
from speakerlab.diarization.resegmentation import Segment
from speakerlab.diarization.windows import speech_regions

# Classes: nobody, each of three speakers alone, each pair.
SPEAKERS_CL = np.array(
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]], dtype=np.float32
)
SAMPLE_RATE, HOP_SAMPLES, FIELD_SAMPLES = 16000, 270, 991  # of a frame
FRAME_SECONDS = HOP_SAMPLES / SAMPLE_RATE
# Start of frame 0, which lies in the middle of its receptive field.
FIRST_SECONDS = (FIELD_SAMPLES - HOP_SAMPLES) / 2 / SAMPLE_RATE
# Of speech, and of two who speak at once. 0.5 has 1.1 to 1.5 points more DER in six excerpts of AMI
# with the true speech, and 0.04 less in 30 conversations.
MIN_PROB = 0.4


class LocalSpeakers(NamedTuple):
    """Probabilities of the classes in windows that overlap."""

    prob_WFC: np.ndarray
    start_W: np.ndarray  # first frame of each window, ascending from 0, without gaps

    def mean(self, classes: slice) -> np.ndarray:
        """Return the probability of some classes at each frame (T,), averaged over windows."""
        num_frames = self.prob_WFC.shape[1]
        sum_T = np.zeros(self.start_W[-1] + num_frames)
        count_T = np.zeros_like(sum_T)
        for start, prob_FC in zip(self.start_W, self.prob_WFC):
            sum_T[start : start + num_frames] += prob_FC[:, classes].sum(axis=1, dtype=np.float64)
            count_T[start : start + num_frames] += 1
        return sum_T / count_T

    def speech(self) -> list[Region]:
        """Return the regions of speech of anybody."""
        voiced_T = self.mean(slice(1, 7)) >= MIN_PROB
        found = speech_regions(voiced_T, frame_seconds=FRAME_SECONDS)
        return [(start + FIRST_SECONDS, end + FIRST_SECONDS) for start, end in found]


def add_overlap(
    segments: Sequence[Segment],
    windows: Sequence[Region],
    cosine_NK: np.ndarray,
    local: LocalSpeakers,
) -> list[Segment]:
    """Add the second speaker where two speak at once.

    segments: of `find_segments` with these windows and cosine_NK. The confidence of an added
    segment is the mean probability that its speaker speaks. Segments of one speaker that touch
    are joined.
    """
    names = [f"speaker{k + 1}" for k in range(cosine_NK.shape[1])]
    is_WKL = _match(windows, cosine_NK, local)
    added: list[Segment] = []
    for start, end, first in _overlapped(segments, local):
        prob_K = _activity(start, end, is_WKL, local)
        prob_K[names.index(first.speaker)] = 0.0
        second = int(prob_K.argmax())
        if prob_K[second] > 0:
            added.append(Segment(start, end, names[second], float(prob_K[second])))
    return _join([*segments, *added])


def _overlapped(
    segments: Sequence[Segment], local: LocalSpeakers
) -> Iterator[tuple[float, float, Segment]]:
    """Yield where two speak at once within a segment, as start, end and segment."""
    two_T = local.mean(slice(4, 7)) >= MIN_PROB
    edges = np.flatnonzero(np.diff(two_T.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    starts, ends = ([segment[side] for segment in segments] for side in (0, 1))
    for start, end in (edges * FRAME_SECONDS + FIRST_SECONDS).tolist():
        inside = slice(np.searchsorted(ends, start, "right"), np.searchsorted(starts, end))
        for segment in segments[inside]:
            low, high = max(start, segment.start), min(end, segment.end)
            if high - low > FRAME_SECONDS / 2:
                yield low, high, segment


def _match(windows: Sequence[Region], cosine_NK: np.ndarray, local: LocalSpeakers) -> np.ndarray:
    """Return which local speaker of each window is which found speaker, is_WKL of 0 and 1.

    The matching has the largest sum, over the windows with an embedding, of 1 + cosine times the
    probability that the local speaker speaks, summed over the frames.
    """
    bounds_N2 = np.round((np.array(windows) - FIRST_SECONDS) / FRAME_SECONDS).astype(np.int64)
    num_frames = local.prob_WFC.shape[1]
    is_WKL = np.zeros((len(local.start_W), cosine_NK.shape[1], SPEAKERS_CL.shape[1]))
    for is_KL, start, prob_FC in zip(is_WKL, local.start_W, local.prob_WFC):
        near = slice(
            np.searchsorted(bounds_N2[:, 1], start, "right"),
            np.searchsorted(bounds_N2[:, 0], start + num_frames),
        )
        first_M, stop_M = np.clip(bounds_N2[near] - start, 0, num_frames).T
        sum_FL = np.zeros((num_frames + 1, SPEAKERS_CL.shape[1]))
        np.cumsum(prob_FC.astype(np.float64) @ SPEAKERS_CL, axis=0, out=sum_FL[1:])
        spoken_ML = sum_FL[stop_M] - sum_FL[first_M]
        pairs = linear_sum_assignment((1 + cosine_NK[near]).T @ spoken_ML, maximize=True)
        is_KL[pairs] = 1
    return is_WKL


def _activity(start: float, end: float, is_WKL: np.ndarray, local: LocalSpeakers) -> np.ndarray:
    """Return the mean probability of each found speaker in some time, (K,)."""
    first, stop = ((time - FIRST_SECONDS) / FRAME_SECONDS for time in (start, end))
    first, stop = int(first + 1e-6), int(np.ceil(stop - 1e-6))
    sum_K, num_frames = np.zeros(is_WKL.shape[1]), 0
    inside = slice(
        np.searchsorted(local.start_W, first - local.prob_WFC.shape[1], "right"),
        np.searchsorted(local.start_W, stop),
    )
    for low, prob_FC, is_KL in zip(local.start_W[inside], local.prob_WFC[inside], is_WKL[inside]):
        prob_FC = prob_FC[max(first - low, 0) : stop - low]
        sum_K += is_KL @ (prob_FC.sum(axis=0, dtype=np.float64) @ SPEAKERS_CL)
        num_frames += len(prob_FC)
    return sum_K / num_frames


def _join(segments: Iterable[Segment]) -> list[Segment]:
    """Return the segments in order of time, those of one speaker that touch as one."""
    joined: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: (segment.speaker, segment.start)):
        last = joined[-1] if joined else None
        if last and last.speaker == segment.speaker and segment.start <= last.end:
            weights = last.end - last.start, segment.end - segment.start
            sure = float(np.average([last.confidence, segment.confidence], weights=weights))
            joined[-1] = last._replace(end=segment.end, confidence=sure)
        else:
            joined.append(segment)
    return sorted(joined)
