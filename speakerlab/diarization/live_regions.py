"""Regions of speech that grow while it is heard. In: voiced frames, bit by bit. Out: regions.

The rule is that of `speech_regions`: a short pause is part of the speech, a short sound is none.
Letters: T frames.
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
    """Region of speech, which may go on."""

    start: float  # seconds
    end: float
    is_open: bool = True


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
        for run in runs_of_true(voiced_T) + self._num_frames:
            start, end = (self._first_seconds + run * self._frame_seconds).tolist()
            changed += self._extend(start, end)
        self._num_frames += len(voiced_T)
        now = self._first_seconds + self._num_frames * self._frame_seconds
        # A longer pause ends the region.
        region = self._region
        if region is None:
            return changed
        if now - region.end >= MIN_PAUSE_SECONDS - ROUNDING_SECONDS:
            return changed + self.close()
        return [*changed, region] if _is_speech(region) else changed

    def close(self) -> list[LiveRegion]:
        """End the open region, and return it if it is no click."""
        region = self._region
        self._region = None
        if region is None:
            return []
        region.is_open = False
        return [region] if _is_speech(region) else []

    def _extend(self, start: float, end: float) -> list[LiveRegion]:
        """Add voiced frames; return the region that ended before them."""
        region = self._region
        pause = MIN_PAUSE_SECONDS - ROUNDING_SECONDS
        if region is not None and start - region.end < pause:
            region.end = end
            return []
        closed = self.close()
        self._region = LiveRegion(start, end)
        return closed


def _is_speech(region: LiveRegion) -> bool:
    """Return whether a region is long enough for speech."""
    return region.end - region.start >= MIN_SPEECH_SECONDS - ROUNDING_SECONDS
