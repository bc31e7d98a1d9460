"""Regions of speech from frames, and the windows that cover them."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.diarization.windows import cut_windows, speech_regions


def test_short_pauses_are_filled_and_clicks_dropped():
    # frames of 20 ms
    voiced = np.zeros(300, dtype=bool)
    # a pause of 0.2 s
    voiced[10:60] = True
    voiced[70:100] = True
    # 0.1 s
    voiced[150:155] = True
    voiced[250:] = True
    regions = speech_regions(voiced, frame_seconds=0.02)
    expected = [(0.2, 2.0), (5.0, 6.0)]
    np.testing.assert_allclose(regions, expected)


@pytest.mark.parametrize("num_frames", [0, 50])
def test_no_speech(num_frames):
    voiced = np.zeros(num_frames, dtype=bool)
    assert speech_regions(voiced, frame_seconds=0.02) == []
    assert cut_windows([]) == []


def test_windows_cover_each_region_and_no_more():
    regions = [(10.0, 12.25), (0.5, 1.0), (20.0, 24.0)]
    windows = cut_windows(regions)
    expected = [
        (0.5, 1.0),
        (10.0, 11.5),
        (10.75, 12.25),
        (20.0, 21.5),
        (20.75, 22.25),
        (21.5, 23.0),
        (22.25, 23.75),
        (22.5, 24.0),
    ]
    np.testing.assert_allclose(windows, expected)


def test_other_lengths():
    regions = [(0.0, 5.0)]
    windows = cut_windows(regions, window_seconds=3.0, step_seconds=1.0)
    expected = [(0, 3), (1, 4), (2, 5)]
    np.testing.assert_allclose(windows, expected)
    with refuses("windows", 1, 2):
        cut_windows(regions, window_seconds=1.0, step_seconds=2.0)
    with refuses("windows", 0):
        cut_windows(regions, step_seconds=0.0)
