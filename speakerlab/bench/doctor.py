"""Checks whether this host can run a training; each check yields lines: ok, or a fix.

The checks test real operations: files are written and locked, audio is read, ranks sum numbers.
The ranks are separate processes, so that a library that hangs or crashes cannot end the check.
"""

import os
import platform
import re
import shutil
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
from speakerlab.core import process, system
from speakerlab.core.counting import count_of
from speakerlab.core.locks import try_lock
from speakerlab.data import workers
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import read_table
from speakerlab.experiments.corpus import class_speeds
from speakerlab.experiments.device_memory import configured_micro_batch
from speakerlab.experiments.footprint import batch_bytes, footprint
from speakerlab.training.batch_size import MAX_MICRO_BATCH, free_bytes
from speakerlab.training.devices import (
    check_driver,
    check_format,
    check_kernels,
    count_gpus,
    describe_gpus,
)
from speakerlab.training.precision import card_of, resolve_precision

WRITTEN_BYTES = 32 << 20
SLOW_WRITE = 20e6  # bytes per second
SLOW_READ_SECONDS = 0.02  # per crop
# The reading check ends after this number of crops or seconds.
READ_CROPS = 64
READ_SECONDS = 3.0
# Memory of a rank and of a data worker: libraries, and batches read ahead.
RANK_BYTES = 1 << 30
WORKER_BYTES = 200 << 20
FILES = 256  # open files of a rank besides its batches
GUESSED_SPEAKERS = 10_000
FREE_SHARE = 0.9  # share of a card's memory that should be free
TORCHRUN_LOG = r"[EWI]\d{4} \d\d:\d\d"  # start of the lines of torchrun's log
# torchaudio 2.11.0 runs with this torch and later ones; earlier ones only with their own
# (docs.pytorch.org/audio/2.11.0/installation.html). 2.11.1 needs a later torch than 2.11.
TORCHAUDIO_OF_LATER_TORCH = (2, 11)
LIMIT_SECONDS = 60.0  # includes the start of Python and torch


class Line(NamedTuple):
    """Finding of a check. A `fail` would end the run, a `warn` makes it slow or fragile."""

    level: str  # ok, warn or fail
    text: str  # <subject>: <finding>[; <fix>]

    def __str__(self) -> str:
        return f"{self.level:4} {self.text}"


@dataclass(frozen=True)
class Plan:
    """Training to check on this host."""

    config: Config
    exp: Path
    data: Path | None
    ranks: int
    gpus: int = 0  # requested

    @property
    def train_folders(self) -> list[Path]:
        """Return the training directories; empty without `data`."""
        if self.data is None:
            return []
        data = self.config.data.model_copy(update={"dir": str(self.data)})
        return data.train_folders()

    @property
    def workers(self) -> int:
        """Return the number of data workers of each rank."""
        num_workers = self.config.runtime.num_workers
        if num_workers == "auto":
            return workers.auto_workers(self.ranks)
        return num_workers


def graded(
    text: str,
    *,
    warn: bool = False,
    fail: bool = False,
    fix: str = "",
) -> Line:
    """Return a line with its level; the fix is only shown if there is a problem."""
    if warn or fail:
        return Line("fail" if fail else "warn", f"{text}; {fix}")
    return Line("ok", text)


def software(_: Plan) -> Iterator[Line]:
    """Check that an installed torchaudio fits torch; report versions and the commit."""
    text = f"versions: Python {platform.python_version()}, torch {torch.__version__}"
    torch_release = release(torch.__version__)
    major, minor = torch_release
    # speakerlab itself does not import it, but other programs in the environment do.
    fix = f'pip install "torchaudio=={major}.{minor}.*"'
    if torch_release >= TORCHAUDIO_OF_LATER_TORCH:
        fix = 'pip install "torchaudio==2.11.0"'
    try:
        import torchaudio

        yield graded(
            f"{text}, torchaudio {torchaudio.__version__}",
            warn=not fits(release(torchaudio.__version__), torch_release),
            fix=f"they do not fit: {fix}",
        )
    except ModuleNotFoundError:
        yield Line("ok", text)
    except (ImportError, OSError, RuntimeError) as error:
        # OSError: a library for another torch; RuntimeError: one for another CUDA.
        reason = " ".join(str(error).split())
        yield graded(
            f"{text}, torchaudio cannot be imported ({reason})",
            warn=True,
            fix=f"{fix}, or uninstall it",
        )
    commit = provenance.commit()
    source = "not in git" if commit == "unknown" else f"commit {commit}"
    yield Line("ok", f"source: {source}")


