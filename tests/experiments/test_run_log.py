"""Start-up log of a training and the facts in run.json."""

import logging
import warnings

import pytest
import torch

from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.experiments import run_log
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import Precision, resolve_precision
from speakerlab.training.task import SpeakerTask


def make_task(config: Config) -> SpeakerTask:
    return build.build_task(
        config,
        num_classes=100,
        precision=resolve_precision("fp32", "cpu"),
        augment=build.build_augment(config),
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_warnings_come_from_one_rank(rank, tmp_path, monkeypatch):
    root = logging.RootLogger(logging.INFO)
    data = logging.Logger("data")

    # loggers of their own: the test must not change those of pytest
    def get_logger(name=None):
        return data if name else root

    monkeypatch.setattr(logging, "getLogger", get_logger)
    ranks = Ranks(
        rank=rank,
        world_size=2,
        local_size=2,
        device=torch.device("cpu"),
    )
    with warnings.catch_warnings(record=True) as caught:
        run_log.log_to(tmp_path, ranks)
        warnings.warn("from a library", stacklevel=1)
    is_first = rank == 0
    assert len(caught) == is_first
    assert root.isEnabledFor(logging.WARNING) == is_first
    assert root.isEnabledFor(logging.ERROR)
    assert data.isEnabledFor(logging.WARNING)


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
    monkeypatch,
    make_config,
    tmp_path,
    caplog,
    kind,
    world_size,
    device,
    visible,
    expected,
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    num_gpus = 2 if kind == "cuda" else 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    used = Precision("fp32", kind, "why")
    ranks = Ranks(0, world_size, 1, torch.device(kind))
    config = make_config(f"runtime.device={device}")
    with caplog.at_level(logging.INFO):
        run_log.log_device(tmp_path, config, ranks, used)
    assert caplog.messages == [f"{tmp_path}: trains on {expected}"]


@pytest.mark.parametrize("begun", ["fp32", "bf16"])
def test_a_run_that_continues_in_another_precision_says_so(
    monkeypatch, make_config, tmp_path, caplog, begun
):
    monkeypatch.setattr(run_log, "was_begun", lambda _exp: True)
    (tmp_path / "run.json").write_text(f'{{"precision": "{begun}"}}')
    ranks = Ranks(0, 1, 1, torch.device("cpu"))
    used = Precision("bf16", "cpu", "why")
    run_log.log_device(tmp_path, make_config(), ranks, used)
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING"
    ]
    assert len(lines) == (begun == "fp32")
    assert all("runtime.precision=fp32" in line for line in lines)


def test_the_start_logs_the_batch(make_config, tmp_path, caplog):
    config = make_config()
    facts = {
        "batch": "global batch 256 = ...",
        "bn_batch": 64,
        "bn_joined_ranks": 2,
        "train_speakers": 1,
        "train_utterances": 1,
        "train_hours": 1,
        "valid_speakers": 1,
        "rooms": 1,
        "noises": 1,
        "steps_per_epoch": 1,
        "classes": 3,
        "crops_dropped_per_epoch": 0,
    }
    task = make_task(config)
    with caplog.at_level(logging.INFO):
        run_log.log_start(tmp_path, config, facts, task)
    lines = [record.getMessage() for record in caplog.records]
    batch = "global batch 256 = ...; BatchNorm sees 64 crops of 2 ranks at once"
    assert lines[0] == batch
    assert lines[2].startswith("3 classes: speeds make new speakers")
    assert (tmp_path / "run.json").exists()

    # a training that ends before the margin has its final value
    short = make_config("training.num_epochs=3", "training.margin.end_epoch=6")
    task = make_task(short)
    run_log.log_start(tmp_path, short, facts, task)
    assert "num_epochs: 3" in caplog.text
    assert "margin.end_epoch (6)" in caplog.text
