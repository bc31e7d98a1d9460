"""Regions of speech by energy, found while the samples come.

A frame is decided once, 0.1 s after it was heard, with the rule of `find_speech` for the levels of
the last ten minutes instead of those of the whole recording.
Letters: S samples, T frames.
"""

from dataclasses import dataclass

import numpy as np

from speakerlab.data import levels
from speakerlab.diarization.windows import (
    MIN_PAUSE_SECONDS,
    MIN_SPEECH_SECONDS,
    runs_of_true,
)
from speakerlab.inference.speech import energy_detector, is_other_sound

LEVEL_SECONDS = 600  # of the levels that the threshold follows from
MEASURED_SECONDS = 1.0  # from one measurement of these levels to the next
SOUND_SECONDS = 10  # in which noise or a tone alone is no speech


@dataclass
class LiveRegion:
    """Region of speech, which may go on."""

    start: float  # seconds
    end: float
    is_open: bool = True


class LiveSpeech:
    """Regions of speech of samples that come in blocks, int16."""

    def __init__(self, sample_rate: int) -> None:
        self._rate = sample_rate
        self._detector = energy_detector(sample_rate)
        self._frame_seconds = self._detector.frame_samples / sample_rate
        self._rest_S = np.zeros(0, dtype=np.int16)  # fewer than a frame
        self._sound_S = np.zeros(0, dtype=np.int16)  # the last SOUND_SECONDS
        self._level_T = np.zeros(0)  # the last LEVEL_SECONDS
        self._num_undecided = 0  # of these frames, the last ones
        self._num_decided = 0  # since the start
        self._next_measured = 0  # number of frames heard
        self._threshold = 0.0  # in dB of full scale
        self._is_other_sound = False
        self._region: LiveRegion | None = None

    def push(self, wave_S: np.ndarray) -> list[LiveRegion]:
        """Hear a block; return the regions that began or went on in it, in order of time.

        The last one may be open; then it is returned again, longer or closed.
        """
        self._hear(wave_S)
        # From less, it cannot be decided whether the sound is noise.
        if len(self._sound_S) < levels.MIN_SECONDS * self._rate:
            return []
        # A frame is decided by those around it, so the last ones wait for the next block.
        return self._decide(self._detector.context_frames)

    def finish(self) -> list[LiveRegion]:
        """Return the last regions, closed."""
        regions = self._decide(0)
        return regions + self._close()

    def _hear(self, wave_S: np.ndarray) -> None:
        """Add the levels of a block."""
        sound_S = np.concatenate([self._sound_S, wave_S])
        self._sound_S = sound_S[-SOUND_SECONDS * self._rate :]
        wave_S = np.concatenate([self._rest_S, wave_S])
        level_T = self._detector.levels_dbfs(wave_S)
        num_framed = len(level_T) * self._detector.frame_samples
        self._rest_S = wave_S[num_framed:]
        self._num_undecided += len(level_T)
        level_T = np.concatenate([self._level_T, level_T])
        num_kept = round(LEVEL_SECONDS / self._frame_seconds)
        self._level_T = level_T[-num_kept:]

    def _decide(self, num_waiting: int) -> list[LiveRegion]:
        """Decide all frames but the last ones; return the regions that they change."""
        num_new = self._num_undecided - num_waiting
        if num_new <= 0:
            return []
        context = self._detector.context_frames
        # With the frames before them, which count, too.
        recent_T = self._level_T[-(self._num_undecided + context) :]
        self._measure()
        loud_T = recent_T >= self._threshold
        voiced_T = self._detector.keep_around(loud_T)
        first = len(voiced_T) - self._num_undecided
        voiced_T = voiced_T[first : first + num_new]
        # By its energy, noise would be speech.
        if self._is_other_sound:
            voiced_T = np.zeros(num_new, dtype=np.bool_)

        changed: list[LiveRegion] = []
        for run in runs_of_true(voiced_T) + self._num_decided:
            start, end = (run * self._frame_seconds).tolist()
            changed += self._extend(start, end)
        self._num_decided += num_new
        self._num_undecided = num_waiting
        # A longer pause ends the region.
        now = self._num_decided * self._frame_seconds
        region = self._region
        if region is not None and now - region.end >= MIN_PAUSE_SECONDS - 1e-6:
            changed += self._close()
        elif region is not None and _is_speech(region):
            changed.append(region)
        return changed

    def _measure(self) -> None:
        """Measure the sound so far, once a second; of noise, each time, as speech may follow."""
        now = self._num_decided + self._num_undecided
        if now < self._next_measured and not self._is_other_sound:
            return
        self._next_measured = now + round(MEASURED_SECONDS / self._frame_seconds)
        self._threshold = self._detector.threshold_dbfs(self._level_T)
        self._is_other_sound = is_other_sound(self._sound_S, sample_rate=self._rate)

    def _extend(self, start: float, end: float) -> list[LiveRegion]:
        """Add voiced frames; return the region that ended before them."""
        region = self._region
        if region is not None and start - region.end < MIN_PAUSE_SECONDS - 1e-6:
            region.end = end
            return []
        closed = self._close()
        self._region = LiveRegion(start, end)
        return closed

    def _close(self) -> list[LiveRegion]:
        """End the open region, and return it if it is no click."""
        region = self._region
        self._region = None
        if region is None:
            return []
        region.is_open = False
        return [region] if _is_speech(region) else []


def _is_speech(region: LiveRegion) -> bool:
    """Return whether a region is long enough for speech."""
    return region.end - region.start >= MIN_SPEECH_SECONDS - 1e-6