def release(version: str) -> tuple[int, int]:
    """Return (2, 11) for a version such as 2.11.0+cu130 or 2.11.0a0+git123."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def fits(torchaudio: tuple[int, int], torch_release: tuple[int, int]) -> bool:
    """Return whether a release of torchaudio runs with a release of torch."""
    if min(torchaudio, torch_release) >= TORCHAUDIO_OF_LATER_TORCH:
        return True
    return torchaudio == torch_release


def processors(plan: Plan) -> Iterator[Line]:
    """Compare CPUs and memory with the needs of the processes and OpenMP threads."""
    cpus = system.available_cpus()
    ranks = plan.ranks
    # Two processes per CPU are normal: workers wait for the disk, ranks for the GPU.
    num_processes = ranks * (1 + plan.workers)
    yield graded(
        f"CPUs: {cpus} available (affinity, cgroup quota) for"
        f" {count_of(ranks, 'rank')} with"
        f" {count_of(plan.workers, 'data worker')} each",
        warn=num_processes > 2 * cpus or ranks > cpus,
        fix="use more CPUs, or lower --nproc or runtime.num_workers",
    )

    value = os.environ.get("OMP_NUM_THREADS", "")
    text = (
        f"OMP_NUM_THREADS: {value or 'not set'}, {torch.get_num_threads()} threads per"
        " process"
    )
    if not value:
        text += " (run.sh sets it for several ranks)"
    yield graded(
        text,
        warn=value.isdigit() and int(value) * ranks > cpus,
        fix=f"export OMP_NUM_THREADS={max(1, cpus // ranks)} for {cpus} CPUs",
    )

    if not hasattr(os, "sysconf"):  # on Windows
        return
    free = free_bytes(torch.device("cpu"), 1)
    need = ranks * (RANK_BYTES + plan.workers * WORKER_BYTES)
    yield graded(
        f"memory: {free / 2**30:.1f} GiB free, ranks and workers need about"
        f" {need / 2**30:.1f}",
        warn=free < need,
        fix="free memory, or lower --nproc or runtime.num_workers",
    )


def shared_memory(plan: Plan) -> Iterator[Line]:
    """Compare /dev/shm with the micro-batches that workers read ahead, as a training does."""
    training = plan.config.training
    # The micro-batch is not planned yet: take the largest possible size.
    largest = training.bn_batch or MAX_MICRO_BATCH
    rows = configured_micro_batch(plan.config) or largest
    rows = min(rows, training.global_batch)
    size = batch_bytes(plan.config, rows)
    fitting = workers.fit_workers(
        plan.workers,
        batch_bytes=size,
        local_ranks=plan.ranks,
        gpus=plan.gpus,
    )
    if not workers.SHARED_MEMORY.exists():
        yield Line("ok", f"{workers.SHARED_MEMORY}: not on this system")
        return
    disk = shutil.disk_usage(workers.SHARED_MEMORY)
    is_too_small = fitting < plan.workers
    # A training lowers an automatic number of workers; a configured number fails.
    is_chosen_by_user = plan.config.runtime.num_workers != "auto"
    yield graded(
        f"{workers.SHARED_MEMORY}: {disk.free >> 20} of {disk.total >> 20} MiB free,"
        f" {fitting} of {plan.workers} data workers per rank fit",
        warn=is_too_small,
        fail=is_too_small and is_chosen_by_user,
        fix="in a container: docker run --shm-size=2g, or --ipc=host",
    )


def open_files(plan: Plan) -> Iterator[Line]:
    """Compare the limit with the open files; each tensor from a worker is an open file."""
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        yield Line("ok", "open files: no limit that Python knows")
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    of_batches = 2 * workers.TENSORS * workers.MICRO_BATCHES_AHEAD
    need = FILES + of_batches + 8 * plan.workers
    # -1 means no limit. The soft limit may be raised up to the hard limit without privileges.
    is_too_low = 0 <= soft < need
    is_hard = 0 <= hard < need
    yield graded(
        f"open files: {soft} allowed, a rank needs about {need}",
        warn=is_too_low,
        fail=is_too_low and is_hard,
        fix="raise the hard limit (limits.conf)" if is_hard else "ulimit -n 4096",
    )


def experiment_folder(plan: Plan) -> Iterator[Line]:
    """Check the space for checkpoints, file locks, and the speed of writing to disk."""
    # The experiment's folder may not exist yet: its nearest ancestor is on the same disk.
    exp = plan.exp.absolute()
    existing = [path for path in (exp, *exp.parents) if path.exists()]
    folder = existing[0]
    if not folder.is_dir():
        raise NotADirectoryError(
            f"{folder}: not a folder; choose another --exp than {plan.exp}"
        )
    free = shutil.disk_usage(folder).free
    # `keep_checkpoints` counts scheduled ones. Beside these there are the newest one, the best
    # validated one, and one that is being written.
    num_checkpoints = plan.config.training.keep_checkpoints + 3
    need = num_checkpoints * checkpoint_bytes(plan)
    yield graded(
        f"{plan.exp}: {free >> 20} MiB free, checkpoints need {need >> 20} MiB",
        fail=free < need,
        fix="free some space, or choose another --exp",
    )

    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor.") as file:
            # A training locks its folder, which some network mounts do not support.
            try_lock(file)
            began = time.perf_counter()
            file.write(b"\1" * WRITTEN_BYTES)
            file.flush()
            # Wait until the data is on the disk, as for a checkpoint.
            os.fsync(file.fileno())
            rate = WRITTEN_BYTES / (time.perf_counter() - began)
    except OSError as error:
        yield graded(
            f"{plan.exp}: cannot be written or locked ({error.strerror or error})",
            fail=True,
            fix="free space, mount it writable, or choose another --exp",
        )
        return
    yield graded(
        f"{plan.exp}: written at {rate / 1e6:.0f} MB/s",
        warn=rate < SLOW_WRITE,
        fix="checkpoints will be slow; choose a faster disk for --exp",
    )


def checkpoint_bytes(plan: Plan) -> int:
    """Return the size of a checkpoint: weights, head and the optimizer's state."""
    speakers: set[str] = set()
    for folder in plan.train_folders:
        table = folder / "utt2spk"
        if table.exists():
            speakers.update(read_table(table).values())
    num_speakers = len(speakers) or GUESSED_SPEAKERS
    # The head has separate rows for the speakers at each speed.
    num_classes = num_speakers * len(class_speeds(plan.config))
    needs = footprint(plan.config, num_classes=num_classes, precision="fp32")
    return needs.weights + needs.momentum


