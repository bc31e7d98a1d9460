"""Regions of speech of a stream. In: voiced frames, some at a time. Out: regions that may grow.

The rule is that of `speech_regions`: a short pause is part of the speech, a short sound is none.
Letters: T frames, R runs of voiced frames.
"""

from dataclasses import dataclass

import numpy as np

from speakerlab.diarization.windows import (
    MIN_PAUSE_SECONDS,
    MIN_SPEECH_SECONDS,
    runs_of_true,
)

ROUNDING_SECONDS = 1e-6  # a shorter time is a difference of rounding


@dataclass
class LiveRegion:
    """Region of speech of a stream."""

    start: float  # seconds
    end: float
    is_open: bool = True  # its end may still move


class GrowingRegions:
    """Regions of speech of frames that are decided in order of time."""

    def __init__(self, *, frame_seconds: float, first_seconds: float = 0.0) -> None:
        """first_seconds: start of the first frame."""
        self._frame_seconds = frame_seconds
        self._first_seconds = first_seconds
        self._num_frames = 0
        self._region: LiveRegion | None = None

    def add(self, voiced_T: np.ndarray) -> list[LiveRegion]:
        """Add the next frames; return the regions that began or went on, in order of time.

        The last one may be open; then it is returned again, longer or closed.
        """
        changed: list[LiveRegion] = []
        frames_R2 = runs_of_true(voiced_T) + self._num_frames
        times_R2 = self._first_seconds + frames_R2 * self._frame_seconds
        for start, end in times_R2.tolist():
            changed += self._extend(start, end)
        self._num_frames += len(voiced_T)

        region = self._region
        if region is None:
            return changed
        now = self._first_seconds + self._num_frames * self._frame_seconds
        if _is_pause(now - region.end):
            changed += self.close()
        elif _is_speech(region):
            changed.append(region)
        return changed

    def close(self) -> list[LiveRegion]:
        """End the open region, and return it if it is no click."""
        region = self._region
        self._region = None
        if region is None:
            return []
        region.is_open = False
        if not _is_speech(region):
            return []
        return [region]

    def _extend(self, start: float, end: float) -> list[LiveRegion]:
        """Add a run of voiced frames; return the region that ended before it, if any."""
        region = self._region
        if region is not None and not _is_pause(start - region.end):
            region.end = end
            return []
        closed = self.close()
        self._region = LiveRegion(start, end)
        return closed


def _is_pause(seconds: float) -> bool:
    """Return whether a time without voice is long enough to end a region."""
    return seconds >= MIN_PAUSE_SECONDS - ROUNDING_SECONDS


def _is_speech(region: LiveRegion) -> bool:
    """Return whether a region is long enough for speech."""
    return region.end - region.start >= MIN_SPEECH_SECONDS - ROUNDING_SECONDS
