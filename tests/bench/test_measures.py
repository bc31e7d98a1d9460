"""Timing, memory and rates: what is counted, on work whose size is known."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from speakerlab.bench import made_up, memory
from speakerlab.bench.machine import Machine, measure_machine
from speakerlab.bench.memory import PeakMemory
from speakerlab.bench.rows import Row
from speakerlab.bench.steps import measure_step
from speakerlab.bench.timing import block_seconds
from speakerlab.experiments.corpus import read_corpus

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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts anew")
def test_peak_memory_is_what_was_held_at_once_though_more_was_held_before():
    del (before := [torch.ones(40 << 20)])[:]  # 160 MiB, freed
    with PeakMemory(CPU) as peak:
        for _ in range(3):
            torch.ones(16 << 20)  # 64 MiB each, freed
    assert peak.bytes is not None and 60 <= peak.bytes / 2**20 < 100 and not before


def test_peak_memory_is_unknown_where_it_cannot_be_counted_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "PROC", tmp_path / "none")
    with PeakMemory(CPU) as peak:
        torch.ones(1 << 20)
    assert peak.bytes is None


def test_rates_of_a_machine(monkeypatch):
    monkeypatch.setattr("speakerlab.bench.machine.MATRIX", {"cpu": 128})
    monkeypatch.setattr("speakerlab.bench.machine.COPIED_BYTES", 1 << 20)
    found = measure_machine(CPU, precisions=["fp32"], seconds=0.05)
    assert isinstance(found, Machine) and found.threads == torch.get_num_threads()
    assert list(found.matmul_gflops) == ["fp32"] and 0.01 < found.matmul_gflops["fp32"] < 1e5
    assert 0.01 < found.copy_gb_per_second < 1e4
    assert found.decode_seconds_per_second["wav"] > found.decode_seconds_per_second["flac"] > 10


@pytest.mark.parametrize("train", [True, False])
def test_a_step_of_a_configuration(make_config, train):
    config = make_config("data.crop_seconds=0.5")
    found = measure_step(
        config, device=CPU, precision="fp32", micro_batch=4, train=train, seconds=0.05
    )
    assert found.utt_per_second == 4 / found.seconds and 0 < found.seconds < 10
    assert found.peak_bytes is None or found.peak_bytes > 0


def test_a_made_up_corpus_is_one_that_training_reads_and_always_the_same(
    make_config, tmp_path, monkeypatch
):
    monkeypatch.setattr(made_up, "TAKES", 1)
    monkeypatch.setattr(made_up, "SECONDS", 1.0)
    config, _ = (
        made_up.on_made_up_corpus(make_config(), tmp_path / name, micro_batch=8) for name in "ab"
    )
    corpus = read_corpus(config)
    assert len(corpus.train.ids) == len(corpus.train.speakers) == 10
    assert config.runtime.micro_batch == 8 and not len(corpus.valid)
    assert [len(noise) / made_up.RATE for noise in corpus.noise] == [5, 10, 20]
    room_S = corpus.rooms[0]
    assert np.abs(room_S).argmax() == 0 and np.abs(room_S[-80:]).max() < 0.01 * room_S[0]
    for path in sorted((tmp_path / "a/wav").iterdir()):
        assert path.read_bytes() == (tmp_path / "b/wav" / path.name).read_bytes()


def test_a_row_in_the_table_and_in_the_file():
    row = Row("train.x.fp32", 1234.5, "utt/s", gflops=60.4, share=0.5, peak_bytes=3 << 20)
    line = "train.x.fp32 1,234 utt/s 60 GFLOP/s 50% of its convolutions' 3 MiB"
    assert " ".join(row.line().split()) == line
    assert row.to_json() == {
        **{"name": "train.x.fp32", "ours": 1234.5, "peer": None, "ratio": None, "unit": "utt/s"},
        **{"gflops": 60.4, "share": 0.5, "peak_mib": 3.0},
    }
    assert Row("a", 0.0123, "s").line().split()[1] == "0.0123"
