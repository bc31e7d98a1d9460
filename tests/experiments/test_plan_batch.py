"""Micro-batch and place of the noise, chosen from the memory of a GPU or a host."""

from pathlib import Path

import pytest
import torch
from refusals import refuses

from speakerlab.config.schema import load_config
from speakerlab.experiments.planning import BankBytes, plan_device
from speakerlab.training import batch_size
from speakerlab.training.distributed import Ranks

ROOT = Path(__file__).parents[2]
GIB = 2**30
FP32 = {"num_classes": 100, "precision": "fp32"}


def one_rank(kind: str) -> Ranks:
    device = torch.device(kind)
    return Ranks(rank=0, world_size=1, local_size=1, device=device)


class BesideSmaller(Ranks):
    """Rank beside another one with half of its memory."""

    def gather_objects(self, value):
        return [value, value / 2]


@pytest.fixture
def gpu(monkeypatch):
    """gpu(GB) simulates only the free memory of a GPU: the plan is made on the CPU."""

    def simulate(free_gb: float) -> None:
        memory = (free_gb * GIB, 11 * GIB)  # free and total
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: memory)

    return simulate


def test_the_plan_of_a_small_gpu_accumulates_to_256(gpu, caplog):
    caplog.set_level("INFO")
    config = load_config([ROOT / "conf/eres2net.yaml"])
    ranks = one_rank("cuda")
    gpu(8.75)
    batch = plan_device(config, ranks, **FP32).batch
    assert batch.micro_batch == 16
    assert batch.accumulation == 16
    assert batch.bn_batch == 16
    assert batch.reason == "auto: memory allows 27"
    (line,) = caplog.messages
    assert line.startswith(
        "training.bn_batch: 64 crops do not fit in 8.8 GB (free memory of cuda), 27 do:"
        " BatchNorm sees 16; 32 crops need 9.9 GB or runtime.precision=bf16"
    )

    # Half a GiB of rooms will be on the card too.
    banks = BankBytes(rooms=GIB // 2)
    batch = plan_device(config, ranks, **FP32, banks=banks).batch
    assert batch.reason == "auto: memory allows 25"


@pytest.mark.parametrize(
    ("free_gb", "settings", "options", "micro_batch", "on_device"),
    [
        # 0.92 x 10 - 1.1 = 8.1 GiB, of which 32 crops of 256 MiB leave 0.1, 16 leave 4.1
        (10, (), {}, 32, False),
        (24, (), {}, 64, True),
        # A number is taken even if noise leaves fewer crops.
        (10, ("runtime.bank_gb=4",), {}, 16, True),
        (24, ("runtime.bank_gb=2.9",), {}, 64, False),
        # The reserve stays free, also beside a configured micro-batch.
        (10, ("runtime.micro_batch=32",), {}, 32, False),
        (13.4, ("runtime.micro_batch=32",), {}, 32, True),
        # After 32 crops ran out of memory, noise does not take what is freed.
        (10, (), {"too_large": 32}, 16, False),
    ],
)
def test_noise_takes_what_the_batch_leaves_of_a_gpu(
    gpu, caplog, free_gb, settings, options, micro_batch, on_device
):
    """Rooms of 0.1 GiB and noise of 3 GiB."""
    caplog.set_level("INFO")
    gpu(free_gb)
    config = load_config([ROOT / "conf/eres2net.yaml"], settings)
    banks = BankBytes(rooms=GIB // 10, noise=3 * GIB)
    plan = plan_device(config, one_rank("cuda"), **FP32, banks=banks, **options)
    assert plan.batch.micro_batch == micro_batch
    assert plan.noise_on_device == on_device
    lines = [line for line in caplog.messages if line.startswith("data.noise: ")]
    assert len(lines) == (not on_device)
    for line in lines:
        assert "noise and rooms take 3.1 GB" in line

    # Whether there is noise never changes the micro-batch, unless the user fixes its memory.
    if not settings:
        without_noise = banks._replace(noise=0)
        plan = plan_device(
            config, one_rank("cuda"), **FP32, banks=without_noise, **options
        )
        assert plan.batch.micro_batch == micro_batch
        assert plan.noise_on_device


def test_the_rank_with_the_least_memory_decides_for_all(gpu):
    config = load_config([ROOT / "conf/eres2net.yaml"])
    banks = BankBytes(noise=4 * GIB)
    gpu(24)
    alone = plan_device(config, one_rank("cuda"), **FP32, banks=banks)
    assert alone.noise_on_device
    assert alone.batch.micro_batch == 64

    ranks = BesideSmaller(0, 2, 2, torch.device("cuda"))
    beside = plan_device(config, ranks, **FP32, banks=banks)
    assert not beside.noise_on_device
    assert beside.batch.micro_batch == 16


@pytest.mark.parametrize(
    ("setting", "free_gb", "noise_gb", "on_device"),
    [
        ("auto", 8, 1.9, True),  # a quarter
        ("auto", 8, 2.1, False),
        ("auto", 100, 3.9, True),
        ("auto", 100, 4.1, False),  # at most 4
        ("0.5", 100, 0.4, True),
        ("0.5", 100, 0.6, False),
    ],
)
def test_the_limit_of_noise_and_rooms_on_a_host(
    make_config, monkeypatch, setting, free_gb, noise_gb, on_device
):
    monkeypatch.setattr(batch_size, "free_bytes", lambda *_: free_gb * GIB)
    config = make_config(f"runtime.bank_gb={setting}", "training.global_batch=64")
    banks = BankBytes(noise=round(noise_gb * GIB))
    plan = plan_device(config, one_rank("cpu"), **FP32, banks=banks)
    assert plan.noise_on_device == on_device

    # Rooms have no other place.
    banks = BankBytes(rooms=banks.noise)
    if on_device:
        plan_device(config, one_rank("cpu"), **FP32, banks=banks)
        return
    with refuses("runtime.bank_gb", "rooms", f"{noise_gb:g} GB"):
        plan_device(config, one_rank("cpu"), **FP32, banks=banks)


def test_the_plan_of_a_host_and_after_it_ran_out_of_memory(make_config):
    config = make_config("training.global_batch=64")
    ranks = one_rank("cpu")
    batch = plan_device(config, ranks, **FP32).batch
    assert batch.micro_batch == 64

    batch = plan_device(config, ranks, **FP32, too_large=64).batch
    assert batch.micro_batch == 32
    assert batch.accumulation == 2
    assert batch.reason == "64 ran out of memory"


def test_a_single_crop_is_refused_before_the_training(make_config):
    config = make_config("training.global_batch=64", "runtime.micro_batch=1")
    with refuses("runtime.micro_batch", 1, "BatchNorm of campplus", "use 2"):
        plan_device(config, one_rank("cpu"), **FP32)
