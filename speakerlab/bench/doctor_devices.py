"""Whether the GPUs of this machine can be used, and whether ranks on it can communicate.

Ranks are tried in processes of their own, so that a library that hangs or crashes cannot take the
check with it.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator

import torch
from torch.multiprocessing.spawn import ProcessException, spawn

from speakerlab.bench.doctor import Line, Plan, graded
from speakerlab.checkpoints import provenance
from speakerlab.training.devices import check_format, count_gpus, describe_gpus
from speakerlab.training.distributed import start_ranks
from speakerlab.training.precision import card_of, resolve_precision

FREE_SHARE = 0.9  # of a card's memory that no other process should have
LIMIT_SECONDS = 60.0  # starting Python and torch is part of it


def check_devices(plan: Plan) -> Iterator[Line]:
    """Check the driver, each GPU, and ranks that sum numbers: on the GPUs, else on the CPU."""
    count = torch.cuda.device_count()
    if torch.version.hip:
        yield Line("ok", f"ROCm: {torch.version.hip}, {count} GPUs")
    else:
        yield driver(count, provenance.driver())
    yield from map(gpu, range(count))
    if plan.gpus > count:
        found = f"--gpus: {plan.gpus} requested, {describe_gpus()}"
        fix = f"use --gpus {count}" if count else "without --gpus, the CPU is used"
        yield graded(found, fail=True, fix=fix)
        return
    runtime = plan.config.runtime
    check_format(runtime.device, runtime.precision)
    count_gpus(runtime.device, num_ranks=plan.ranks)
    if count == 1:
        yield Line("ok", "NCCL: one GPU, nothing to connect")
    else:
        yield connection(plan.ranks if plan.ranks > 1 else max(2, count))


def driver(num_gpus: int, found: str | None) -> Line:
    """Check that torch can use NVIDIA's driver, if there is one; torch's own error says why not."""
    if found is None and not num_gpus:
        return Line("ok", "GPUs: none found")
    built_for = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
    text = f"driver: NVIDIA {found or '?'}; torch {torch.__version__} is built {built_for}"
    if num_gpus:
        return Line("ok", text)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    fix = "docker run --gpus all" if hidden is None else f"correct CUDA_VISIBLE_DEVICES='{hidden}'"
    fix = f"see nvidia-smi, or {fix}" if torch.version.cuda else "install a CUDA build of torch"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        text = f"{text}: {' '.join(str(error).split())}"
    return graded(text, fail=True, fix=fix)


def gpu(index: int) -> Line:
    """Report one card, its free memory, and the precision that `auto` takes on it."""
    device = torch.device("cuda", index)
    try:
        free, total = torch.cuda.mem_get_info(device)
        used = resolve_precision("auto", device, [card_of(device)])
        torch.ones(1, device=device).sum().item()  # there is a kernel for this capability
    except RuntimeError as error:
        text = f"GPU {index}: cannot be used ({str(error).splitlines()[0]})"
        return graded(text, fail=True, fix="see nvidia-smi")
    text = f"GPU {index}: {torch.cuda.get_device_name(device)}, {free / 2**30:.1f} of "
    text += f"{total / 2**30:.1f} GiB free, {used.name} ({used.reason})"
    fix = "another process has the rest, see nvidia-smi"
    return graded(text, warn=free < FREE_SHARE * total, fix=fix)


def connection(
    num_ranks: int, *, limit: float = LIMIT_SECONDS, work: Callable[[], None] | None = None
) -> Line:
    """Start a process for each rank; together they do the work, sum_up, within a time limit."""
    on_gpus = torch.cuda.is_available()
    name = f"NCCL between {num_ranks} GPUs" if on_gpus else f"gloo between {num_ranks} ranks"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    ranks = spawn(be_rank, (num_ranks, port, work or sum_up), num_ranks, join=False)
    assert ranks is not None  # that of join=True
    try:
        while not ranks.join(max(0.0, began + limit - time.monotonic())):
            if time.monotonic() > began + limit:
                fix = "check whether a firewall blocks connections of this host to itself"
                if on_gpus:
                    fix = "try NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 to find the broken path"
                return graded(f"{name}: no answer within {limit:g} s", fail=True, fix=fix)
    except ProcessException as error:
        reason = str(error).strip().splitlines()[-1][:200]
        text = f"{name}: rank {error.error_index} failed: {reason}"
        return graded(text, fail=True, fix="see NCCL_DEBUG=INFO")
    finally:
        for rank in filter(None, ranks.processes):
            rank.kill()
    return Line("ok", f"{name}: connected in {time.monotonic() - began:.1f} s")


def be_rank(rank: int, num_ranks: int, port: int, work: Callable[[], None]) -> None:
    """Do the work in the environment that torchrun gives to a rank."""
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
    numbers |= {"LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in numbers.items()}})
    work()
    os._exit(0)  # without waiting for the other ranks


def sum_up() -> None:
    """Sum numbers over all ranks."""
    ranks = start_ranks(timeout_minutes=0.5)
    total = ranks.sum(torch.full((1 << 22,), float(ranks.rank + 1), device=ranks.device))
    assert total[-1].item() == ranks.world_size * (ranks.world_size + 1) / 2, total[-1]
