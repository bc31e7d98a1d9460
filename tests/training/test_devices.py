"""A training refuses to start if the requested GPUs do not exist or cannot be used."""

import signal
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
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
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


def become_rank_3_of_4(
    monkeypatch: pytest.MonkeyPatch, *, local_rank: int, local_size: int
) -> list[torch.device]:
    """Set the variables of a rank that joins nothing; return the devices that it will choose."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_size))
    for name in ("SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return chosen


def test_tasks_of_slurm_that_see_one_gpu_each_use_their_own(machine, monkeypatch):
    machine(1)
    chosen = become_rank_3_of_4(monkeypatch, local_rank=3, local_size=4)
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


@pytest.mark.parametrize("visible", [None, "3"])
def test_torchrun_in_each_task_of_slurm_uses_the_gpu_of_the_task(
    machine, monkeypatch, visible
):
    """srun --gpus-per-task=1 torchrun --nnodes=4 --nproc-per-node=1."""
    machine(1, visible)
    chosen = become_rank_3_of_4(monkeypatch, local_rank=0, local_size=1)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert start_ranks(timeout_minutes=1).rank == 3
    assert chosen == [torch.device("cuda", 0)]


@pytest.mark.parametrize(
    ("variables", "visible", "is_bound"),
    [
        # srun --gpus-per-task=1, and scripts that show each rank its own GPU
        ({"SLURM_PROCID": "3", "LOCAL_RANK": "3"}, None, True),
        ({"LOCAL_RANK": "3"}, "3", True),
        ({"LOCAL_RANK": "3"}, None, False),
        # torchrun's ranks share the GPU of their Slurm task
        (
            {"SLURM_PROCID": "0", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "a"},
            "0",
            False,
        ),
        # torchrun --virtual-local-rank
        ({"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "a"}, "3", True),
        # a command that starts ranks, in a batch script
        ({"SLURM_PROCID": "0"}, "0", False),
    ],
)
def test_ranks_that_see_their_own_gpu(
    machine, monkeypatch, variables, visible, is_bound
):
    machine(1, visible)
    for name in ("SLURM_PROCID", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refusal = refuses("--nproc", "4 ranks", "1 GPU found")
    with nullcontext() if is_bound else refusal:
        assert count_gpus(num_ranks=4) == 1


CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
OLD_CARD_FIX = "pip install torch==2.11.0+cu126 --extra-index-url"


@pytest.mark.parametrize(
    ("capability", "kernels", "fix"),
    [
        ((7, 0), CU130, OLD_CARD_FIX),  # V100
        ((6, 1), CU130, OLD_CARD_FIX),  # GTX 1080 Ti
        ((5, 2), CU130, OLD_CARD_FIX),  # GTX 980
        ((3, 7), CU126, "no build of it has them"),  # K80
        ((12, 0), CU126, "install a newer build"),  # RTX 5090
        ((10, 0), ["sm_90", "sm_90a", "compute_90a"], "install a newer build"),
        ((7, 0), CU126, ""),
        ((6, 1), CU126, ""),
        ((8, 9), CU130, ""),  # RTX 4090, with the kernels of 8.6
        ((12, 1), CU130, ""),
        ((13, 0), CU130, ""),  # compiled by the driver
        ((10, 3), ["sm_100f"], ""),
        ((9, 0), ["sm_90a"], ""),
        ((8, 0), [], ""),  # a torch that does not tell
    ],
)
def test_a_card_without_kernels_is_refused(
    machine, monkeypatch, capability, kernels, fix
):
    machine(2)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    number = "".join(map(str, capability))
    refusal = refuses(
        "GPU 0",
        f"Tesla V100 (sm_{number})",
        "torch 2.11.0+cu130 (CUDA 13.0)",
        " ".join(kernels),
        fix,
        '--gpus ""',
    )
    with refusal if fix else nullcontext():
        assert count_gpus() == 2


def test_only_the_cards_that_are_used_need_kernels(machine, monkeypatch):
    """A workstation may have an old card for its screen."""
    machine(2)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index: [(9, 0), (3, 5)][index]
    )
    assert count_gpus() == 2
    with refuses("GPU 1", "sm_35"):
        count_gpus(num_ranks=2)


OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update"
    " your GPU driver by downloading and installing a new version from the URL: ..."
)


@pytest.mark.parametrize(
    ("cuda", "text", "parts"),
    [
        ("13.0", OLD_DRIVER, ["found version 12020", "580 or newer", "cu126"]),
        ("12.6", OLD_DRIVER, ["found version 12020", "525 or newer"]),
        # no build for this driver
        (
            "13.0",
            OLD_DRIVER.replace("12020", "11040"),
            ["found version 11040); update it to 525 or newer, or use --gpus"],
        ),
        ("13.0", "Found no NVIDIA driver", ["Found no NVIDIA driver", "nvidia-smi"]),
        ("13.0", "CUDA unknown error\n - maybe", ["unknown error - maybe"]),
    ],
)
def test_a_driver_that_torch_cannot_use_is_one_line(
    machine, monkeypatch, cuda, text, parts
):
    def fail() -> None:
        raise RuntimeError(text)

    machine(1)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with refuses("GPU", f"CUDA {cuda}", *parts, "--device cpu"):
        count_gpus()
    assert count_gpus("cpu") == 0


NCCL_TEXT = """NCCL error in: ProcessGroupNCCL.cpp:94, invalid usage, NCCL version 2.27.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50000"""


@pytest.mark.parametrize(
    ("num_gpus", "error", "parts"),
    [
        (
            1,
            torch.distributed.DistBackendError(NCCL_TEXT),
            ["Duplicate GPU detected", "NCCL_DEBUG=INFO"],
        ),
        (
            0,
            torch.distributed.DistStoreError("Timed out after 61 seconds waiting\n..."),
            ["Timed out after 61 seconds waiting; ", "output"],
        ),
        (0, RuntimeError("Gloo connectFullMesh failed"), ["connectFullMesh"]),
    ],
)
def test_ranks_that_cannot_join_say_so_in_one_line(
    machine, monkeypatch, num_gpus, error, parts
):
    def fail(*_: object, **__: object) -> None:
        raise error

    machine(num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    handler = signal.getsignal(signal.SIGINT)
    with refuses("rank 1 of 2", *parts):
        start_ranks(timeout_minutes=1)
    assert signal.getsignal(signal.SIGINT) == handler


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_training_checks_them_at_its_start(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with refuses("--gpus", "1 requested", "no GPU found"):
        start_ranks(timeout_minutes=1)
    ranks = start_ranks(timeout_minutes=1, device="cpu")
    assert ranks.device.type == "cpu"
