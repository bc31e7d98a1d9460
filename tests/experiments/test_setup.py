"""Batch plan, start-up log and facts of a training."""

import logging
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refuses

from speakerlab.config import build
from speakerlab.config.schema import Config, load_config
from speakerlab.experiments import setup as setup_training
from speakerlab.experiments.corpus import read_corpus, row_names
from speakerlab.experiments.planning import plan_batch
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import Precision, resolve_precision
from speakerlab.training.task import SpeakerTask

ROOT = Path(__file__).parents[2]
GIB = 2**30


def one_rank(kind: str) -> Ranks:
    return Ranks(rank=0, world_size=1, local_size=1, device=torch.device(kind))


def make_task(config: Config, noises=(), num_classes=100) -> SpeakerTask:
    precision = resolve_precision("fp32", "cpu")
    augment = build.build_augment(config, noises=noises)
    return build.build_task(config, num_classes=num_classes, precision=precision, augment=augment)


def test_the_plan_of_a_small_gpu_accumulates_to_256(monkeypatch):
    """Only the free memory of the GPU is simulated: the plan is made on the CPU."""
    config, ranks = load_config([ROOT / "conf/eres2net.yaml"]), one_rank("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (8.75 * GIB, 8.75 * GIB))
    plan = plan_batch(config, ranks, make_task(config))
    assert (plan.micro_batch, plan.accumulation, plan.bn_batch) == (16, 16, 16)
    assert plan.reason == "auto: memory allows 26"
    # A quarter of a GiB of noise will be on the card too.
    task = make_task(config, noises=[np.zeros(GIB // 8, dtype=np.int16)])
    assert plan_batch(config, ranks, task).reason == "auto: memory allows 25"


def test_the_plan_of_a_host_and_after_it_ran_out_of_memory(make_config):
    config, ranks = make_config("training.global_batch=64"), one_rank("cpu")
    task = make_task(config)
    assert plan_batch(config, ranks, task).micro_batch == 64
    plan = plan_batch(config, ranks, task, below=64)
    assert (plan.micro_batch, plan.accumulation) == (32, 2)
    assert plan.reason == "64 ran out of memory"


@pytest.mark.parametrize("rank", [0, 1])
def test_warnings_come_from_one_rank(rank, tmp_path, monkeypatch):
    root, data = logging.RootLogger(logging.INFO), logging.Logger("data")
    monkeypatch.setattr(logging, "getLogger", lambda name=None: data if name else root)
    ranks = Ranks(rank=rank, world_size=2, local_size=2, device=torch.device("cpu"))
    with warnings.catch_warnings(record=True) as found:
        setup_training.log_to(tmp_path, ranks)
        warnings.warn("from a library", stacklevel=1)
    assert len(found) == root.isEnabledFor(logging.WARNING) == (rank == 0)
    assert root.isEnabledFor(logging.ERROR) and data.isEnabledFor(logging.WARNING)


@pytest.mark.parametrize(
    ("kind", "world_size", "device", "visible", "expected"),
    [
        ("cpu", 1, "auto", None, "the CPU: no GPU found; fp32 (why)"),
        ("cpu", 1, "auto", "-1", "the CPU: CUDA_VISIBLE_DEVICES=-1; fp32 (why)"),
        ("cpu", 1, "cpu", None, "the CPU: runtime.device: cpu; fp32 (why)"),
        ("cuda", 1, "auto", None, "a GPU: 2 GPUs found (H100); fp32 (why)"),
        ("cuda", 2, "auto", None, "GPUs: 2 GPUs found (H100); fp32 (why)"),
    ],
)
def test_the_start_logs_the_device_first(
    monkeypatch, make_config, tmp_path, caplog, kind, world_size, device, visible, expected
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * (kind == "cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    used = Precision("fp32", kind, "why")
    ranks = Ranks(0, world_size, 1, torch.device(kind))
    config = make_config(f"runtime.device={device}")
    with caplog.at_level(logging.INFO):
        setup_training.log_device(tmp_path, config, ranks, used)
    assert caplog.messages == [f"{tmp_path}: trains on {expected}"]


@pytest.mark.parametrize("begun", ["fp32", "bf16"])
def test_a_run_that_continues_in_another_precision_says_so(
    monkeypatch, make_config, tmp_path, caplog, begun
):
    monkeypatch.setattr(setup_training, "was_begun", lambda _exp: True)
    (tmp_path / "run.json").write_text(f'{{"precision": "{begun}"}}')
    ranks, used = Ranks(0, 1, 1, torch.device("cpu")), Precision("bf16", "cpu", "why")
    setup_training.log_device(tmp_path, make_config(), ranks, used)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == (begun == "fp32")
    assert all("runtime.precision=fp32" in line for line in lines)


def test_the_start_logs_the_batch(make_config, tmp_path, caplog):
    config = make_config()
    known = {
        "batch": "global batch 256 = ...",
        "bn_batch": 64,
        "bn_joined_ranks": 2,
        **dict.fromkeys(("train_speakers", "train_utterances", "train_hours"), 1),
        **dict.fromkeys(("valid_speakers", "rooms", "noises", "steps_per_epoch"), 1),
        "classes": 3,
        "crops_dropped_per_epoch": 0,
    }
    with caplog.at_level(logging.INFO):
        setup_training.log_start(tmp_path, config, known, make_task(config))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "global batch 256 = ...; BatchNorm sees 64 crops of 2 ranks at once"
    assert lines[2].startswith("3 classes: speeds make new speakers")
    assert (tmp_path / "run.json").exists()
    short = make_config("training.num_epochs=3", "training.margin.end_epoch=6")
    setup_training.log_start(tmp_path, short, known, make_task(short))
    assert "num_epochs: 3" in caplog.text and "margin.end_epoch (6)" in caplog.text


def test_workers_that_do_not_fit_are_left_out_or_refused(
    make_config, make_data_dir, monkeypatch, caplog
):
    """Six batches of 4 crops of 0.5 s at 1.1 of the speed, with noise: 845 kB for each worker."""
    folder: Path = make_data_dir(speakers=range(4))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2_000_000))
    settings = ["data.crop_seconds=0.5", "augment.speeds=[1.0,1.1]", f"data.dir={folder.parent}"]
    settings += ["augment.noise_prob=0", "augment.room_prob=0", "data.valid_speakers=0"]
    plan, ranks = BatchPlan(4, 2, 1, ""), one_rank("cpu")

    def num_workers(asked: object, *, on_device: bool) -> int:
        config = make_config(*settings, f"runtime.num_workers={asked}")
        corpus = replace(read_corpus(config), noise_on_device=on_device)
        augment = build.build_augment(config)
        names = row_names(config, corpus)
        return setup_training.TrainBatches(config, corpus, names, augment, ranks, plan).num_workers

    assert num_workers(2, on_device=False) == 2 and num_workers(4, on_device=True) == 4
    with refuses("runtime.num_workers", "3 for each of 1", "2 do", "--shm-size="):
        num_workers(3, on_device=False)
    with refuses("runtime.num_workers", "5 for each of 1", "4 do"):
        num_workers(5, on_device=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with caplog.at_level(logging.INFO):
        assert num_workers("auto", on_device=True) == 0
    assert "runtime.num_workers: " in caplog.text and "0 do; enlarge it" in caplog.text
