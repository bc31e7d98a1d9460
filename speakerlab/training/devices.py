"""The GPUs of this process: those that are asked for must exist."""

import os

import torch

VARIABLE = "CUDA_VISIBLE_DEVICES"  # set by --gpus of run.sh; -1 means none


def count_gpus(device: str = "auto", *, num_ranks: int = 1) -> int:
    """Return how many GPUs a training may use; 0: the CPU.

    Raise ValueError if GPUs that are asked for do not exist, or are fewer than this host's ranks.
    """
    if device == "cpu":
        return 0
    count = torch.cuda.device_count()
    asked = [word for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
    if asked != ["-1"] and len(asked) > count:
        raise ValueError(
            f"--gpus: {len(asked)} requested ({VARIABLE}={','.join(asked)}), {describe_gpus()}; "
            f'correct the numbers, or choose the CPU: --gpus "" (run.sh) or {VARIABLE}=-1'
        )
    if device == "cuda" and not count:
        raise ValueError(
            f"runtime.device: cuda requested, {describe_gpus()}; use auto or cpu (run.sh: another "
            "--hardware)"
        )
    if 0 < count < num_ranks:
        raise ValueError(f"--nproc: {num_ranks} ranks, {describe_gpus()}; use at most {count}")
    return count


def check_format(device: str, precision: str) -> None:
    """Raise ValueError for 16 bits on a CPU that was not chosen; they are meant for a GPU."""
    is_chosen = device == "cpu" or VARIABLE in os.environ
    if precision in ("bf16", "fp16") and not is_chosen and not torch.cuda.device_count():
        raise ValueError(
            f"runtime.precision: {precision} requested, {describe_gpus()}; use auto, or "
            'runtime.device=cpu to train in bf16 on the CPU (run.sh: --gpus "")'
        )


def why(used: torch.device, device: str) -> str:
    """Return why a training runs on the device `used`, with `runtime.device` as configured."""
    if used.type == "cpu" and device == "cpu":
        return "runtime.device: cpu"
    if used.type == "cpu" and VARIABLE in os.environ:
        return f"{VARIABLE}={os.environ[VARIABLE]}"
    return describe_gpus()


def describe_gpus() -> str:
    """Return the GPUs that this process sees, as text."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if names:
        return f"{len(names)} GPU{'s' if len(names) > 1 else ''} found ({', '.join(set(names))})"
    if torch.version.cuda or torch.version.hip:
        return "no GPU found"
    return f"no GPU found: torch {torch.__version__} is built for CPUs only"
