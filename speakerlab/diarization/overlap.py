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
from speakerlab.diarization.windows import runs_of_true, speech_regions

# Classes: nobody, each of three speakers alone, each pair.
SPEAKERS_CL = np.array(
    [
        [0, 0, 0],
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
        [1, 1, 0],
        [1, 0, 1],
        [0, 1, 1],
    ],
    dtype=np.float32,
)
ANY_SPEECH = slice(1, 7)  # classes with one or two speakers
TWO_SPEAKERS = slice(4, 7)

SAMPLE_RATE = 16000
HOP_SAMPLES = 270  # from a frame to the next
FIELD_SAMPLES = 991  # receptive field of a frame
FRAME_SECONDS = HOP_SAMPLES / SAMPLE_RATE
# Start of frame 0, which is in the middle of its receptive field.
FIRST_SECONDS = (FIELD_SAMPLES - HOP_SAMPLES) / 2 / SAMPLE_RATE
# Threshold for speech and for overlap. With 0.5, the DER is 1.1 to 1.5 points higher in six
# excerpts of AMI with the true speech, and 0.04 lower in 30 conversations.
MIN_PROB = 0.4


class LocalSpeakers(NamedTuple):
    """Probabilities of the classes in overlapping windows."""

    prob_WFC: np.ndarray
    start_W: np.ndarray  # first frame of each window, ascending from 0, without gaps

    def mean(self, classes: slice) -> np.ndarray:
        """Return the total probability of `classes` at each frame (T,), averaged over windows."""
        window_frames = self.prob_WFC.shape[1]
        num_frames = self.start_W[-1] + window_frames
        sum_T = np.zeros(num_frames)
        count_T = np.zeros(num_frames)
        for start, prob_FC in zip(self.start_W, self.prob_WFC):
            window = slice(start, start + window_frames)
            sum_T[window] += prob_FC[:, classes].sum(axis=1, dtype=np.float64)
            count_T[window] += 1
        return sum_T / count_T

    def speech(self) -> list[Region]:
        """Return the regions with speech of any speaker."""
        voiced_T = self.mean(ANY_SPEECH) >= MIN_PROB
        regions = speech_regions(voiced_T, frame_seconds=FRAME_SECONDS)
        return [(start + FIRST_SECONDS, end + FIRST_SECONDS) for start, end in regions]


def add_overlap(
    segments: Sequence[Segment],
    windows: Sequence[Region],
    cosine_NK: np.ndarray,
    local: LocalSpeakers,
) -> list[Segment]:
    """Add segments of the second speaker in overlapped speech.

    segments: from `find_segments` with these windows and cosine_NK. The confidence of an added
    segment is the mean probability that its speaker speaks. Segments of one speaker that touch are
    merged.
    """
    num_speakers = cosine_NK.shape[1]
    names = [f"speaker{k + 1}" for k in range(num_speakers)]
    is_WKL = _match(windows, cosine_NK, local)
    added: list[Segment] = []
    for overlap in _overlaps(segments, local):
        prob_K = _speaker_probs(overlap.start, overlap.end, is_WKL, local)
        # The speaker of the segment is the first speaker, so the second is another one.
        first = names.index(overlap.segment.speaker)
        prob_K[first] = 0.0
        second = int(prob_K.argmax())
        if prob_K[second] > 0:
            added.append(
                Segment(
                    start=overlap.start,
                    end=overlap.end,
                    speaker=names[second],
                    confidence=float(prob_K[second]),
                )
            )
    return _join([*segments, *added])


class Overlap(NamedTuple):
    """Part of a segment in which two speakers speak."""

    start: float  # seconds
    end: float
    segment: Segment


def _overlaps(segments: Sequence[Segment], local: LocalSpeakers) -> Iterator[Overlap]:
    """Yield the parts of segments with overlapped speech."""
    is_overlap_T = local.mean(TWO_SPEAKERS) >= MIN_PROB
    times_R2 = runs_of_true(is_overlap_T) * FRAME_SECONDS + FIRST_SECONDS
    # Segments are disjoint and in order of time, so both lists ascend.
    segment_starts = [segment.start for segment in segments]
    segment_ends = [segment.end for segment in segments]

    for start, end in times_R2.tolist():
        first = np.searchsorted(segment_ends, start, side="right")
        stop = np.searchsorted(segment_starts, end)
        for segment in segments[first:stop]:
            shared_start = max(start, segment.start)
            shared_end = min(end, segment.end)
            # A shorter overlap is a rounding difference: the segments have other frames.
            if shared_end - shared_start > FRAME_SECONDS / 2:
                yield Overlap(shared_start, shared_end, segment)


