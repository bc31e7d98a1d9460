"""Whether the GPUs of this machine can be used, and whether ranks on it can talk to one another.

In: how many ranks. Out: `Line`s. Ranks are tried as processes of their own, so that a library that
hangs or dies cannot take the check with it.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from speakerlab.bench.doctor import Line
from speakerlab.checkpoints import provenance
from speakerlab.training.precision import card_of, resolve_precision

ROOT = Path(__file__).parents[1]
FREE_SHARE = 0.9  # of a card's memory that nobody else should have
LIMIT_SECONDS = {"cuda": 60.0, "cpu": 30.0}
TALK = """
import torch
from speakerlab.training.distributed import start_ranks
ranks = start_ranks(timeout_minutes=0.5)
values = torch.full((1 << 22,), float(ranks.rank + 1), device=ranks.device)
total = ranks.sum(values)
assert total[-1].item() == ranks.world_size * (ranks.world_size + 1) / 2, total[-1]
import os
os._exit(0)
"""


def check_devices(num_ranks: int) -> Iterator[Line]:
    """The driver, each GPU, and ranks that add up numbers: on the GPUs, else on the CPU."""
    there = torch.cuda.device_count()
    if torch.version.hip:
        yield Line("ok", f"ROCm {torch.version.hip}, {there} GPUs")
    else:
        facts = {"found": provenance.driver(), "built_for": torch.version.cuda}
        yield driver(there, newest=cuda_of_driver(), **facts)
    yield from map(gpu, range(there))
    if there and num_ranks > there:
        text = f"GPUs: {num_ranks} ranks need one each, got {there}"
        yield Line("fail", f"{text}; lower --nproc, or see CUDA_VISIBLE_DEVICES")
    elif there == 1:
        yield Line("ok", "NCCL: one GPU, nothing to connect")
    else:
        most = there or num_ranks  # a GPU each
        yield ranks_talk(max(2, min(most, num_ranks) if num_ranks > 1 else most))


def driver(num_gpus: int, *, found: str | None, newest: str | None, built_for: str | None) -> Line:
    """NVIDIA's driver, and the newest CUDA it can run, against the CUDA that torch is built for."""
    if found is None and not num_gpus:
        return Line("ok", "GPUs: none, training runs on the CPU in fp32")
    if built_for is None:
        text = f"driver: NVIDIA {found}, but torch {torch.__version__} is built for CPUs only"
        return Line("fail", f"{text}; install a CUDA build of torch and torchaudio")
    text = f"driver: NVIDIA {found or '?'}, up to CUDA {newest or '?'}; torch is for {built_for}"
    if num_gpus:
        return Line("ok", text)
    if newest is not None and int(newest.split(".")[0]) < int(built_for.split(".")[0]):
        return Line("fail", f"{text}; update the driver, or install torch for CUDA {newest}")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return Line("fail", f"{text}, no GPU seen; correct CUDA_VISIBLE_DEVICES='{hidden}'")
    return Line("fail", f"{text}, no GPU seen; docker run --gpus all, or see nvidia-smi")


def cuda_of_driver() -> str | None:
    """The newest CUDA that the driver can run; None where it cannot be asked."""
    number = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def gpu(index: int) -> Line:
    """One card: what it is, what is free, and the precision that auto takes on it."""
    device = torch.device("cuda", index)
    try:
        free, total = torch.cuda.mem_get_info(device)
        card = card_of(device)
        used = resolve_precision("auto", device, [card] if card is not None else None)
        torch.ones(1, device=device).sum().item()  # a kernel for this capability is there
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return Line("fail", f"GPU {index}: cannot be used, got '{reason}'; see nvidia-smi")
    text = f"GPU {index}: {torch.cuda.get_device_name(device)}, {free / 2**30:.1f} of "
    text += f"{total / 2**30:.1f} GiB free, {used.name} ({used.reason})"
    if free < FREE_SHARE * total:
        return Line("warn", f"{text}; another process has the rest, see nvidia-smi")
    return Line("ok", text)


def ranks_talk(num_ranks: int, *, seconds: float | None = None, program: str = TALK) -> Line:
    """A process for each rank; together they add up numbers within a time limit."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    limit = LIMIT_SECONDS[kind] if seconds is None else seconds
    name = f"NCCL between {num_ranks} GPUs" if kind == "cuda" else f"gloo between {num_ranks} ranks"
    began = time.perf_counter()
    processes = start(num_ranks, program)
    try:
        for child in processes:
            child.wait(max(0.0, began + limit - time.perf_counter()))
    except subprocess.TimeoutExpired:
        hint = "NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 tell which way is broken"
        remedy = hint if kind == "cuda" else "is a firewall between this host and itself?"
        return Line("fail", f"{name}: no answer within {limit:g} s; {remedy}")
    finally:
        for child in processes:
            child.kill()
    took = time.perf_counter() - began
    if all(child.returncode == 0 for child in processes):
        return Line("ok", f"{name}: add up in {took:.1f} s, start included")
    return Line(
        "fail", f"{name}: do not work, {'; '.join(reasons(processes))}; see NCCL_DEBUG=INFO"
    )


def start(num_ranks: int, program: str) -> list[subprocess.Popen[str]]:
    """The ranks, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    common |= {"LOCAL_WORLD_SIZE": str(num_ranks), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def reasons(processes: Sequence[subprocess.Popen[str]]) -> Iterator[str]:
    """What the ranks that failed said last, or the signal they died of."""
    for rank, child in enumerate(processes):
        if child.returncode < 0:
            yield f"rank {rank} got {signal.Signals(-child.returncode).name}"
        elif child.returncode:
            said = (child.stderr.read() if child.stderr else "").strip().splitlines()
            yield f"rank {rank} got '{said[-1][:200] if said else child.returncode}'"
