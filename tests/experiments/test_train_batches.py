"""Data workers of a training, and the shared memory that they need."""

import logging
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusals import refused, refuses

from speakerlab.config import build
from speakerlab.core import system
from speakerlab.experiments.corpus import read_corpus, row_names
from speakerlab.experiments.train_batches import TrainBatches, check_shared_memory
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.distributed import Ranks


def test_workers_that_do_not_fit_are_left_out_or_refused(
    make_config, make_data_dir, monkeypatch, caplog
):
    """Six batches of 4 crops of 0.5 s at 1.1 of the speed, with noise: 845 kB for each worker."""
    folder: Path = make_data_dir(speakers=range(4))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2_000_000))
    settings = [
        "data.crop_seconds=0.5",
        "augment.speeds=[1.0,1.1]",
        f"data.dir={folder.parent}",
        "augment.noise_prob=0",
        "augment.room_prob=0",
        "data.valid_speakers=0",
    ]
    plan = BatchPlan(micro_batch=4, accumulation=2, world_size=1, reason="")
    ranks = Ranks(rank=0, world_size=1, local_size=1, device=torch.device("cpu"))

    def num_workers(configured: object, *, on_device: bool) -> int:
        config = make_config(*settings, f"runtime.num_workers={configured}")
        corpus = replace(read_corpus(config), noise_on_device=on_device)
        augment = build.build_augment(config)
        names = row_names(config, corpus)
        source = TrainBatches(config, corpus, names, augment, ranks, plan)
        return source.num_workers

    assert num_workers(2, on_device=False) == 2
    assert num_workers(4, on_device=True) == 4
    with refuses("runtime.num_workers", "3 for each of 1", "2 do", "--shm-size="):
        num_workers(3, on_device=False)
    with refuses("runtime.num_workers", "5 for each of 1", "4 do"):
        num_workers(5, on_device=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert num_workers("auto", on_device=True) == 0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert refused(message, "runtime.num_workers", "0 do; enlarge it", "waits")


# Micro-batches of 64 crops of 3 s, at 16 kHz, in int16: 35 MiB for a worker.
@pytest.mark.parametrize(
    ("settings", "free_mib", "expected"),
    [
        ([], 64, None),
        ([], 30, "0 do"),
        # a configured number is refused if it does not even fit with 16 crops
        (["runtime.num_workers=4"], 64, None),
        (["runtime.num_workers=8"], 64, "8 for each of 1 ranks do not fit"),
        (["runtime.num_workers=4", "runtime.micro_batch=64"], 64, "1 do"),
        (["runtime.num_workers=0"], 0, None),
    ],
)
def test_shared_memory_is_checked_before_a_training(
    make_config, monkeypatch, caplog, settings, free_mib, expected
):
    free = free_mib << 20
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(system, "available_cpus", lambda: 2)
    config = make_config(
        "data.crop_seconds=3", "training.bn_batch=64", "augment.speeds=[1.0]", *settings
    )
    refusal = refuses("runtime.num_workers", expected, "--shm-size=")
    is_refused = expected is not None and settings
    with refusal if is_refused else nullcontext():
        check_shared_memory(config, local_ranks=1, gpus=0)
    is_warning = expected is not None and not settings
    assert len(caplog.records) == is_warning
    for record in caplog.records:
        assert expected in record.getMessage()
