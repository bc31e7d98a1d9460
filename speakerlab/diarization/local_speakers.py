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

    window_M: NDArray[np.int64]
    local_M: NDArray[np.int64]  # number of the local speaker in its window
    unit_MD: NDArray[np.float64]  # mean embedding, of length 1
    spoken_M: NDArray[np.float64]  # expected number of frames with speech
    alone_M: NDArray[np.float64]  # the part in which nobody else speaks

    def chosen(self, is_chosen_M: NDArray[np.bool_]) -> "Tracks":
        """Return some of the tracks."""
        return Tracks(
            window_M=self.window_M[is_chosen_M],
            local_M=self.local_M[is_chosen_M],
            unit_MD=self.unit_MD[is_chosen_M],
            spoken_M=self.spoken_M[is_chosen_M],
            alone_M=self.alone_M[is_chosen_M],
        )

    def pairs(self) -> NDArray[np.int64]:
        """Return the pairs of tracks that are surely two speakers of one window, (P, 2)."""
        pairs: list[tuple[int, int]] = []
        for rows in self.of_windows():
            clear = rows[self.alone_M[rows] >= MIN_ALONE_FRAMES]
            for place, first in enumerate(clear):
                pairs += [(first, second) for second in clear[place + 1 :]]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def of_windows(self) -> list[NDArray[np.int64]]:
        """Return the rows of the tracks of each window that has some."""
        changes = np.flatnonzero(np.diff(self.window_M)) + 1
        rows_M = np.arange(len(self.window_M))
        return [rows for rows in np.split(rows_M, changes) if len(rows)]


class Activity(NamedTuple):
    """Who speaks in each frame of a recording, as the segmentation model hears it."""

    prob_TK: NDArray[np.float64]  # that each speaker speaks
    two_T: NDArray[np.float64]  # that two speakers do
    first_frame: int = 0

    def at(self, time_T: np.ndarray) -> "Activity":
        """Return the frames at these times, in seconds."""
        frame_T = np.floor((time_T - FIRST_SECONDS) / FRAME_SECONDS).astype(np.int64)
        frame_T = np.clip(frame_T - self.first_frame, 0, len(self.two_T) - 1)
        return Activity(self.prob_TK[frame_T], self.two_T[frame_T])


def find_tracks(
    local: LocalSpeakers, windows: Sequence[Region], emb_ND: np.ndarray
) -> Tracks:
    """Return the tracks of a recording that share time with its embeddings.

    windows: (start, end) of each embedding, in seconds; starts and ends ascend.
    """
    unit_ND = unit_rows(emb_ND)
    times_N2 = np.array(windows).reshape(-1, 2)
    frames_N2 = np.round((times_N2 - FIRST_SECONDS) / FRAME_SECONDS).astype(np.int64)
    start_N, end_N = frames_N2.T
    window_frames = local.prob_WFC.shape[1]
    window_of: list[int] = []
    local_of: list[int] = []
    mean_of: list[np.ndarray] = []
    spoken_of: list[float] = []
    alone_of: list[float] = []

    for window, window_start in enumerate(local.start_W):
        prob_FC = local.prob_WFC[window].astype(np.float64)
        spoken_FL = prob_FC @ SPEAKERS_CL
        spoken_L = spoken_FL.sum(axis=0)
        alone_FL = prob_FC[:, ALONE]
        alone_L = alone_FL.sum(axis=0)
        clear_FL = alone_FL + OVERLAP_WEIGHT * spoken_FL

        # The embeddings that share frames with this window, and these frames, counted from its
        # start. With cumulative sums, the sum from start to end is a single subtraction.
        first = np.searchsorted(end_N, window_start, side="right")
        stop = np.searchsorted(start_N, window_start + window_frames)
        starts = np.clip(start_N[first:stop] - window_start, 0, window_frames)
        ends = np.clip(end_N[first:stop] - window_start, 0, window_frames)
        sum_before_FL = np.zeros((window_frames + 1, clear_FL.shape[1]))
        np.cumsum(clear_FL, axis=0, out=sum_before_FL[1:])
        clear_NL = sum_before_FL[ends] - sum_before_FL[starts]

        # The square of the share, so that embeddings of two voices count little.
        num_frames_N1 = np.maximum(end_N - start_N, 1)[first:stop, None]
        weight_NL = clear_NL**2 / num_frames_N1
        sum_LD = weight_NL.T @ unit_ND[first:stop]
        is_track_L = (spoken_L >= MIN_TRACK_FRAMES) & (sum_LD != 0).any(axis=1)
        for number in np.flatnonzero(is_track_L):
            window_of.append(window)
            local_of.append(int(number))
            mean_of.append(sum_LD[number])
            spoken_of.append(spoken_L[number])
            alone_of.append(alone_L[number])

    mean_MD = np.array(mean_of).reshape(-1, unit_ND.shape[1])
    return Tracks(
        window_M=np.array(window_of, dtype=np.int64),
        local_M=np.array(local_of, dtype=np.int64),
        unit_MD=unit_rows(mean_MD),
        spoken_M=np.array(spoken_of),
        alone_M=np.array(alone_of),
    )


def cluster_tracks(
    emb_ND: np.ndarray,
    tracks: Tracks,
    method: Method,
    *,
    min_speakers: int,
    max_speakers: int,
) -> Clusters:
    """Find the speakers of a recording as `cluster` does, and more if they are too few.

    A pair of tracks of one window is told apart if their nearest speakers differ. The number of
    speakers is increased as long as each additional speaker tells apart PAIRS_PER_SPEAKER more of
    the pairs.
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
    most = min(max_speakers, len(emb_ND))
    for num_speakers in range(len(best.centre_KD) + 1, most + 1):
        # With so many speakers, the cost is higher even if all pairs are told apart.
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
    nearest_M = _cosines(clusters.centre_KD, tracks).argmax(axis=1)
    first_P, second_P = nearest_M[pairs_P2].T
    share = float(np.mean(first_P == second_P))
    return share + PAIRS_PER_SPEAKER * len(clusters.centre_KD)


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
    for rows in tracks.of_windows():
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
    count_T1 = np.zeros((num_frames, 1))
    for window in windows:
        count_T1[window] += 1
    for rows in tracks.of_windows():
        number_of_window = tracks.window_M[rows[0]]
        prob_FL = local.prob_WFC[number_of_window].astype(np.float64) @ SPEAKERS_CL
        prob_FK = np.zeros((len(prob_FL), num_speakers))
        for number, speaker in zip(tracks.local_M[rows], speaker_M[rows]):
            np.maximum(
                prob_FK[:, speaker],
                prob_FL[:, number],
                out=prob_FK[:, speaker],
            )
        sum_TK[windows[number_of_window]] += prob_FK
    return Activity(
        sum_TK / count_T1,
        local.mean(TWO_SPEAKERS),
        first_frame=local.first_frame,
    )
