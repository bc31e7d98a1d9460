"""Windows in which a recording is embedded. In: regions of speech. Out: (start, end) in seconds.

Letters: T frames of the voice activity detection.
"""

from collections.abc import Iterable

import numpy as np

from speakerlab.diarization.regions import Region, merge_regions

WINDOW_SECONDS, STEP_SECONDS = 1.5, 0.75  # of 3D-Speaker and WeSpeaker
MIN_PAUSE_SECONDS = 0.3  # a shorter pause between frames with a voice is part of the speech
MIN_SPEECH_SECONDS = 0.2  # less is a click or a breath


def speech_regions(voiced_T: np.ndarray, *, frame_seconds: float) -> list[Region]:
    """Return the regions of speech, given which frames have a voice."""
    edges = np.flatnonzero(np.diff(voiced_T.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    joined = merge_regions((edges * frame_seconds).tolist(), pause=MIN_PAUSE_SECONDS)
    return [(start, end) for start, end in joined if end - start >= MIN_SPEECH_SECONDS]


def cut_windows(
    regions: Iterable[Region],
    *,
    window_seconds: float = WINDOW_SECONDS,
    step_seconds: float = STEP_SECONDS,
) -> list[Region]:
    """Return the windows of disjoint regions, in order of time.

    The last window of a region ends where the region ends, so that all are equally long; only a
    region shorter than a window is a shorter window. Raises ValueError if windows leave gaps.
    """
    if not 0 < step_seconds <= window_seconds:
        raise ValueError(
            f"windows: must be above 0 s and no shorter than their step, got {window_seconds:g} s "
            f"every {step_seconds:g} s; correct the lengths"
        )
    windows: list[Region] = []
    for start, end in sorted(regions):
        count = max(int(np.ceil((end - start - window_seconds) / step_seconds - 1e-9)), 0)
        starts = [start + index * step_seconds for index in range(count)]
        windows += [(first, first + window_seconds) for first in starts]
        windows.append((max(end - window_seconds, start), end))
    return windows
