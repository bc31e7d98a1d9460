"""Regions of speech from frames, and the windows that cover them."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.diarization.windows import cut_windows, speech_regions


def test_short_pauses_are_filled_and_clicks_dropped():
    voiced = np.zeros(300, dtype=bool)  # frames of 20 ms
    voiced[10:60] = voiced[70:100] = True  # a pause of 0.2 s
    voiced[150:155] = True  # 0.1 s
    voiced[250:] = True
    found = speech_regions(voiced, frame_seconds=0.02)
    np.testing.assert_allclose(found, [(0.2, 2.0), (5.0, 6.0)])


@pytest.mark.parametrize("voiced", [np.zeros(0, dtype=bool), np.zeros(50, dtype=bool)])
def test_no_speech(voiced):
    assert speech_regions(voiced, frame_seconds=0.02) == []
    assert cut_windows([]) == []


def test_windows_cover_each_region_and_no_more():
    windows = cut_windows([(10.0, 12.25), (0.5, 1.0), (20.0, 24.0)])
    wanted = [
        (0.5, 1.0),
        *[(10.0, 11.5), (10.75, 12.25)],
        *[(20.0, 21.5), (20.75, 22.25), (21.5, 23.0), (22.25, 23.75), (22.5, 24.0)],
    ]
    np.testing.assert_allclose(windows, wanted)


def test_other_lengths():
    windows = cut_windows([(0.0, 5.0)], window_seconds=3.0, step_seconds=1.0)
    np.testing.assert_allclose(windows, [(0, 3), (1, 4), (2, 5)])
    with refuses("windows", 1, 2):
        cut_windows([(0.0, 5.0)], window_seconds=1.0, step_seconds=2.0)
    with refuses("windows", 0):
        cut_windows([(0.0, 5.0)], step_seconds=0.0)
