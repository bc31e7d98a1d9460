"""The sets of local speakers that a segmentation network distinguishes, frame by frame.

Numbered as in pyannote/segmentation-3.0: nobody, each of three speakers alone, each pair.
Letters: C sets of speakers ("classes"), L local speakers.
"""

from itertools import combinations

import numpy as np

MAX_SPEAKERS = 3  # in a window
MAX_AT_ONCE = 2  # in a frame
UNKNOWN = -1  # in place of 0 or 1: nothing is known about a frame


def speaker_sets(max_speakers: int, max_at_once: int) -> np.ndarray:
    """Return is_CL, float32: 1 where a speaker is in a set; smaller sets come first."""
    sets: list[tuple[int, ...]] = []
    for size in range(max_at_once + 1):
        sets += combinations(range(max_speakers), size)
    is_CL = np.zeros((len(sets), max_speakers), dtype=np.float32)
    for row, members in enumerate(sets):
        is_CL[row, list(members)] = 1
    return is_CL


NUM_SETS = len(speaker_sets(MAX_SPEAKERS, MAX_AT_ONCE))
