"""Timing, memory and rates, on work whose size is known; rows and synthetic recordings."""

import time
from pathlib import Path

import pytest
import torch

from speakerlab.bench import stopwatch
from speakerlab.bench.rows import Row, number
from speakerlab.bench.stopwatch import block_seconds, peak_memory

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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux resets peaks")
def test_peak_memory_is_what_was_held_at_once_though_more_was_held_before():
    del (before := [torch.ones(40 << 20)])[:]  # 160 MiB, freed
    with peak_memory(CPU) as peak:
        for _ in range(3):
            torch.ones(16 << 20)  # 64 MiB each, freed
    assert 60 <= peak[0] / 2**20 < 100 and not before


def test_peak_memory_is_unknown_where_peaks_cannot_be_reset(monkeypatch, tmp_path):
    monkeypatch.setattr(stopwatch, "PROC", tmp_path / "none")
    with peak_memory(CPU) as peak:
        torch.ones(1 << 20)
    assert peak == []


def test_a_row_in_the_table_and_in_the_file():
    known = {"gflops": 60.4, "share": 0.5, "peak_mib": 3.0, "note": "batch 4"}
    row = Row(name="train.x", ours=1234.5, peer=2.0, ratio=617.0, unit="utt/s", **known)
    line = "train.x 1,234 utt/s peer 2.000 ratio 617.00 60 GFLOP/s 50% of its convolutions' rate"
    assert " ".join(row.line().split()) == f"{line} 3 MiB batch 4"
    first = {"name": "train.x", "ours": 1234.5, "peer": 2.0, "ratio": 617.0, "unit": "utt/s"}
    assert row.to_json() == {**first, **known}
    alone = Row(name="a", ours=0.0123, unit="s").to_json()
    assert alone == {"name": "a", "ours": 0.0123, "peer": None, "ratio": None, "unit": "s"}
    assert [number(value) for value in (0.0123, 0.0, None)] == ["0.01230", "0", ""]
