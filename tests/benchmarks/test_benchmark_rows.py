"""Rows of the benchmarks, and the peak memory of work whose size is known."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import peak
from peak import peak_memory
from rows import Row

CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux resets peaks")
def test_peak_memory_is_what_was_held_at_once_though_more_was_held_before():
    del (before := [torch.ones(40 << 20)])[:]  # 160 MiB, freed
    with peak_memory(CPU) as found:
        for _ in range(3):
            torch.ones(16 << 20)  # 64 MiB each, freed
    assert 60 <= found[0] / 2**20 < 150 and not before  # two at once, if freed memory is kept


def test_peak_memory_is_unknown_where_peaks_cannot_be_reset(monkeypatch, tmp_path):
    monkeypatch.setattr(peak, "PROC", tmp_path / "none")
    with peak_memory(CPU) as found:
        torch.ones(1 << 20)
    assert found == []


def test_a_row_in_the_table_and_in_the_file():
    known = {"share": 0.5, "peak_mib": 3.0, "note": "batch 4"}
    row = Row(name="train.x", ours=1234.5, peer=2.0, ratio=617.0, unit="utt/s", **known)
    line = "train.x 1,234 utt/s peer 2.000 ratio 617.00 50% of its convolutions' rate"
    assert " ".join(row.line().split()) == f"{line} 3 MiB batch 4"
    first = {"name": "train.x", "ours": 1234.5, "peer": 2.0, "ratio": 617.0, "unit": "utt/s"}
    assert row.to_json() == {**first, **known}
    alone = Row(name="a", ours=0.0123, unit="s").to_json()
    assert alone == {"name": "a", "ours": 0.0123, "peer": None, "ratio": None, "unit": "s"}


def test_rows_of_the_machine_are_written(tmp_path):
    script, found = Path(peak.__file__).with_name("roofline.py"), tmp_path / "rows.json"
    words = ["--device", "cpu", "--seconds", "0.1", "--rows", "machine.copy", "--json", found]
    subprocess.run([sys.executable, script, *words], check=True, capture_output=True)
    assert [row["name"] for row in json.loads(found.read_text())] == ["machine.copy"]
