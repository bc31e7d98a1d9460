"""GPUs that are asked for exist, or the training refuses to start."""

from contextlib import nullcontext

import pytest
import torch
from refusals import refuses

from speakerlab.training.devices import check_format, count_gpus
from speakerlab.training.distributed import start_ranks


@pytest.fixture
def machine(monkeypatch):
    """machine(2, "0,1") sets the number of GPUs that torch finds and CUDA_VISIBLE_DEVICES."""

    def make(num_gpus: int, visible: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


@pytest.mark.parametrize(
    ("num_gpus", "visible", "device", "expected"),
    [
        (0, None, "auto", 0),
        (0, "", "auto", 0),
        (0, "-1", "auto", 0),
        (2, None, "auto", 2),
        (2, "4,GPU-8932f937", "cuda", 2),
        (2, "0,1", "cpu", 0),
        (0, "0", "cpu", 0),
    ],
)
def test_the_number_of_gpus(machine, num_gpus, visible, device, expected):
    machine(num_gpus, visible)
    assert count_gpus(device) == expected


@pytest.mark.parametrize(
    ("num_gpus", "visible", "device", "ranks", "refusal"),
    [
        (
            0,
            "0,1",
            "auto",
            1,
            ("--gpus", "2 requested", "0,1", "no GPU found", '--gpus ""'),
        ),
        (1, "0,5", "auto", 1, ("--gpus", "2 requested", "0,5", "1 GPU found (H100)")),
        (0, None, "cuda", 1, ("runtime.device", "cuda", "no GPU found")),
        (0, "-1", "cuda", 1, ("runtime.device", "cuda", "no GPU found")),
        (2, None, "auto", 3, ("--nproc", "3 ranks", "2 GPUs found")),
    ],
)
def test_missing_gpus_are_refused(machine, num_gpus, visible, device, ranks, refusal):
    machine(num_gpus, visible)
    with refuses(*refusal):
        count_gpus(device, num_ranks=ranks)


@pytest.mark.parametrize(
    ("num_gpus", "visible", "device", "precision", "is_refused"),
    [
        (0, None, "auto", "bf16", True),
        (0, None, "auto", "fp16", True),
        (0, None, "auto", "fp32", False),
        (0, None, "auto", "auto", False),
        (0, None, "cpu", "bf16", False),
        (0, "-1", "auto", "bf16", False),
        (2, None, "auto", "bf16", False),
    ],
)
def test_16_bits_on_a_cpu_must_be_chosen(
    machine, num_gpus, visible, device, precision, is_refused
):
    machine(num_gpus, visible)
    refusal = refuses(
        "runtime.precision", precision, "no GPU found", "runtime.device=cpu"
    )
    with refusal if is_refused else nullcontext():
        check_format(device, precision)


def test_a_gpu_that_cannot_be_used_is_refused(machine, monkeypatch):
    def fail(_):
        raise RuntimeError("driver too old\nmore")

    machine(1)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with refuses("cuda:0", "driver too old; run speakerlab doctor"):
        start_ranks(timeout_minutes=1)


def test_tasks_of_slurm_that_see_one_gpu_each_use_their_own(machine, monkeypatch):
    machine(1)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda *_, **__: None,
    )
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    # without Slurm, the ranks of a host share its GPUs
    with refuses("--nproc", "4 ranks", "1 GPU"):
        start_ranks(timeout_minutes=1)

    # a task of Slurm may see only its own GPU
    monkeypatch.setenv("SLURM_PROCID", "3")
    ranks = start_ranks(timeout_minutes=1)
    first_gpu = torch.device("cuda", 0)
    assert chosen == [first_gpu]
    assert ranks.device == first_gpu
    assert ranks.rank == 3
    assert ranks.local_size == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_training_checks_them_at_its_start(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with refuses("--gpus", "1 requested", "no GPU found"):
        start_ranks(timeout_minutes=1)
    ranks = start_ranks(timeout_minutes=1, device="cpu")
    assert ranks.device.type == "cpu"
