"""Batch plan, start-up log and facts of a training."""

import logging
from pathlib import Path

import numpy as np
import torch

from speakerlab.config import build
from speakerlab.config.schema import Config, load_config
from speakerlab.experiments import setup as setup_training
from speakerlab.experiments.planning import plan_batch
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import resolve_precision
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
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10.75 * GIB, 10.75 * GIB))
    plan = plan_batch(config, ranks, make_task(config))
    assert (plan.micro_batch, plan.accumulation, plan.bn_batch) == (16, 16, 16)
    assert plan.reason == "auto: memory allows 25"
    # A quarter of a GiB of noise will be on the card too.
    task = make_task(config, noises=[np.zeros(GIB // 8, dtype=np.int16)])
    assert plan_batch(config, ranks, task).reason == "auto: memory allows 24"


def test_the_plan_of_a_host_and_after_it_ran_out_of_memory(make_config):
    config, ranks = make_config("training.global_batch=64"), one_rank("cpu")
    task = make_task(config)
    assert plan_batch(config, ranks, task).micro_batch == 64
    plan = plan_batch(config, ranks, task, below=64)
    assert (plan.micro_batch, plan.accumulation) == (32, 2)
    assert plan.reason == "64 ran out of memory"


def test_the_start_logs_precision_card_and_batch(make_config, tmp_path, caplog):
    config = make_config()
    known = {
        "precision": "bf16",
        "precision_reason": "auto: capability 8.0 has bf16",
        "precision_remarks": ["ranks have different GPUs, ..."],
        "device": "cuda:1",
        "gpu": "NVIDIA A100-SXM4-80GB",
        "capability": [8, 0],
        "batch": "global batch 256 = ...",
        "bn_batch": 64,
        "bn_joined_ranks": 2,
        **dict.fromkeys(("train_speakers", "train_utterances", "train_hours"), 1),
        **dict.fromkeys(("valid_speakers", "rooms", "noises", "steps_per_epoch"), 1),
        "crops_dropped_per_epoch": 0,
    }
    with caplog.at_level(logging.INFO):
        setup_training.log_start(tmp_path, config, known, make_task(config))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:3] == [
        f"{tmp_path}: bf16 on cuda:1, NVIDIA A100-SXM4-80GB, capability 8.0 "
        "(auto: capability 8.0 has bf16)",
        "ranks have different GPUs, ...",
        "global batch 256 = ...; BatchNorm sees 64 crops of 2 ranks at once",
    ]
    assert (tmp_path / "run.json").exists()
