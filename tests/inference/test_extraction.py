"""Division of the utterances into chunks."""

import pytest

from speakerlab.inference.extraction import chunk_bounds


@pytest.mark.parametrize(
    ("seconds", "bounds"),
    [
        # A chunk is a minute at least.
        ([16.0] * 9, [(0, 4), (4, 8), (8, 9)]),
        # An hour is a chunk by itself.
        ([3600.0, 59.0, 1.0, 5.0], [(0, 1), (1, 3), (3, 4)]),
        ([5.0], [(0, 1)]),
    ],
)
def test_small_data_is_cut_by_the_minute(seconds, bounds):
    assert chunk_bounds(seconds) == bounds


@pytest.mark.parametrize(("hours", "size"), [(10, 144), (1000, 1200)])
def test_large_data_is_cut_in_256_or_by_20_minutes(hours, size):
    num_utterances = hours * 450
    bounds = chunk_bounds(num_utterances * [8.0])
    next_first = 0
    for first, end in bounds:
        assert first == next_first
        assert (end - first) * 8 == size
        next_first = end
    assert next_first == num_utterances
