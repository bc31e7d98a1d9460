"""Checks whether this host can run a training: each yields lines, ok or what to change.

Everything is tried, not assumed: files are written and locked, audio is read, ranks sum numbers.
These are processes of their own, so that a library that hangs or crashes cannot end the check.
"""

import fcntl
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.multiprocessing.spawn import ProcessException, spawn

from speakerlab.checkpoints import provenance
from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.core import process
from speakerlab.data import workers
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import read_table
from speakerlab.experiments.corpus import class_speeds
from speakerlab.experiments.planning import asked_micro_batch, batch_bytes, footprint
from speakerlab.training.batch_size import MAX_MICRO_BATCH, free_bytes
from speakerlab.training.devices import check_format, count_gpus, describe_gpus
from speakerlab.training.distributed import start_ranks
from speakerlab.training.precision import card_of, resolve_precision

WRITTEN_BYTES = 32 << 20
SLOW_WRITE, SLOW_READ_SECONDS = 20e6, 0.02  # bytes a second; seconds a crop
READ_CROPS, READ_SECONDS = 64, 3.0
RANK_BYTES, WORKER_BYTES = 1 << 30, 200 << 20  # of memory: libraries and what is read ahead
FILES = 256  # that a rank has open besides its batches
GUESSED_SPEAKERS = 10_000
FREE_SHARE = 0.9  # of a card's memory that no other process should have
LIMIT_SECONDS = 60.0  # starting Python and torch is part of it


class Line(NamedTuple):
    """One finding. A `fail` would end the run, a `warn` makes it slow or fragile."""

    level: str  # ok, warn or fail
    text: str  # <subject>: <finding>[; <fix>]

    def __str__(self) -> str:
        return f"{self.level:4} {self.text}"


@dataclass(frozen=True)
class Plan:
    """A training on this host."""

    config: Config
    exp: Path
    data: Path | None
    ranks: int
    gpus: int = 0  # requested

    @property
    def workers(self) -> int:
        asked = self.config.runtime.num_workers
        return workers.auto_workers(self.ranks) if asked == "auto" else asked


def graded(text: str, *, warn: bool = False, fail: bool = False, fix: str = "") -> Line:
    """Return a line with its level; the fix is only shown where there is a problem."""
    if warn or fail:
        return Line("fail" if fail else "warn", f"{text}; {fix}")
    return Line("ok", text)


def software(_: Plan) -> Iterator[Line]:
    """Check that torchaudio fits; report versions and the commit."""
    text = f"versions: Python {platform.python_version()}, torch {torch.__version__}, torchaudio "
    fix = "install torch and torchaudio of one version"
    try:
        import torchaudio

        minor = [module.__version__.split(".")[:2] for module in (torch, torchaudio)]
        yield graded(text + torchaudio.__version__, warn=minor[0] != minor[1], fix=fix)
    except (ImportError, OSError) as error:  # a library of another torch is an OSError
        yield graded(f"{text}cannot be imported ({error})", fail=True, fix=fix)
    found = provenance.commit()
    yield Line("ok", f"source: commit {found}" if found != "unknown" else "source: not in git")


def processors(plan: Plan) -> Iterator[Line]:
    """Compare CPUs and memory with the processes and the OpenMP threads that need them."""
    cpus, ranks = process.available_cpus(), plan.ranks
    text = f"CPUs: {cpus} available (affinity, cgroup quota) for {ranks} ranks "
    text += f"with {plan.workers} data workers each"
    few = ranks * (1 + plan.workers) > 2 * cpus or ranks > cpus
    yield graded(text, warn=few, fix="use more CPUs, or lower --nproc or runtime.num_workers")
    value = os.environ.get("OMP_NUM_THREADS", "")
    text = f"OMP_NUM_THREADS: {value or 'not set'}, {torch.get_num_threads()} threads per process"
    text += "" if value else " (run.sh sets it for several ranks)"
    many = value.isdigit() and int(value) * ranks > cpus
    fix = f"export OMP_NUM_THREADS={max(1, cpus // ranks)} for {cpus} CPUs"
    yield graded(text, warn=many, fix=fix)
    free = free_bytes(torch.device("cpu"), 1)
    need = ranks * (RANK_BYTES + plan.workers * WORKER_BYTES)
    text = f"memory: {free / 2**30:.1f} GiB free, ranks and workers need about {need / 2**30:.1f}"
    yield graded(text, warn=free < need, fix="free memory, or lower --nproc or runtime.num_workers")


