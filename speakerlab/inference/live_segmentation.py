"""Regions of speech and local speakers by a segmentation model, found while the samples come.

Every half second, or more rarely at a long latency, the model hears the last 10 s. The first window
with a frame decides whether it is speech, so that embeddings can be cut at once. Who speaks in it
is decided at the end of the latency, by the mean of all windows that have heard it by then.
Letters: S samples, W windows, F frames of a window, C classes.
"""

import math

import numpy as np

from speakerlab.data.convert import ChunkReader
from speakerlab.diarization.live_regions import GrowingRegions, LiveRegion
from speakerlab.diarization.local_speakers import (
    ANY_SPEECH,
    FIRST_SECONDS,
    FRAME_SECONDS,
    HOP_SAMPLES,
    MIN_PROB,
    SAMPLE_RATE,
    LocalSpeakers,
)
from speakerlab.diarization.windows import MIN_PAUSE_SECONDS
from speakerlab.inference.segmentation import (
    STEP_FRAMES,
    WINDOW_FRAMES,
    WINDOW_SAMPLES,
    Segmentation,
)

WINDOW_SECONDS = WINDOW_SAMPLES / SAMPLE_RATE
# Between windows. Of 12 conversations of the development set, at a latency of 2 s, the DER is
# 27.7 % with 0.5 s, and 29 % with 1 s.
MIN_HOP_SECONDS = 0.5
MAX_HOP_SECONDS = STEP_FRAMES * FRAME_SECONDS  # as in recordings
HOPS_PER_LATENCY = 4
# From the last frame of a window to its end, and a frame of rounding.
END_SECONDS = WINDOW_SECONDS - (WINDOW_FRAMES - 1) * FRAME_SECONDS - FIRST_SECONDS


class LiveSegmentation:
    """Regions of speech, and local speakers, of samples that come in blocks, int16."""

    def __init__(
        self,
        segmentation: Segmentation,
        *,
        sample_rate: int,
        block_seconds: float,
        latency: float,
    ) -> None:
        """sample_rate: of the blocks, which all but the last have block_seconds."""
        self._segmentation = segmentation
        self._reader = ChunkReader(sample_rate=SAMPLE_RATE, source_rate=sample_rate)
        hop_seconds = min(latency / HOPS_PER_LATENCY, MAX_HOP_SECONDS)
        hop_seconds = max(hop_seconds, MIN_HOP_SECONDS)
        self._hop_blocks = math.floor(hop_seconds / block_seconds)
        self._num_blocks = 0
        self._num_samples = 0  # heard, at SAMPLE_RATE
        # The last samples, which the next window may contain. Before the stream, there was silence.
        self._wave_S = np.zeros(WINDOW_SAMPLES + HOP_SAMPLES, dtype=np.int16)
        self._windows: list[LocalSpeakers] = []  # each of a single window
        self._num_decided = 0  # frames
        self._regions = GrowingRegions(
            frame_seconds=FRAME_SECONDS,
            first_seconds=FIRST_SECONDS,
        )
        # A pause ends a region, and may be heard by the next window only.
        self.decision_seconds = (
            self._hop_blocks * block_seconds
            + END_SECONDS
            + MIN_PAUSE_SECONDS
            + self._reader.delay_seconds
        )
        # Local speakers of a window have the voices of this time before its last frame.
        self.context_seconds = WINDOW_SECONDS

    def push(self, wave_S: np.ndarray) -> list[LiveRegion]:
        """Hear a block; return the regions that began or grew in it, in order of time.

        The last one may be open; then it is returned again, longer or closed.
        """
        self._hear(self._reader.read(wave_S))
        self._num_blocks += 1
        if self._num_blocks % self._hop_blocks:
            return []
        # The last window that is complete; before 10 s were heard, its start is negative.
        samples_after_first = self._num_samples - WINDOW_SAMPLES
        return self._run(samples_after_first // HOP_SAMPLES)

    def finish(self) -> list[LiveRegion]:
        """Return the last regions, closed."""
        self._hear(self._reader.finish())
        # The first window that contains the end; zeros fill it up.
        samples_after_first = self._num_samples - WINDOW_SAMPLES
        start_frame = math.ceil(samples_after_first / HOP_SAMPLES)
        regions = self._run(start_frame)
        return regions + self._regions.close()

    def local(self, start: float, end: float) -> LocalSpeakers | None:
        """Return the windows that share time with `start` to `end` in seconds."""
        overlapping: list[LocalSpeakers] = []
        for window in self._windows:
            window_start = _time_of(window.first_frame)
            window_end = _time_of(window.first_frame + WINDOW_FRAMES)
            if window_start < end and window_end > start:
                overlapping.append(window)
        if not overlapping:
            return None
        return LocalSpeakers(
            np.concatenate([window.prob_WFC for window in overlapping]),
            np.concatenate([window.start_W for window in overlapping]),
        )

    def forget(self, time: float) -> None:
        """Forget the windows that end before a time, in seconds."""
        later_windows: list[LocalSpeakers] = []
        for window in self._windows:
            window_end = _time_of(window.first_frame + WINDOW_FRAMES)
            if window_end > time:
                later_windows.append(window)
        self._windows = later_windows

    @property
    def newest(self) -> LocalSpeakers | None:
        """Return the last window, None before the first one."""
        return self._windows[-1] if self._windows else None

    def _hear(self, wave_S: np.ndarray) -> None:
        """Add samples at SAMPLE_RATE."""
        self._num_samples += len(wave_S)
        max_samples = WINDOW_SAMPLES + HOP_SAMPLES
        heard_S = np.concatenate([self._wave_S, wave_S])
        self._wave_S = heard_S[-max_samples:]

    def _run(self, start_frame: int) -> list[LiveRegion]:
        """Run the model on the window that starts with a frame; decide up to its last frame."""
        # From a place in the stream to one in the samples that are kept.
        num_forgotten = self._num_samples - len(self._wave_S)
        first = start_frame * HOP_SAMPLES - num_forgotten
        window_S = self._wave_S[first : first + WINDOW_SAMPLES]
        (prob_FC,) = self._segmentation.probabilities([window_S])
        # float16, as of recordings.
        prob_1FC = prob_FC[None].astype(np.float16)
        window = LocalSpeakers(prob_1FC, np.array([start_frame]))
        self._windows.append(window)

        voiced_F = window.mean(ANY_SPEECH) >= MIN_PROB
        # The frames before were decided by earlier windows.
        end_frame = start_frame + WINDOW_FRAMES
        num_new = max(end_frame - self._num_decided, 0)
        self._num_decided += num_new
        first_new = WINDOW_FRAMES - num_new
        return self._regions.add(voiced_F[first_new:])


def _time_of(frame: int) -> float:
    """Return the start of a frame, in seconds."""
    return FIRST_SECONDS + frame * FRAME_SECONDS