def reading(plan: Plan) -> Iterator[Line]:
    """Read crops from all over the training set, as one data worker does."""
    if plan.data is None:
        yield Line("ok", "data: not checked; to check it, give --data")
        return
    config = plan.config
    corpora = config.data.corpora
    manifest = read_manifest(
        plan.train_folders,
        sample_rate=config.frontend["sample_rate"],
        names=[corpus.name for corpus in corpora],
        shares_speakers=[corpus.speakers == "shared" for corpus in corpora],
    )
    crop_samples = build.crop_samples(config)

    # Far apart, because the system reads ahead: the neighbours of a crop are already in memory.
    num_crops = min(READ_CROPS, len(manifest))
    rows = np.linspace(0, len(manifest) - 1, num_crops).astype(int)
    began = time.perf_counter()
    count = 0
    while count < num_crops and time.perf_counter() - began < READ_SECONDS:
        manifest.read(int(rows[count]), 0, crop_samples)
        count += 1
    seconds_per_crop = (time.perf_counter() - began) / count
    yield graded(
        f"{plan.data}: a worker reads {1 / seconds_per_crop:.0f} crops/s on the first"
        " read",
        warn=seconds_per_crop > SLOW_READ_SECONDS,
        fix="pack the audio (`speakerlab pack`), or copy it to a local disk",
    )


def check_devices(plan: Plan) -> Iterator[Line]:
    """Check the driver, each GPU, and a sum over ranks on the GPUs, or else on the CPU."""
    count = torch.cuda.device_count()
    if torch.version.hip:
        yield Line("ok", f"ROCm: {torch.version.hip}, {count_of(count, 'GPU')}")
    else:
        line = driver(count, provenance.driver())
        yield line
        if line.level == "fail":
            return
    is_usable = True
    for index in range(count):
        line = gpu(index)
        yield line
        # A card that was not requested may be too old.
        is_used = index < max(1, plan.gpus, plan.ranks)
        is_usable = is_usable and not (is_used and line.level == "fail")
    if not is_usable:
        return
    if plan.gpus > count:
        yield graded(
            f"--gpus: {plan.gpus} requested, {describe_gpus()}",
            fail=True,
            fix=f"use --gpus {count}" if count else "without --gpus, the CPU is used",
        )
        return

    runtime = plan.config.runtime
    check_format(runtime.device, runtime.precision)
    count_gpus(runtime.device, num_ranks=plan.ranks)
    if not system.IS_LINUX:
        yield Line("warn", f"training: {system.LINUX_ONLY}")
        return
    if count == 1:
        yield Line("ok", "NCCL: one GPU, nothing to connect")
    else:
        # A single rank needs no connection: test the GPUs for later trainings.
        num_ranks = plan.ranks if plan.ranks > 1 else max(2, count)
        yield connection(num_ranks)


