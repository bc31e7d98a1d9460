"""Timing of work whose length is known, and rows."""

import time

import pytest
import torch

from speakerlab.bench import machine
from speakerlab.bench.stopwatch import Row, block_seconds, number

CPU = torch.device("cpu")


def test_seconds_are_those_of_one_call_and_the_first_does_not_count():
    naps = iter([0.3] + [0.01] * 100)
    seconds_of_blocks = block_seconds(
        lambda: time.sleep(next(naps)), device=CPU, seconds=0.1
    )
    assert 3 <= len(seconds_of_blocks) <= 5
    assert 0.01 <= min(seconds_of_blocks) < 0.05
    assert sum(seconds_of_blocks) < 0.3


def test_long_work_is_done_as_often_as_it_must_be_and_no_more():
    calls = []
    seconds_of_blocks = block_seconds(
        lambda: calls.append(time.sleep(0.03)), device=CPU, seconds=0.001, least=2
    )
    # A call that warms up, then two blocks of one call each.
    assert len(seconds_of_blocks) == 2
    assert len(calls) == 3


def test_a_row_has_four_digits():
    row = Row(name="a", ours=1234.5, unit="s", note="b")
    assert row.line().split() == ["a", "1,234", "s", "b"]
    assert [number(value) for value in (0.0123, 0.0, None)] == ["0.01230", "0", ""]


@pytest.mark.parametrize(
    ("seconds_per_product", "rows"), [(0.0, 512), (0.01, 256), (10.0, 128)]
)
def test_products_of_a_slow_processor_are_smaller(
    monkeypatch, seconds_per_product, rows
):
    """Of 128 rows; a product of twice the rows takes eight times as long."""
    sizes = []

    def multiply(_a, _b, *, out):
        sizes.append(len(out))

    def seconds_of(work, _device):
        work()
        return seconds_per_product * (sizes[-1] / 128) ** 3

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(machine, "seconds_of", seconds_of)
    monkeypatch.setattr(machine, "LARGEST_MATRIX", {"cpu": 512})
    size, work = machine.largest_product(torch.bfloat16, CPU, seconds=1.0)
    work()
    assert size == sizes[-1] == rows
    assert max(sizes) == rows
