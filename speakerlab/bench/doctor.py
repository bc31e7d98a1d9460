"""Whether this machine can run a training: each check makes one line, ok or what to change.

In: what is going to be run. Out: `Line`s. Everything is tried, not assumed: files are written and
locked, audio is read; `doctor_devices` does the same for GPUs and
the connection between ranks.
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

import numpy as np
import torch

from speakerlab.checkpoints import provenance
from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.core import process
from speakerlab.data.loader import (
    MICRO_BATCHES_AHEAD,
    PAGE_BYTES,
    TENSORS,
    auto_workers,
    fit_workers,
)
from speakerlab.data.manifest import read_manifest
from speakerlab.data.watchdog import SHARED_MEMORY
from speakerlab.training.batch_size import MAX_MICRO_BATCH, free_bytes

WRITTEN_BYTES = 32 << 20
SLOW_WRITE, SLOW_READ_SECONDS = 20e6, 0.02  # bytes a second; seconds a crop
READ_CROPS, READ_SECONDS = 64, 3.0
RANK_BYTES, WORKER_BYTES = 1 << 30, 200 << 20  # of memory: libraries and what is read ahead
FILES = 256  # a rank has open beside its batches
GUESSED_SPEAKERS = 10_000
TRY_LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


@dataclass(frozen=True)
class Line:
    """One finding. A `fail` would end the run, a `warn` makes it slow or fragile."""

    level: str  # ok, warn or fail
    text: str

    def __str__(self) -> str:
        return f"{self.level:4} {self.text}"


@dataclass(frozen=True)
class Plan:
    """What is going to be run on this host."""

    config: Config
    exp: Path
    data: Path | None
    ranks: int
    num_workers: int | None  # of a rank; None: as many as the host allows

    @property
    def workers(self) -> int:
        return auto_workers(self.ranks) if self.num_workers is None else self.num_workers


Check = Callable[[Plan], Line]


def check_host(plan: Plan) -> Iterator[Line]:
    """A line for each check; one that itself fails is a line too."""
    checks: tuple[Check, ...] = (versions, commit, tensorboard, cpus, threads, memory)
    checks = (*checks, shared_memory, open_files, host_name, writing, disk_space, locks, reading)
    for check in checks:
        try:
            yield check(plan)
        except (ValueError, OSError) as error:
            text = str(error)
            if isinstance(error, OSError) and error.errno is not None:  # not one of our own lines
                what = f"{error.filename or check.__name__}: cannot be used, got '{error.strerror}'"
                text = f"{what}; look at the disk and permissions"
            yield Line("fail", text)


def versions(_: Plan) -> Line:
    """Python, and torch with the torchaudio that was made for it."""
    try:
        import torchaudio
    except (ImportError, OSError) as error:  # a library of another torch is an OSError
        text = f"torchaudio: cannot be imported beside torch {torch.__version__}, got '{error}'"
        return Line("fail", f"{text}; install torch and torchaudio of one version")
    text = f"Python {platform.python_version()}, torch {torch.__version__}, torchaudio "
    text += torchaudio.__version__
    if torch.__version__.split(".")[:2] != torchaudio.__version__.split(".")[:2]:
        return Line("warn", f"{text}: not a pair; install torch and torchaudio of one version")
    return Line("ok", text)


def commit(_: Plan) -> Line:
    """Which source tree a result will name."""
    found = provenance.commit()
    return Line("ok", f"source: commit {found}" if found != "unknown" else "source: not in git")


def tensorboard(_: Plan) -> Line:
    """Whether the event files of a training can be written."""
    try:
        import speakerlab.training.events  # noqa: F401
    except ImportError as error:
        return Line("fail", f"TensorBoard: cannot be imported, got '{error}'; pip install it")
    return Line("ok", "TensorBoard: can be imported")


def cpus(plan: Plan) -> Line:
    """CPUs against the processes that want one."""
    there, wanted = process.available_cpus(), plan.ranks * (1 + plan.workers)
    kind = f"{plan.ranks} ranks with {plan.workers} data workers each"
    text = f"CPUs: {there} may be used (affinity, cgroup quota) by {kind}"
    if wanted > 2 * there or plan.ranks > there:
        return Line("warn", f"{text}; ask for more CPUs, or lower --nproc or runtime.num_workers")
    return Line("ok", text)


def threads(plan: Plan) -> Line:
    """OpenMP's threads of all ranks against the CPUs."""
    told, there = os.environ.get("OMP_NUM_THREADS", ""), process.available_cpus()
    text = f"OMP_NUM_THREADS: {told or 'not set'}, {torch.get_num_threads()} threads a process"
    if told.isdigit() and int(told) * plan.ranks > there:
        fair = max(1, there // plan.ranks)
        return Line("warn", f"{text}, for {there} CPUs; export OMP_NUM_THREADS={fair}")
    return Line("ok", f"{text}{'' if told else ' (run.sh sets it for several ranks)'}")


def memory(plan: Plan) -> Line:
    """Free memory of the host against the processes; the model is not in it."""
    free = free_bytes(torch.device("cpu"), 1)
    need = plan.ranks * (RANK_BYTES + plan.workers * WORKER_BYTES)
    text = f"memory: {free / 2**30:.1f} GiB free, ranks and workers take about {need / 2**30:.1f}"
    if free < need:
        return Line("warn", f"{text}; free some, or lower --nproc or runtime.num_workers")
    return Line("ok", text)


def shared_memory(plan: Plan) -> Line:
    """/dev/shm against the batches that workers read ahead; the same sum as before a training."""
    fitting = fit_workers(
        plan.workers,
        bytes_per_batch=largest_batch(plan.config),
        local_ranks=plan.ranks,
        is_fixed=plan.num_workers is not None,
        on_gpus=torch.cuda.is_available(),
    )
    if not SHARED_MEMORY.exists():
        return Line("ok", f"{SHARED_MEMORY}: not on this system")
    disk = shutil.disk_usage(SHARED_MEMORY)
    text = f"{SHARED_MEMORY}: {disk.free >> 20} of {disk.total >> 20} MiB free, "
    text += f"{fitting} of {plan.workers} data workers a rank fit"
    if fitting < plan.workers:
        return Line("warn", f"{text}; in a container: docker run --shm-size=2g, or --ipc=host")
    return Line("ok", text)


def largest_batch(config: Config) -> int:
    """Bytes of one micro-batch of waves on its way from a worker."""
    asked = config.runtime.micro_batch
    if isinstance(asked, dict):
        asked = asked.get(config.model.name, "auto")
    rows = asked if isinstance(asked, int) else config.training.bn_batch or MAX_MICRO_BATCH
    rows = min(rows, config.training.global_batch)
    longest = round(build.crop_samples(config) * max(config.augment.speeds))
    return rows * (2 * longest + 256) + TENSORS * PAGE_BYTES


def open_files(plan: Plan) -> Line:
    """Each tensor that a worker hands over is an open file of both."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES + 2 * TENSORS * MICRO_BATCHES_AHEAD + 8 * plan.workers
    text = f"open files: {soft} allowed, a rank needs about {need}"
    if 0 <= soft < need:
        level = "warn" if hard < 0 or hard >= need else "fail"
        remedy = "ulimit -n 4096" if level == "warn" else "raise its hard limit (limits.conf)"
        return Line(level, f"{text}; {remedy}")
    return Line("ok", text)


def host_name(_: Plan) -> Line:
    """What other hosts would be told to connect to."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "nothing"
    text = f"host name: {name} is {address}"
    if address == "nothing" or address.startswith("127."):
        hint = "with several hosts, give --rdzv an address and export GLOO_SOCKET_IFNAME"
        return Line("ok", f"{text} here; {hint}")
    return Line("ok", text)


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that there is.

    Raises NotADirectoryError where that is no folder, so that none can be made there.
    """
    found = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not found.is_dir():
        raise NotADirectoryError(f"{found}: is no folder, got --exp {folder} in it; use another")
    return found


def writing(plan: Plan) -> Line:
    """Write as a checkpoint is written: a file and fsync."""
    folder = existing(plan.exp)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor.") as file:
            began = time.perf_counter()
            file.write(b"\1" * WRITTEN_BYTES)
            file.flush()
            os.fsync(file.fileno())
            rate = WRITTEN_BYTES / (time.perf_counter() - began)
    except OSError as error:
        text = f"{plan.exp}: cannot be written, got '{error.strerror or error}'"
        return Line("fail", f"{text}; free some space, mount it writable, or use another --exp")
    text = f"{plan.exp}: written at {rate / 1e6:.0f} MB/s"
    if rate < SLOW_WRITE:
        return Line("warn", f"{text}, each checkpoint takes that long; use a faster --exp")
    return Line("ok", text)


def disk_space(plan: Plan) -> Line:
    """Room for the checkpoints that are kept, one that is being written, and the model."""
    free = shutil.disk_usage(existing(plan.exp)).free
    size = checkpoint_bytes(plan)
    need = (plan.config.training.keep_checkpoints + 3) * size
    text = f"{plan.exp}: {free >> 20} MiB free, checkpoints of {size >> 20} MiB take {need >> 20}"
    if free < need:
        return Line("fail", f"{text}; free some, or use another --exp")
    return Line("ok", text)


def checkpoint_bytes(plan: Plan) -> int:
    """Weights, head and the optimizer's state."""
    embedder = build.build_embedder(plan.config)
    size = sum(tensor.numel() for tensor in embedder.parameters())
    classes = num_speakers(plan) * len(plan.config.augment.speeds)
    slots = 1 if plan.config.optimizer.name == "sgd" else 2
    return 4 * (1 + slots) * (size + classes * embedder.embed_dim)


def num_speakers(plan: Plan) -> int:
    """Of the training set, where it is known."""
    if plan.data is None:
        return GUESSED_SPEAKERS
    tables = [plan.data / name / "utt2spk" for name in plan.config.data.train]
    lines = [
        line.split()
        for table in tables
        if table.exists()
        for line in table.read_text(encoding="utf-8").splitlines()
    ]
    return len({words[1] for words in lines if len(words) > 1}) or GUESSED_SPEAKERS


def locks(plan: Plan) -> Line:
    """A lock here must hold another process out: else two runs would write one experiment."""
    try:
        with tempfile.NamedTemporaryFile(dir=existing(plan.exp), prefix=".doctor.") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other = [sys.executable, "-S", "-c", TRY_LOCK, file.name]
            is_kept = subprocess.run(other, capture_output=True, timeout=10).returncode != 0
    except OSError as error:
        why = error.strerror or error
        remedy = "mount it with locks, or use another --exp"
        return Line("fail", f"{plan.exp}: has no file locks, got '{why}'; {remedy}")
    if not is_kept:
        remedy = "mount it with locks, or never start two runs of one --exp"
        return Line("warn", f"{plan.exp}: its file locks do not hold; {remedy}")
    return Line("ok", f"{plan.exp}: file locks hold")


def reading(plan: Plan) -> Line:
    """Read crops from all over the training set, as one data worker does."""
    if plan.data is None:
        return Line("ok", "data: not looked at; give --data to have some of it read")
    config = plan.config
    rate = config.frontend["sample_rate"]
    manifest = read_manifest([plan.data / name for name in config.data.train], sample_rate=rate)
    rows = np.linspace(0, len(manifest) - 1, min(READ_CROPS, len(manifest))).astype(int)
    began, count = time.perf_counter(), 0
    for row in rows:
        if time.perf_counter() - began > READ_SECONDS:
            break
        manifest.read(int(row), 0, build.crop_samples(config))
        count += 1
    each = (time.perf_counter() - began) / count
    text = f"{plan.data}: a worker reads {1 / each:.0f} crops/s, the first time they are read"
    if each > SLOW_READ_SECONDS:
        return Line("warn", f"{text}; pack the audio (stage 2), or copy it to a local disk")
    return Line("ok", text)
