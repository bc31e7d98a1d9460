"""The GPUs of this process, and checks that the requested GPUs exist and can be used."""

import os
import re
import warnings

import torch

from speakerlab.core import process
from speakerlab.core.torch_builds import CUDA_12_6, CUDA_13_0, PYTORCH_INDEX, Build

# Numbers of the GPUs that CUDA shows to this process. Set by --gpus; -1 means none.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
USE_THE_CPU = '--gpus "" or --device cpu for the CPU'


def count_gpus(device: str = "auto", *, num_ranks: int = 1) -> int:
    """Return the number of GPUs that a training may use; 0: the CPU.

    Raises ValueError if requested GPUs do not exist, are fewer than this host's ranks, or cannot be
    used by this torch.
    """
    if device == "cpu":
        return 0
    count = torch.cuda.device_count()

    # CUDA ignores numbers that do not exist. Without this check, a training would silently run on
    # fewer GPUs than requested, or on the CPU.
    requested = _requested_gpus()
    if len(requested) > count:
        raise ValueError(
            f"--gpus: {len(requested)} requested ({VISIBLE_DEVICES}={','.join(requested)}),"
            f' {describe_gpus()}; correct the numbers, or choose the CPU: --gpus ""'
        )
    if device == "cuda" and not count:
        raise ValueError(
            f"runtime.device: cuda requested, {describe_gpus()}; use auto or cpu"
            " (run.sh: another --hardware)"
        )
    # Each rank needs a GPU of its own: NCCL refuses two ranks on one GPU.
    if 0 < count < num_ranks and not is_bound_to_gpu():
        raise ValueError(
            f"--nproc: {num_ranks} ranks, {describe_gpus()}; use at most {count}"
        )
    if count:
        check_driver()
    # Another card of this machine, which no rank uses, may be too old.
    for index in range(min(count, num_ranks)):
        check_kernels(index)
    return count


def _requested_gpus() -> list[str]:
    """Return the GPUs that a user has listed for this process; none for the CPU, or for all."""
    visible = os.environ.get(VISIBLE_DEVICES, "")
    numbers = [number for number in visible.split(",") if number.strip()]
    if numbers == ["-1"]:
        return []
    return numbers


