"""Regions of speech by energy, found while the samples come.

A frame is decided once, 0.1 s after it was heard, with the rule of `find_speech` for the levels of
the last ten minutes instead of those of the whole recording.
Letters: S samples, T frames.
"""

import numpy as np

from speakerlab.data import levels
from speakerlab.diarization.live_regions import GrowingRegions, LiveRegion
from speakerlab.diarization.local_speakers import LocalSpeakers
from speakerlab.inference.speech import energy_detector, is_other_sound

LEVEL_SECONDS = 600  # of the levels that the threshold follows from
MEASURED_SECONDS = 1.0  # from one measurement of these levels to the next
SOUND_SECONDS = 10  # in which noise or a tone alone is no speech


class LiveSpeech:
    """Regions of speech of samples that come in blocks, int16."""

    # After this time, it is known whether a frame is speech: a block, the frames around, and the
    # shortest pause that ends a region.
    decision_seconds = 0.7
    context_seconds = 0.0
    newest: LocalSpeakers | None = None  # energy says nothing about speakers

    def __init__(self, sample_rate: int) -> None:
        self._rate = sample_rate
        self._detector = energy_detector(sample_rate)
        self._frame_seconds = self._detector.frame_samples / sample_rate
        self._rest_S = np.zeros(0, dtype=np.int16)  # fewer than a frame
        self._sound_S = np.zeros(0, dtype=np.int16)  # the last SOUND_SECONDS
        self._level_T = np.zeros(0)  # the last LEVEL_SECONDS
        self._num_undecided = 0  # the last of these frames
        self._num_decided = 0  # all frames before, since the start
        self._regions = GrowingRegions(frame_seconds=self._frame_seconds)
        self._next_measured = 0  # after so many frames, the sound is measured again
        self._threshold = 0.0  # in dB of full scale
        self._is_other_sound = False

    def push(self, wave_S: np.ndarray) -> list[LiveRegion]:
        """Hear a block; return the regions that began or grew in it, in order of time.

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
        return regions + self._regions.close()

    def local(self, start: float, end: float) -> LocalSpeakers | None:
        """Return no local speakers."""
        return None

    def forget(self, time: float) -> None:
        """Do nothing: nothing is kept for the end of the latency."""

    def _hear(self, wave_S: np.ndarray) -> None:
        """Add the levels of a block."""
        sound_samples = SOUND_SECONDS * self._rate
        sound_S = np.concatenate([self._sound_S, wave_S])
        self._sound_S = sound_S[-sound_samples:]

        # Only whole frames have a level; the other samples wait for the next block.
        waiting_S = np.concatenate([self._rest_S, wave_S])
        new_level_T = self._detector.levels_dbfs(waiting_S)
        num_framed = len(new_level_T) * self._detector.frame_samples
        self._rest_S = waiting_S[num_framed:]
        self._num_undecided += len(new_level_T)

        level_T = np.concatenate([self._level_T, new_level_T])
        max_levels = round(LEVEL_SECONDS / self._frame_seconds)
        self._level_T = level_T[-max_levels:]

    def _decide(self, num_waiting: int) -> list[LiveRegion]:
        """Decide all frames but the last ones; return the regions that they change.

        num_waiting: number of the last ones. For example, of 12 frames that are undecided, 5 wait
        and 7 are decided now, by their levels and those of 5 frames on both sides.
        """
        num_new = self._num_undecided - num_waiting
        if num_new <= 0:
            return []
        # With the frames before them, which count, too.
        num_recent = self._num_undecided + self._detector.context_frames
        recent_T = self._level_T[-num_recent:]
        self._measure()
        loud_T = recent_T >= self._threshold
        voiced_T = self._detector.keep_around(loud_T)
        first_new = len(voiced_T) - self._num_undecided
        voiced_T = voiced_T[first_new : first_new + num_new]
        # By its energy, noise would be speech.
        if self._is_other_sound:
            voiced_T = np.zeros(num_new, dtype=np.bool_)
        self._num_decided += num_new
        self._num_undecided = num_waiting
        return self._regions.add(voiced_T)

    def _measure(self) -> None:
        """Measure the sound so far, once a second; of noise, each time, as speech may follow."""
        num_heard = self._num_decided + self._num_undecided
        if num_heard < self._next_measured and not self._is_other_sound:
            return
        frames_between = round(MEASURED_SECONDS / self._frame_seconds)
        self._next_measured = num_heard + frames_between
        self._threshold = self._detector.threshold_dbfs(self._level_T)
        self._is_other_sound = is_other_sound(self._sound_S, sample_rate=self._rate)
