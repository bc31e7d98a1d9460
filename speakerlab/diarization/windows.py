"""Windows for embeddings of a recording. In: regions of speech. Out: (start, end) in seconds.

Letters: T frames of the voice activity detection, R runs of voiced frames.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from speakerlab.diarization.regions import Region, merge_regions

# As in 3D-Speaker and WeSpeaker.
WINDOW_SECONDS = 1.5
STEP_SECONDS = 0.75
# A shorter pause between voiced frames is part of the speech.
MIN_PAUSE_SECONDS = 0.3
MIN_SPEECH_SECONDS = 0.2  # a shorter sound is a click or a breath


def speech_regions(voiced_T: np.ndarray, *, frame_seconds: float) -> list[Region]:
    """Return the regions of speech, given the voiced frames."""
    times_R2 = runs_of_true(voiced_T) * frame_seconds
    # Join before dropping short regions: a word may be cut into several of them.
    joined = merge_regions(times_R2.tolist(), pause=MIN_PAUSE_SECONDS)
    regions: list[Region] = []
    for start, end in joined:
        if end - start >= MIN_SPEECH_SECONDS:
            regions.append((start, end))
    return regions


def runs_of_true(is_true_T: np.ndarray) -> NDArray[np.int64]:
    """Return (first frame, last frame + 1) of each run of True, (R, 2)."""
    # Pad with False on both ends, so that each run has both bounds.
    steps = np.diff(is_true_T.astype(np.int8), prepend=0, append=0)
    bounds = np.flatnonzero(steps)
    return bounds.reshape(-1, 2)


def cut_windows(
    regions: Iterable[Region],
    *,
    window_seconds: float = WINDOW_SECONDS,
    step_seconds: float = STEP_SECONDS,
) -> list[Region]:
    """Return the windows of disjoint regions, in order of time.

    The last window of a region ends with the region, so that all windows have the same length; a
    region shorter than a window is one shorter window. Raises ValueError if windows leave gaps.
    """
    if not 0 < step_seconds <= window_seconds:
        raise ValueError(
            "windows: must be above 0 s and no shorter than their step, got"
            f" {window_seconds:g} s every {step_seconds:g} s; correct the lengths"
        )
    windows: list[Region] = []
    for start, end in sorted(regions):
        # Full windows before the last one. 1e-9 tolerates rounding, so that a region of a whole
        # number of steps has no additional window.
        num_steps = (end - start - window_seconds) / step_seconds
        num_full = math.ceil(num_steps - 1e-9)
        for index in range(num_full):
            window_start = start + index * step_seconds
            windows.append((window_start, window_start + window_seconds))
        last_start = max(end - window_seconds, start)
        windows.append((last_start, end))
    return windows
