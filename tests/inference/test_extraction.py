"""Division of the utterances into chunks."""

import pytest

from speakerlab.inference.extraction import chunk_bounds


@pytest.mark.parametrize(
    ("seconds", "bounds"),
    [
        ([16.0] * 9, [(0, 4), (4, 8), (8, 9)]),  # a minute at least
        ([3600.0, 59.0, 1.0, 5.0], [(0, 1), (1, 3), (3, 4)]),  # an hour is a chunk by itself
        ([5.0], [(0, 1)]),
    ],
)
def test_small_data_is_cut_by_the_minute(seconds, bounds):
    assert chunk_bounds(seconds) == bounds


@pytest.mark.parametrize(("hours", "size"), [(10, 144), (1000, 1200)])
def test_large_data_is_cut_in_256_or_by_20_minutes(hours, size):
    bounds = chunk_bounds([8.0] * (hours * 450))
    assert [end for _, end in bounds[:-1]] == [first for first, _ in bounds[1:]]
    assert {(end - first) * 8 for first, end in bounds} == {size}
    assert (bounds[0][0], bounds[-1][1]) == (0, hours * 450)
