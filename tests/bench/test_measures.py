"""Timing of work whose length is known, and rows."""

import time

import torch

from speakerlab.bench.stopwatch import Row, block_seconds, number

CPU = torch.device("cpu")


def test_seconds_are_those_of_one_call_and_the_first_does_not_count():
    naps = iter([0.3] + [0.01] * 100)
    found = block_seconds(lambda: time.sleep(next(naps)), device=CPU, seconds=0.1)
    assert 3 <= len(found) <= 5
    assert 0.01 <= min(found) < 0.05 and sum(found) < 0.3


def test_long_work_is_done_as_often_as_it_must_be_and_no_more():
    calls = []
    found = block_seconds(
        lambda: calls.append(time.sleep(0.03)), device=CPU, seconds=0.001, least=2
    )
    assert len(found) == 2 and len(calls) == 3  # one for nothing, two blocks of one


def test_a_row_has_four_digits():
    assert Row(name="a", ours=1234.5, unit="s", note="b").line().split() == ["a", "1,234", "s", "b"]
    assert [number(value) for value in (0.0123, 0.0, None)] == ["0.01230", "0", ""]