def _match(
    windows: Sequence[Region],
    cosine_NK: np.ndarray,
    local: LocalSpeakers,
) -> np.ndarray:
    """Match local speakers to found speakers in each window; return is_WKL, 0 or 1.

    The matching maximises the sum, over the windows with an embedding, of (1 + cosine) times the
    probability that the local speaker speaks, summed over the frames.
    """
    times_N2 = np.array(windows)
    frames_N2 = np.round((times_N2 - FIRST_SECONDS) / FRAME_SECONDS)
    start_N, end_N = frames_N2.astype(np.int64).T
    num_windows, window_frames, _ = local.prob_WFC.shape
    num_speakers = cosine_NK.shape[1]
    num_local = SPEAKERS_CL.shape[1]
    is_WKL = np.zeros((num_windows, num_speakers, num_local))

    for window, window_start in enumerate(local.start_W):
        # The M windows with an embedding that share frames with this window of the model; starts
        # and ends ascend. Frames are counted from the start of the model's window.
        first = np.searchsorted(end_N, window_start, side="right")
        stop = np.searchsorted(start_N, window_start + window_frames)
        start_M = np.clip(start_N[first:stop] - window_start, 0, window_frames)
        end_M = np.clip(end_N[first:stop] - window_start, 0, window_frames)

        # Expected number of frames in which each local speaker speaks in them. With cumulative
        # sums, the sum from start to end is a single subtraction.
        prob_FL = local.prob_WFC[window].astype(np.float64) @ SPEAKERS_CL
        sum_before_FL = np.zeros((window_frames + 1, num_local))
        np.cumsum(prob_FL, axis=0, out=sum_before_FL[1:])
        spoken_ML = sum_before_FL[end_M] - sum_before_FL[start_M]

        # 1 + cosine: weights are never negative, so a long overlap never counts against a pair.
        similarity_MK = 1 + cosine_NK[first:stop]
        weight_KL = similarity_MK.T @ spoken_ML
        speakers, local_speakers = linear_sum_assignment(weight_KL, maximize=True)
        is_WKL[window, speakers, local_speakers] = 1
    return is_WKL


def _speaker_probs(
    start: float,
    end: float,
    is_WKL: np.ndarray,
    local: LocalSpeakers,
) -> np.ndarray:
    """Return each speaker's mean probability of speaking from start to end, (K,)."""
    # All frames that the time touches; 1e-6 tolerates rounding at a frame's bound.
    start_frames = (start - FIRST_SECONDS) / FRAME_SECONDS
    end_frames = (end - FIRST_SECONDS) / FRAME_SECONDS
    first_frame = int(start_frames + 1e-6)
    stop_frame = int(np.ceil(end_frames - 1e-6))
    # The windows that contain some of these frames.
    window_frames = local.prob_WFC.shape[1]
    first = np.searchsorted(local.start_W, first_frame - window_frames, side="right")
    stop = np.searchsorted(local.start_W, stop_frame)

    # A frame in two windows counts twice: the mean is over frames and windows.
    sum_K = np.zeros(is_WKL.shape[1])
    num_frames = 0
    for window in range(first, stop):
        window_start = local.start_W[window]
        low = max(first_frame - window_start, 0)
        high = stop_frame - window_start
        prob_FC = local.prob_WFC[window, low:high]
        prob_L = prob_FC.sum(axis=0, dtype=np.float64) @ SPEAKERS_CL
        sum_K += is_WKL[window] @ prob_L
        num_frames += len(prob_FC)
    return sum_K / num_frames


def _join(segments: Iterable[Segment]) -> list[Segment]:
    """Return the segments in order of time; segments of one speaker that touch are merged."""
    joined: list[Segment] = []
    by_speaker = sorted(segments, key=lambda segment: (segment.speaker, segment.start))
    for segment in by_speaker:
        last = joined[-1] if joined else None
        if last is None or last.speaker != segment.speaker or last.end < segment.start:
            joined.append(segment)
            continue
        last_seconds = last.end - last.start
        seconds = segment.end - segment.start
        mean_confidence = np.average(
            [last.confidence, segment.confidence],
            weights=[last_seconds, seconds],
        )
        joined[-1] = last._replace(
            end=segment.end,
            confidence=float(mean_confidence),
        )
    # Segments sort by their start.
    return sorted(joined)
