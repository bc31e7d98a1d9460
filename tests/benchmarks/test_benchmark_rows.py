"""Rows of the benchmarks, and the peak memory of work whose size is known."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import peak
from peak import peak_memory
from rows import Row, table

CPU = torch.device("cpu")


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux resets peaks"
)
def test_peak_memory_is_what_was_held_at_once_though_more_was_held_before():
    del (before := [torch.ones(40 << 20)])[:]  # 160 MiB, freed
    with peak_memory(CPU) as peak_bytes:
        for _ in range(3):
            torch.ones(16 << 20)  # 64 MiB each, freed
    assert (
        60 <= peak_bytes[0] / 2**20 < 150 and not before
    )  # two at once, if freed memory is kept


def test_peak_memory_is_unknown_where_peaks_cannot_be_reset(monkeypatch, tmp_path):
    monkeypatch.setattr(peak, "PROC", tmp_path / "none")
    with peak_memory(CPU) as peak_bytes:
        torch.ones(1 << 20)
    assert peak_bytes == []


def test_a_row_in_the_table_and_in_the_file():
    extra_fields = {"peak_mib": 3.0, "note": "batch 4"}
    row = Row(
        name="train.x", ours=1234.5, peer=2.0, ratio=617.0, unit="utt/s", **extra_fields
    )
    line = "train.x 1,234 utt/s peer 2.000 ratio 617.00"
    assert " ".join(row.line().split()) == f"{line} 3 MiB batch 4"
    first = {
        "name": "train.x",
        "ours": 1234.5,
        "peer": 2.0,
        "ratio": 617.0,
        "unit": "utt/s",
    }
    assert row.to_json() == {**first, **extra_fields}
    alone = Row(name="a", ours=0.0123, unit="s").to_json()
    assert alone == {
        "name": "a",
        "ours": 0.0123,
        "peer": None,
        "ratio": None,
        "unit": "s",
    }


def test_a_table_has_empty_cells_for_missing_values():
    compared = {
        "name": "train.x",
        "ours": 1234.5,
        "peer": 2.0,
        "ratio": 617.25,
        "quartiles": [600.0, 1630.0],
        "unit": "utt/s",
        "peak_mib": 300.0,
    }
    alone = {"name": "b", "ours": 0.0123, "peer": None, "ratio": None, "unit": "s"}
    lines = table([compared, alone]).splitlines()
    assert lines[2:] == [
        "| train.x | 1,234 | 2.000 | utt/s | **617.25** | 600.00 - 1,630 | 300.0 |  |",
        "| b | 0.01230 |  | s |  |  |  |  |",
    ]
