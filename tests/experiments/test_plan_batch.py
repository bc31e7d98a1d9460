"""Micro-batches chosen from the memory of a GPU or a host."""

from pathlib import Path

import numpy as np
import torch
from refusals import refuses

from speakerlab.config import build
from speakerlab.config.schema import Config, load_config
from speakerlab.experiments.planning import plan_batch
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import resolve_precision
from speakerlab.training.task import SpeakerTask

ROOT = Path(__file__).parents[2]
GIB = 2**30


def one_rank(kind: str) -> Ranks:
    device = torch.device(kind)
    return Ranks(rank=0, world_size=1, local_size=1, device=device)


def make_task(config: Config, noises=()) -> SpeakerTask:
    precision = resolve_precision("fp32", "cpu")
    augment = build.build_augment(config, noises=noises)
    return build.build_task(
        config, num_classes=100, precision=precision, augment=augment
    )


def test_the_plan_of_a_small_gpu_accumulates_to_256(monkeypatch):
    """Only the free memory of the GPU is simulated: the plan is made on the CPU."""
    config = load_config([ROOT / "conf/eres2net.yaml"])
    ranks = one_rank("cuda")
    # free and total bytes
    memory = (8.75 * GIB, 8.75 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: memory)
    plan = plan_batch(config, ranks, make_task(config))
    assert plan.micro_batch == 16
    assert plan.accumulation == 16
    assert plan.bn_batch == 16
    assert plan.reason == "auto: memory allows 26"

    # A quarter of a GiB of noise will be on the card too.
    noise_S = np.zeros(GIB // 8, dtype=np.int16)
    task = make_task(config, noises=[noise_S])
    plan = plan_batch(config, ranks, task)
    assert plan.reason == "auto: memory allows 25"


def test_the_plan_of_a_host_and_after_it_ran_out_of_memory(make_config):
    config = make_config("training.global_batch=64")
    ranks = one_rank("cpu")
    task = make_task(config)
    plan = plan_batch(config, ranks, task)
    assert plan.micro_batch == 64

    plan = plan_batch(config, ranks, task, below=64)
    assert plan.micro_batch == 32
    assert plan.accumulation == 2
    assert plan.reason == "64 ran out of memory"


def test_a_single_crop_is_refused_before_the_training(make_config):
    config = make_config("training.global_batch=64", "runtime.micro_batch=1")
    with refuses("runtime.micro_batch", 1, "BatchNorm of campplus", "use 2"):
        plan_batch(config, one_rank("cpu"), make_task(config))