def shared_memory(plan: Plan) -> Iterator[Line]:
    """Compare /dev/shm with the micro-batches that workers read ahead, as a training does."""
    training = plan.config.training
    rows = asked_micro_batch(plan.config) or training.bn_batch or MAX_MICRO_BATCH
    rows = min(rows, training.global_batch)
    size = batch_bytes(plan.config, rows)
    fitting = workers.fit_workers(
        plan.workers, batch_bytes=size, local_ranks=plan.ranks, gpus=plan.gpus
    )
    if not workers.SHARED_MEMORY.exists():
        yield Line("ok", f"{workers.SHARED_MEMORY}: not on this system")
        return
    disk = shutil.disk_usage(workers.SHARED_MEMORY)
    text = f"{workers.SHARED_MEMORY}: {disk.free >> 20} of {disk.total >> 20} MiB free, "
    text += f"{fitting} of {plan.workers} data workers per rank fit"
    few, fix = fitting < plan.workers, "in a container: docker run --shm-size=2g, or --ipc=host"
    yield graded(text, warn=few, fail=few and plan.config.runtime.num_workers != "auto", fix=fix)


def open_files(plan: Plan) -> Iterator[Line]:
    """Compare the limit with the open files: each tensor that a worker hands over is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES + 2 * workers.TENSORS * workers.MICRO_BATCHES_AHEAD + 8 * plan.workers
    text, few = f"open files: {soft} allowed, a rank needs about {need}", 0 <= soft < need
    is_hard = 0 <= hard < need
    fix = "raise the hard limit (limits.conf)" if is_hard else "ulimit -n 4096"
    yield graded(text, warn=few, fail=few and is_hard, fix=fix)


def experiment_folder(plan: Plan) -> Iterator[Line]:
    """Check space for the checkpoints, file locks, and writing as a checkpoint is written."""
    folder = next(p for p in (plan.exp.absolute(), *plan.exp.absolute().parents) if p.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}: not a folder; choose another --exp than {plan.exp}")
    free, size = shutil.disk_usage(folder).free, checkpoint_bytes(plan)
    need = (plan.config.training.keep_checkpoints + 3) * size  # one being written, and the model
    text = f"{plan.exp}: {free >> 20} MiB free, checkpoints need {need >> 20} MiB"
    yield graded(text, fail=free < need, fix="free some space, or choose another --exp")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor.") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            began = time.perf_counter()
            file.write(b"\1" * WRITTEN_BYTES)
            file.flush()
            os.fsync(file.fileno())
            rate = WRITTEN_BYTES / (time.perf_counter() - began)
    except OSError as error:
        text = f"{plan.exp}: cannot be written or locked ({error.strerror or error})"
        yield graded(text, fail=True, fix="free space, mount it writable, or choose another --exp")
        return
    fix = "checkpoints will be slow; choose a faster disk for --exp"
    text = f"{plan.exp}: written at {rate / 1e6:.0f} MB/s"
    yield graded(text, warn=rate < SLOW_WRITE, fix=fix)


def checkpoint_bytes(plan: Plan) -> int:
    """Return the size of weights, head and the optimizer's state."""
    speakers = set[str]()
    for name in plan.config.data.train if plan.data is not None else ():
        table = Path(plan.data or "", name, "utt2spk")
        speakers |= set(read_table(table).values() if table.exists() else ())
    classes = (len(speakers) or GUESSED_SPEAKERS) * len(class_speeds(plan.config))
    found = footprint(plan.config, num_classes=classes, precision="fp32")
    return found.weights + found.momentum


def reading(plan: Plan) -> Iterator[Line]:
    """Read crops from all over the training set, as one data worker does."""
    if plan.data is None:
        yield Line("ok", "data: not checked; to check it, give --data")
        return
    dirs = [plan.data / name for name in plan.config.data.train]
    manifest = read_manifest(dirs, sample_rate=plan.config.frontend["sample_rate"])
    rows = np.linspace(0, len(manifest) - 1, min(READ_CROPS, len(manifest))).astype(int)
    began, count = time.perf_counter(), 0
    while count < len(rows) and time.perf_counter() - began < READ_SECONDS:
        manifest.read(int(rows[count]), 0, build.crop_samples(plan.config))
        count += 1
    each = (time.perf_counter() - began) / count
    text = f"{plan.data}: a worker reads {1 / each:.0f} crops/s on the first read"
    fix = "pack the audio (stage 2), or copy it to a local disk"
    yield graded(text, warn=each > SLOW_READ_SECONDS, fix=fix)


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


CHECKS: tuple[Callable[[Plan], Iterator[Line]], ...] = (
    *(software, processors, shared_memory, open_files, experiment_folder, reading, check_devices),
)
