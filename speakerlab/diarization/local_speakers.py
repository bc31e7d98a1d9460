"""Local speakers of a segmentation model. In: probabilities of windows, and clusters of embeddings.
Out: speech, the number of speakers, and who speaks when.

The model divides a window of 10 s into frames and gives the probability of each set of speakers:
nobody, one of up to three local speakers, or two of them (Plaquet and Bredin, "Powerset multi-class
cross entropy loss for neural speaker diarization", Interspeech 2023). Probabilities are averaged
over windows that overlap, as in Bredin, "pyannote.audio 2.1 speaker diarization pipeline:
principle, benchmark, and recipe", Interspeech 2023.

A local speaker of one window is a track. Its embedding is the mean of the embeddings of 1.5 s, each
weighted by how much of it this speaker speaks alone. Two tracks of a window are two speakers
(Kinoshita, Delcroix and Tawara, "Integrating end-to-end neural and clustering-based diarization:
getting the best of both worlds", ICASSP 2021): the tracks of a window are matched one to one to the
speakers of the recording, and a clustering that cannot tell them apart has too few speakers.
Letters: W windows of the model, F frames of each, C sets of speakers ("classes"), L local speakers,
M tracks of all windows, T frames of the recording, N windows with an embedding, K speakers of the
recording, D dimensions.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from speakerlab.diarization.clustering import Clusters, Method, cluster, unit_rows
from speakerlab.diarization.regions import Region
from speakerlab.diarization.windows import speech_regions

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
ALONE = slice(1, 4)
TWO_SPEAKERS = slice(4, 7)

SAMPLE_RATE = 16000
HOP_SAMPLES = 270  # from a frame to the next
FIELD_SAMPLES = 991  # receptive field of a frame
FRAME_SECONDS = HOP_SAMPLES / SAMPLE_RATE
# Start of frame 0, which is in the middle of its receptive field.
FIRST_SECONDS = (FIELD_SAMPLES - HOP_SAMPLES) / 2 / SAMPLE_RATE
# Threshold for speech and for overlap. With 0.5 for overlap, the DER is 1.5 points higher in six
# excerpts of AMI, and 0.1 higher in 15 simulated conversations.
MIN_PROB = 0.4

MIN_TRACK_FRAMES = 3  # expected frames of speech of a track; less is noise of the model
# Weight of speech with another speaker, for tracks that are never alone.
OVERLAP_WEIGHT = 0.001
# Of a track that counts when tracks should be told apart: 0.5 s alone.
MIN_ALONE_FRAMES = 30
# One more speaker must tell apart so many more of the pairs of tracks. This share and the frames
# above were chosen on 25 simulated conversations, which tests/diarization/simulate.py can make.
PAIRS_PER_SPEAKER = 0.125


class LocalSpeakers(NamedTuple):
    """Probabilities of the classes in overlapping windows."""

    prob_WFC: np.ndarray
    start_W: np.ndarray  # first frame of each window, ascending, without gaps

    @property
    def first_frame(self) -> int:
        """Return the first frame of the first window: 0, except in a stream."""
        return int(self.start_W[0])

    def windows(self) -> list[slice]:
        """Return the frames of each window, counted from the first one."""
        window_frames = self.prob_WFC.shape[1]
        starts = (self.start_W - self.first_frame).tolist()
        return [slice(start, start + window_frames) for start in starts]

    def mean(self, classes: slice) -> np.ndarray:
        """Return the total probability of `classes` at each frame (T,), averaged over windows."""
        windows = self.windows()
        num_frames = windows[-1].stop
        sum_T = np.zeros(num_frames)
        count_T = np.zeros(num_frames)
        for window, prob_FC in zip(windows, self.prob_WFC):
            sum_T[window] += prob_FC[:, classes].sum(axis=1, dtype=np.float64)
            count_T[window] += 1
        return sum_T / count_T

    def speech(self) -> list[Region]:
        """Return the regions with speech of any speaker."""
        voiced_T = self.mean(ANY_SPEECH) >= MIN_PROB
        regions = speech_regions(voiced_T, frame_seconds=FRAME_SECONDS)
        return [(start + FIRST_SECONDS, end + FIRST_SECONDS) for start, end in regions]


class Tracks(NamedTuple):
    """Local speakers that speak, in order of their windows."""

    window_M: NDArray[np.int64]  # number of the window
    local_M: NDArray[np.int64]  # number of the local speaker in its window
    unit_MD: NDArray[np.float64]  # mean embedding, of length 1
    spoken_M: NDArray[np.float64]  # expected number of frames with speech
    alone_M: NDArray[np.float64]  # the part in which nobody else speaks

    def select(self, is_selected_M: NDArray[np.bool_]) -> "Tracks":
        """Return some of the tracks."""
        return Tracks(
            window_M=self.window_M[is_selected_M],
            local_M=self.local_M[is_selected_M],
            unit_MD=self.unit_MD[is_selected_M],
            spoken_M=self.spoken_M[is_selected_M],
            alone_M=self.alone_M[is_selected_M],
        )

    def pairs(self) -> NDArray[np.int64]:
        """Return the pairs of tracks that are surely two speakers of one window, (P, 2)."""
        pairs: list[tuple[int, int]] = []
        for rows in self.rows_by_window():
            is_clear = self.alone_M[rows] >= MIN_ALONE_FRAMES
            clear_rows = rows[is_clear].tolist()
            pairs += combinations(clear_rows, 2)
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def rows_by_window(self) -> list[NDArray[np.int64]]:
        """Return the rows of the tracks of each window that has some."""
        if not len(self.window_M):
            return []
        rows_M = np.arange(len(self.window_M))
        # The first row of each window but the first.
        first_rows = np.flatnonzero(np.diff(self.window_M)) + 1
        return np.split(rows_M, first_rows)


class Activity(NamedTuple):
    """Who speaks in each frame of a recording, as the segmentation model hears it."""

    prob_TK: NDArray[np.float64]  # probability that each speaker speaks
    two_T: NDArray[np.float64]  # probability that two speakers do
    first_frame: int = 0  # of the recording, in row 0

    def at(self, time_T: np.ndarray) -> "Activity":
        """Return the frames at these times, in seconds."""
        place_T = (time_T - FIRST_SECONDS) / FRAME_SECONDS
        frame_T = np.floor(place_T).astype(np.int64)
        row_T = frame_T - self.first_frame
        # Before the first row and after the last one, take the nearest.
        last_row = len(self.two_T) - 1
        row_T = np.clip(row_T, 0, last_row)
        return Activity(prob_TK=self.prob_TK[row_T], two_T=self.two_T[row_T])


def find_tracks(
    local: LocalSpeakers, windows: Sequence[Region], emb_ND: np.ndarray
) -> Tracks:
    """Return the tracks of a recording that share time with its embeddings.

    windows: (start, end) of each embedding, in seconds; starts and ends ascend.
    """
    unit_ND = unit_rows(emb_ND)
    times_N2 = np.array(windows).reshape(-1, 2)
    frames_N2 = np.round((times_N2 - FIRST_SECONDS) / FRAME_SECONDS).astype(np.int64)
    # Of each track.
    window_numbers: list[int] = []
    local_numbers: list[int] = []
    weighted_sums: list[np.ndarray] = []
    spoken: list[float] = []
    alone: list[float] = []

    for window, window_start in enumerate(local.start_W):
        prob_FC = local.prob_WFC[window].astype(np.float64)
        spoken_FL = prob_FC @ SPEAKERS_CL
        alone_FL = prob_FC[:, ALONE]
        clear_FL = alone_FL + OVERLAP_WEIGHT * spoken_FL
        sum_LD = _weighted_sums(clear_FL, int(window_start), unit_ND, frames_N2)
        spoken_L = spoken_FL.sum(axis=0)
        alone_L = alone_FL.sum(axis=0)
        has_embedding_L = (sum_LD != 0).any(axis=1)
        is_track_L = (spoken_L >= MIN_TRACK_FRAMES) & has_embedding_L
        for number in np.flatnonzero(is_track_L).tolist():
            window_numbers.append(window)
            local_numbers.append(number)
            weighted_sums.append(sum_LD[number])
            spoken.append(spoken_L[number])
            alone.append(alone_L[number])

    num_dimensions = unit_ND.shape[1]
    sum_MD = np.array(weighted_sums).reshape(-1, num_dimensions)
    return Tracks(
        window_M=np.array(window_numbers, dtype=np.int64),
        local_M=np.array(local_numbers, dtype=np.int64),
        unit_MD=unit_rows(sum_MD),
        spoken_M=np.array(spoken),
        alone_M=np.array(alone),
    )


def _weighted_sums(
    clear_FL: np.ndarray,
    window_start: int,
    unit_ND: np.ndarray,
    frames_N2: np.ndarray,
) -> NDArray[np.float64]:
    """Return the sum of the embeddings that share frames with a window, (L, D).

    An embedding counts for a local speaker by how clearly this speaker is heard in it.

    clear_FL: how clearly in each frame of the window, from 0 to 1.
    window_start: its first frame.
    frames_N2: first frame and end of each embedding; both ascend.
    """
    window_frames = len(clear_FL)
    start_N, end_N = frames_N2.T
    # The embeddings that end after the start of the window and start before its end.
    first = np.searchsorted(end_N, window_start, side="right")
    stop = np.searchsorted(start_N, window_start + window_frames)
    shared = slice(first, stop)
    # The part of each in the window, counted from its start.
    starts = np.clip(start_N[shared] - window_start, 0, window_frames)
    ends = np.clip(end_N[shared] - window_start, 0, window_frames)
    clear_NL = _sums_of_frames(clear_FL, starts, ends)

    # An embedding of n frames, of which c are clear, has the weight c * (c / n): with the share
    # c / n, embeddings of two voices count little.
    num_frames = np.maximum(end_N[shared] - start_N[shared], 1)
    weight_NL = clear_NL**2 / num_frames[:, None]
    return weight_NL.T @ unit_ND[shared]


def _sums_of_frames(
    value_FL: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> NDArray[np.float64]:
    """Return the sums of frames start to end - 1, (N, L), for each start and end."""
    # With cumulative sums, each is a single subtraction: frames 3 and 4 are the sum of the first 5
    # minus the sum of the first 3.
    num_frames, num_local = value_FL.shape
    sum_before_FL = np.zeros((num_frames + 1, num_local))
    np.cumsum(value_FL, axis=0, out=sum_before_FL[1:])
    return sum_before_FL[ends] - sum_before_FL[starts]


def cluster_tracks(
    emb_ND: np.ndarray,
    tracks: Tracks,
    method: Method,
    *,
    min_speakers: int,
    max_speakers: int,
) -> Clusters:
    """Find the speakers of a recording as `cluster` does, and more if they are too few.

    Two tracks of one window are two people, so a pair of them should have different nearest
    speakers. Each additional speaker has a price: it must separate PAIRS_PER_SPEAKER of all pairs
    in addition. For example, of 40 pairs, 2 additional speakers must separate over 10 more.
    """
    best = cluster(
        emb_ND,
        method,
        min_speakers=min_speakers,
        max_speakers=max_speakers,
    )
    pairs_P2 = tracks.pairs()
    if not len(pairs_P2):
        return best

    best_cost = _cost(best, tracks, pairs_P2)
    num_found = len(best.centre_KD)
    most = min(max_speakers, len(emb_ND))
    for num_speakers in range(num_found + 1, most + 1):
        # The price of so many speakers is too high, even if they separated all pairs.
        if PAIRS_PER_SPEAKER * num_speakers >= best_cost:
            break
        clusters = cluster(
            emb_ND,
            method,
            min_speakers=num_speakers,
            max_speakers=num_speakers,
        )
        cost = _cost(clusters, tracks, pairs_P2)
        if cost < best_cost:
            best, best_cost = clusters, cost
    return best


def _cost(clusters: Clusters, tracks: Tracks, pairs_P2: np.ndarray) -> float:
    """Return the share of pairs that are not told apart, plus the price of the speakers."""
    cosine_MK = _cosines(clusters.centre_KD, tracks)
    nearest_M = cosine_MK.argmax(axis=1)
    speakers_P2 = nearest_M[pairs_P2]
    is_together_P = speakers_P2[:, 0] == speakers_P2[:, 1]
    share_together = float(np.mean(is_together_P))
    num_speakers = len(clusters.centre_KD)
    return share_together + PAIRS_PER_SPEAKER * num_speakers


def _cosines(centre_KD: np.ndarray, tracks: Tracks) -> NDArray[np.float64]:
    """Return cosine_MK, between each track and the centre of each speaker."""
    return tracks.unit_MD @ unit_rows(centre_KD).T


def match_tracks(centre_KD: np.ndarray, tracks: Tracks) -> NDArray[np.int64]:
    """Return the speaker of each track, (M,): one to one in a window.

    The matching of a window maximises the sum of (1 + cosine), weighted by how long the track
    speaks. Tracks beyond the number of speakers go to the nearest speaker.
    """
    # 1 + cosine: never negative, so long speech never counts against a pair.
    cosine_MK = _cosines(centre_KD, tracks)
    weight_MK = (1 + cosine_MK) * tracks.spoken_M[:, None]
    speaker_M = cosine_MK.argmax(axis=1)
    for rows in tracks.rows_by_window():
        matched, speakers = linear_sum_assignment(weight_MK[rows], maximize=True)
        speaker_M[rows[matched]] = speakers
    return speaker_M


def find_activity(
    local: LocalSpeakers, tracks: Tracks, speaker_M: np.ndarray, num_speakers: int
) -> Activity:
    """Return who speaks in each frame, averaged over the windows that contain it.

    speaker_M: the speaker of each track. Of two tracks of one speaker, the more probable counts.
    """
    windows = local.windows()
    num_frames = windows[-1].stop
    sum_TK = np.zeros((num_frames, num_speakers))
    num_windows_T1 = np.zeros((num_frames, 1))
    for window in windows:
        num_windows_T1[window] += 1
    # A window without tracks adds nothing to the sum, but counts in the mean.
    for rows in tracks.rows_by_window():
        window_number = tracks.window_M[rows[0]]
        prob_FC = local.prob_WFC[window_number].astype(np.float64)
        prob_FL = prob_FC @ SPEAKERS_CL
        prob_FK = np.zeros((len(prob_FL), num_speakers))
        for number, speaker in zip(tracks.local_M[rows], speaker_M[rows]):
            prob_FK[:, speaker] = np.maximum(prob_FK[:, speaker], prob_FL[:, number])
        window = windows[window_number]
        sum_TK[window] += prob_FK
    return Activity(
        prob_TK=sum_TK / num_windows_T1,
        two_T=local.mean(TWO_SPEAKERS),
        first_frame=local.first_frame,
    )