def driver(num_gpus: int, version: str | None) -> Line:
    """Check that torch can use NVIDIA's driver, if installed; report torch's error if not."""
    if version is None and not num_gpus:
        return Line("ok", "GPUs: none found")
    target = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    text = (
        f"driver: NVIDIA {version or '?'}; torch {torch.__version__} is built for"
        f" {target}"
    )
    if num_gpus:
        try:
            check_driver()
        except ValueError as error:
            return Line("fail", f"driver: NVIDIA {version or '?'}; {error}")
        return Line("ok", text)

    # There is a driver, but no GPU that torch can use.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.version.cuda:
        fix = "install a CUDA build of torch"
    elif visible is None:
        fix = "see nvidia-smi, or docker run --gpus all"
    else:
        fix = f"see nvidia-smi, or correct CUDA_VISIBLE_DEVICES='{visible}'"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        text = f"{text}: {' '.join(str(error).split())}"
    return graded(text, fail=True, fix=fix)


def gpu(index: int) -> Line:
    """Report one card, its free memory, and the precision chosen by `auto`."""
    device = torch.device("cuda", index)
    try:
        check_kernels(index)
    except ValueError as error:
        return Line("fail", str(error))
    try:
        free, total = torch.cuda.mem_get_info(device)
        precision = resolve_precision("auto", device, [card_of(device)])
        # A computation, which also tests the card.
        torch.ones(1, device=device).sum().item()
    except RuntimeError as error:
        text = f"GPU {index}: cannot be used ({str(error).splitlines()[0]})"
        return graded(text, fail=True, fix="see nvidia-smi")
    return graded(
        f"GPU {index}: {torch.cuda.get_device_name(device)}, {free / 2**30:.1f} of"
        f" {total / 2**30:.1f} GiB free, {precision.name} ({precision.reason})",
        warn=free < FREE_SHARE * total,
        fix="another process has the rest, see nvidia-smi",
    )


def connection(
    num_ranks: int,
    *,
    limit: float = LIMIT_SECONDS,
    module: str = "speakerlab.bench.connection",
) -> Line:
    """Start ranks as in training; check that they run `module` within a time limit."""
    on_gpus = torch.cuda.is_available()
    name = f"gloo between {count_of(num_ranks, 'rank')}"
    if on_gpus:
        name = f"NCCL between {count_of(num_ranks, 'GPU')}"
    launch = ["-m", "speakerlab", "launch", "--standalone"]
    launch += ["--nproc-per-node", str(num_ranks)]
    process.run_own_package()
    began = time.monotonic()
    launcher = subprocess.Popen(
        [sys.executable, *launch, "-m", module],
        env={**os.environ, process.PARENT_VARIABLE: str(os.getpid())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = launcher.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        fix = "check whether a firewall blocks connections of this host to itself"
        if on_gpus:
            fix = (
                "try NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 to find the broken path"
            )
        return graded(f"{name}: no answer within {limit:g} s", fail=True, fix=fix)
    finally:
        launcher.kill()  # its ranks also exit
        launcher.wait()
    if launcher.returncode:
        messages: list[str] = []
        for line in errors.splitlines():
            if not re.match(TORCHRUN_LOG, line):
                messages.append(line.strip()[:200])
        # The last lines of a traceback contain the error.
        reason = "; ".join(messages[-2:])
        return graded(f"{name}: failed: {reason}", fail=True, fix="see NCCL_DEBUG=INFO")
    return Line("ok", f"{name}: connected in {time.monotonic() - began:.1f} s")


CHECKS: tuple[Callable[[Plan], Iterator[Line]], ...] = (
    software,
    processors,
    shared_memory,
    open_files,
    experiment_folder,
    reading,
    check_devices,
)
