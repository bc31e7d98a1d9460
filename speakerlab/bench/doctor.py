"""Checks whether this host can run a training: each yields lines, ok or what to change.

Everything is tried, not assumed: files are written and locked, audio is read. `doctor_devices` does
the same for GPUs and the connection between ranks.
"""

import fcntl
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from speakerlab.checkpoints import provenance
from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.core import process
from speakerlab.data import workers
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import read_table
from speakerlab.experiments.corpus import class_speeds
from speakerlab.experiments.planning import asked_micro_batch, footprint
from speakerlab.training.batch_size import MAX_MICRO_BATCH, free_bytes

WRITTEN_BYTES = 32 << 20
SLOW_WRITE, SLOW_READ_SECONDS = 20e6, 0.02  # bytes a second; seconds a crop
READ_CROPS, READ_SECONDS = 64, 3.0
RANK_BYTES, WORKER_BYTES = 1 << 30, 200 << 20  # of memory: libraries and what is read ahead
FILES = 256  # that a rank has open besides its batches
GUESSED_SPEAKERS = 10_000
TRY_LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


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
    num_workers: int | None  # of a rank; None: as many as the host allows
    gpus: int = 0  # requested

    @property
    def workers(self) -> int:
        return workers.auto_workers(self.ranks) if self.num_workers is None else self.num_workers


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
    longest = round(build.crop_samples(plan.config) * max(plan.config.augment.speeds))
    fitting = workers.fit_workers(
        plan.workers,
        bytes_per_batch=rows * (2 * longest + 256) + workers.TENSORS * workers.PAGE_BYTES,
        local_ranks=plan.ranks,
        is_fixed=plan.num_workers is not None,
        on_gpus=torch.cuda.is_available(),
    )
    if not workers.SHARED_MEMORY.exists():
        yield Line("ok", f"{workers.SHARED_MEMORY}: not on this system")
        return
    disk = shutil.disk_usage(workers.SHARED_MEMORY)
    text = f"{workers.SHARED_MEMORY}: {disk.free >> 20} of {disk.total >> 20} MiB free, "
    text += f"{fitting} of {plan.workers} data workers per rank fit"
    fix = "in a container: docker run --shm-size=2g, or --ipc=host"
    yield graded(text, warn=fitting < plan.workers, fix=fix)


def open_files(plan: Plan) -> Iterator[Line]:
    """Compare the limit with the open files: each tensor that a worker hands over is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES + 2 * workers.TENSORS * workers.MICRO_BATCHES_AHEAD + 8 * plan.workers
    text, few = f"open files: {soft} allowed, a rank needs about {need}", 0 <= soft < need
    is_hard = 0 <= hard < need
    fix = "raise the hard limit (limits.conf)" if is_hard else "ulimit -n 4096"
    yield graded(text, warn=few, fail=few and is_hard, fix=fix)


def host_name(_: Plan) -> Iterator[Line]:
    """Report the address that other hosts would connect to."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "unknown"
    text = f"host name: {name}, address {address}"
    if address == "unknown" or address.startswith("127."):
        text += "; with several hosts, give --rdzv an address and export GLOO_SOCKET_IFNAME"
    yield Line("ok", text)


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
            other = [sys.executable, "-S", "-c", TRY_LOCK, file.name]
            holds = subprocess.run(other, capture_output=True, timeout=10).returncode != 0
            fix = "mount it with locks, or never start two runs with the same --exp"
            text = f"{plan.exp}: file locks {'work' if holds else 'have no effect'}"
            yield graded(text, warn=not holds, fix=fix)
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


CHECKS: tuple[Callable[[Plan], Iterator[Line]], ...] = (
    *(software, processors, shared_memory, open_files, host_name, experiment_folder, reading),
)