def check_driver() -> None:
    """Raise ValueError if CUDA cannot start, for example because the driver is too old for it."""
    if torch.version.hip:
        return
    try:
        # torch's own warning about old cards has many lines; `check_kernels` refuses them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
    except (AssertionError, RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        problem = " ".join(str(error).split())
        fix = "see nvidia-smi and speakerlab doctor"
        if "too old" in problem:
            # The rest of torch's text is advice without a version.
            problem, _, _ = problem.partition(". ")
            fix = _newer_driver(problem)
        raise ValueError(
            f"GPU: {describe_build()} cannot use it: {problem}; {fix}, or use"
            f" {USE_THE_CPU}"
        ) from None


def _newer_driver(problem: str) -> str:
    """Return what to do about a driver that is too old for this torch.

    problem: torch's text. Its `(found version 12020)` means that the driver supports CUDA 12.2.
    """
    version = re.search(r"found version (\d+)", problem)
    is_older_than_12 = version is not None and int(version[1]) < 12_000
    if is_older_than_12 or not is_built_for_cuda_13():
        return f"update it to {CUDA_12_6.driver} or newer"
    return f"update it to {CUDA_13_0.driver} or newer, or {install_line(CUDA_12_6)}"


def check_kernels(index: int) -> None:
    """Raise ValueError if torch was built without kernels for this card."""
    kernels = torch.cuda.get_arch_list()
    # The kernels of ROCm have other names, and torch itself checks them.
    if torch.version.hip or not kernels:
        return
    capability = torch.cuda.get_device_capability(index)
    if any(_runs_on(capability, kernel) for kernel in kernels):
        return
    major, minor = capability
    fix = "install a newer build of torch (https://pytorch.org/get-started/locally)"
    if capability < CUDA_13_0.oldest:
        fix = install_line(CUDA_12_6)
    if capability < CUDA_12_6.oldest:
        fix = "no build of it has them"
    raise ValueError(
        f"GPU {index}: {torch.cuda.get_device_name(index)} (sm_{major}{minor}):"
        f" {describe_build()} has no kernels for it, only for {' '.join(kernels)};"
        f" {fix}, or use {USE_THE_CPU}"
    )


def _runs_on(capability: tuple[int, int], kernel: str) -> bool:
    """Return whether a card runs a kernel with a name such as sm_90, sm_90a or compute_90.

    The name says for which card the kernel was built: sm as machine code, compute as PTX. A suffix
    limits the later cards that run it: `a` to none, `f` to those of the same generation.
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", kernel)
    if match is None:
        return True  # a name that is not known here: torch decides
    kind, major, minor, suffix = match.groups()
    built_for = (int(major), int(minor))
    if suffix == "a":
        return capability == built_for
    # Machine code runs on later cards of the same generation; PTX is compiled for any later card.
    is_same_generation = capability[0] == built_for[0]
    is_portable = kind == "compute" and not suffix
    return capability >= built_for and (is_same_generation or is_portable)


def is_built_for_cuda_13() -> bool:
    """Return whether this torch needs CUDA 13 or later."""
    major, _, _ = (torch.version.cuda or "0").partition(".")
    return int(major) >= 13


def describe_build() -> str:
    """Return "torch 2.11.0+cu130 (CUDA 13.0)"."""
    target = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    return f"torch {torch.__version__} ({target})"


def install_line(build: Build) -> str:
    """Return the command that replaces this torch by another build of the same version."""
    # Without the name of the build, pip would keep the installed one.
    version, _, _ = str(torch.__version__).partition("+")
    index = f"{PYTORCH_INDEX}/{build.index}"
    return f"pip install torch=={version}+{build.index} --extra-index-url {index}"


def is_bound_to_gpu() -> bool:
    """Return whether this rank sees only its own GPU, as with `srun --gpus-per-task=1`.

    Otherwise the ranks of a host see the same GPUs, and each takes the GPU of its local rank.
    """
    if "LOCAL_RANK" not in os.environ or torch.cuda.device_count() != 1:
        return False
    is_selected = VISIBLE_DEVICES in os.environ
    if process.TORCHRUN_VARIABLE in os.environ:
        # The ranks of torchrun see the same GPUs. Only with --virtual-local-rank does each rank see
        # one GPU, its own; every rank then has the local rank 0.
        return is_selected and os.environ["LOCAL_RANK"] == "0"
    return is_selected or "SLURM_PROCID" in os.environ


def check_format(device: str, precision: str) -> None:
    """Raise ValueError if a 16-bit format was requested, no GPU is found and no CPU was chosen.

    Whoever requests 16 bits expects a GPU: a training on the CPU would take days.
    """
    has_16_bits = precision in ("bf16", "fp16")
    # A user who sets the variable, for example by --gpus "", has chosen the device.
    is_chosen = device == "cpu" or VISIBLE_DEVICES in os.environ
    if has_16_bits and not is_chosen and not torch.cuda.device_count():
        raise ValueError(
            f"runtime.precision: {precision} requested, {describe_gpus()}; use auto, or"
            ' runtime.device=cpu to train in bf16 on the CPU (run.sh: --gpus "")'
        )


def reason_for_device(used: torch.device, device: str) -> str:
    """Return why a training runs on the device `used`; device: `runtime.device` as configured."""
    if used.type == "cpu" and device == "cpu":
        return "runtime.device: cpu"
    if used.type == "cpu" and VISIBLE_DEVICES in os.environ:
        return f"{VISIBLE_DEVICES}={os.environ[VISIBLE_DEVICES]}"
    return describe_gpus()


def describe_device(device: str, num_gpus: int, *, num_ranks: int) -> str:
    """Return a description of the hardware of a training; num_gpus: 0 for the CPU."""
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    if not num_gpus:
        are_gpus_hidden = os.environ.get(VISIBLE_DEVICES) == "-1"
        is_requested = are_gpus_hidden or device == "cpu"
        reason = "as requested" if is_requested else describe_gpus()
        return f"CPU, {ranks} ({reason})"
    text = f"GPU, {ranks}, {describe_gpus()}"
    # A user who chose the GPUs needs no advice to use all of them.
    if num_ranks == num_gpus or VISIBLE_DEVICES in os.environ:
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
