"""The GPUs of this process, and checks that the requested GPUs exist."""

import os

import torch

# Numbers of the GPUs that CUDA shows to this process. Set by --gpus; -1 means none.
VARIABLE = "CUDA_VISIBLE_DEVICES"


def count_gpus(device: str = "auto", *, num_ranks: int = 1) -> int:
    """Return the number of GPUs that a training may use; 0: the CPU.

    Raises ValueError if requested GPUs do not exist, or are fewer than this host's ranks.
    """
    if device == "cpu":
        return 0
    count = torch.cuda.device_count()

    # CUDA ignores numbers that do not exist. Without this check, a training would silently run on
    # fewer GPUs than requested, or on the CPU.
    visible = os.environ.get(VARIABLE, "")
    requested = [number for number in visible.split(",") if number.strip()]
    is_cpu_requested = requested == ["-1"]
    if not is_cpu_requested and len(requested) > count:
        raise ValueError(
            f"--gpus: {len(requested)} requested ({VARIABLE}={','.join(requested)}),"
            f" {describe_gpus()}; "
            f'correct the numbers, or choose the CPU: --gpus ""'
        )
    if device == "cuda" and not count:
        raise ValueError(
            f"runtime.device: cuda requested, {describe_gpus()}; use auto or cpu"
            " (run.sh: another --hardware)"
        )
    # Each rank needs a GPU of its own: NCCL refuses two ranks on one GPU.
    if 0 < count < num_ranks:
        raise ValueError(
            f"--nproc: {num_ranks} ranks, {describe_gpus()}; use at most {count}"
        )
    return count


def is_bound_to_gpu() -> bool:
    """Return whether Slurm shows each task only its own GPU, as with `srun --gpus-per-task=1`.

    Then the ranks of a host do not share the visible GPUs of one rank.
    """
    is_slurm_task = "SLURM_PROCID" in os.environ
    return is_slurm_task and torch.cuda.device_count() == 1


def check_format(device: str, precision: str) -> None:
    """Raise ValueError for 16 bits on a CPU that was not chosen; they are meant for a GPU."""
    has_16_bits = precision in ("bf16", "fp16")
    # A user who sets the variable, for example by --gpus "", has chosen the device.
    is_chosen = device == "cpu" or VARIABLE in os.environ
    if has_16_bits and not is_chosen and not torch.cuda.device_count():
        raise ValueError(
            f"runtime.precision: {precision} requested, {describe_gpus()}; use auto, or"
            ' runtime.device=cpu to train in bf16 on the CPU (run.sh: --gpus "")'
        )


def why(used: torch.device, device: str) -> str:
    """Return why a training runs on the device `used`, with `runtime.device` as configured."""
    if used.type == "cpu" and device == "cpu":
        return "runtime.device: cpu"
    if used.type == "cpu" and VARIABLE in os.environ:
        return f"{VARIABLE}={os.environ[VARIABLE]}"
    return describe_gpus()


def describe_device(device: str, num_gpus: int, *, num_ranks: int) -> str:
    """Return a description of the hardware of a training; num_gpus: 0 for the CPU."""
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    if not num_gpus:
        are_gpus_hidden = os.environ.get(VARIABLE) == "-1"
        is_requested = are_gpus_hidden or device == "cpu"
        reason = "as requested" if is_requested else describe_gpus()
        return f"CPU, {ranks} ({reason})"
    text = f"GPU, {ranks}, {describe_gpus()}"
    # A user who chose the GPUs needs no advice to use all of them.
    if num_ranks == num_gpus or VARIABLE in os.environ:
        return text
    numbers = map(str, range(num_gpus))
    all_gpus = " ".join(numbers)
    return f'{text}; to use all of them: --gpus "{all_gpus}"'


def describe_gpus() -> str:
    """Return a text that lists the visible GPUs of this process."""
    names: list[str] = []
    for index in range(torch.cuda.device_count()):
        names.append(torch.cuda.get_device_name(index))
    if names:
        plural = "s" if len(names) > 1 else ""
        kinds = ", ".join(dict.fromkeys(names))
        return f"{len(names)} GPU{plural} found ({kinds})"

    # A wheel for CPUs finds no GPU on any machine: the fix is another installation of torch.
    if torch.version.cuda or torch.version.hip:
        return "no GPU found"
    return f"no GPU found: torch {torch.__version__} is built for CPUs only"
