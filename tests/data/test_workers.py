"""The number of workers follows from the CPUs and the shared memory of this process."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import refused, refuses

from speakerlab.core.batch import Draw
from speakerlab.core.process import available_cpus
from speakerlab.data.loader import MicroBatches, TrainCrops, batch_bytes, train_loader
from speakerlab.data.manifest import read_manifest
from speakerlab.data.sampler import EpochOrder
from speakerlab.data.workers import MICRO_BATCHES_AHEAD, fit_workers

MIB = 1 << 20


@pytest.fixture
def eight_cpus(monkeypatch):
    """A machine of eight CPUs, all of which this process may run on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)), raising=False)


def cgroups(root: Path, membership: str, files: dict[str, str]) -> Path:
    """A `/` with a process's cgroups and their limits."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("membership", "files", "cpus"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),  # a container's own root
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
        ("0::/slurm/job_7\n", {"slurm/job_7/cpu.max": "300000 100000"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "600000 100000", "a/cpu.max": "400000 100000"}, 4),
        ("0::/docker/ab12\n", {"cpu.max": "500000 100000\n"}, 5),  # the path is the host's
        (
            "7:memory:/\n4:cpu,cpuacct:/docker/ab12\n1:name=systemd:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "700000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            7,
        ),
        (
            "3:cpuacct,cpu:/job\n0::/job\n",
            {"cpu/job/cpu.cfs_quota_us": "30000", "cpu/job/cpu.cfs_period_us": "10000"},
            3,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("5:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_a_quota_limits_the_cpus(tmp_path, eight_cpus, membership, files, cpus):
    assert available_cpus(cgroups(tmp_path, membership, files)) == cpus


def test_without_cgroups_the_cpus_are_those_of_the_affinity(tmp_path, eight_cpus):
    assert available_cpus(tmp_path) == 8


def free_of(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def test_workers_that_fit_are_kept(tmp_path):
    more = {"local_ranks": 2, "folder": tmp_path}
    for is_fixed in (False, True):
        assert fit_workers(8, bytes_per_batch=MIB, is_fixed=is_fixed, **more) == 8
    absent = {"local_ranks": 2, "folder": tmp_path / "no"}
    assert fit_workers(8, bytes_per_batch=1 << 50, is_fixed=True, **absent) == 8


def test_fewer_workers_are_taken_and_it_is_said(tmp_path, caplog):
    """A worker of each of 2 ranks reads 4 batches ahead and 1.5 of each are there: 12 batches."""
    caplog.set_level("INFO")
    bytes_per_batch = free_of(tmp_path) // int(12 * 3.5)
    more = {"bytes_per_batch": bytes_per_batch, "local_ranks": 2, "folder": tmp_path}
    assert fit_workers(8, is_fixed=False, **more) == 3
    assert f"3 data workers a rank instead of 8: {tmp_path} has" in caplog.text
    assert fit_workers(0, is_fixed=False, **more) == 0
    need = -(-round(bytes_per_batch * 12) * 8 // MIB)
    with refuses("runtime.num_workers", "8 for each of 2", f"{need} MiB of {tmp_path}"):
        fit_workers(8, is_fixed=True, **more)


def test_ranks_on_gpus_need_shared_memory_too(tmp_path):
    ranks = free_of(tmp_path) // (64 * MIB) + 1  # nothing is left for a batch
    more = {"bytes_per_batch": 1, "folder": tmp_path, "is_fixed": False}
    assert fit_workers(1, local_ranks=ranks, **more) == 1
    with pytest.raises(ValueError, match=f"1 for each of {ranks} ranks need"):
        fit_workers(1, local_ranks=ranks, on_gpus=True, **more)


SMALL_SHM = """
mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"
"""
FIT = """
from speakerlab.data.workers import fit_workers

print(fit_workers(8, bytes_per_batch=300_000, local_ranks=1, is_fixed=False))
fit_workers(8, bytes_per_batch=300_000, local_ranks=1, is_fixed=True)
"""


def can_mount() -> bool:
    command = ["unshare", "-m", "sh", "-c", SMALL_SHM, "sh", "true"]
    return shutil.which("unshare") is not None and not subprocess.run(command).returncode


@pytest.mark.skipif(not can_mount(), reason="needs root, to mount a small /dev/shm")
def test_a_small_dev_shm_is_met():
    """8 MiB hold four workers' 6 batches of 0.3 MB."""
    command = ["unshare", "-m", "sh", "-c", SMALL_SHM, "sh", sys.executable, "-c", FIT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "4\n"
    assert refused(done.stderr, "ValueError: runtime.num_workers", "14 MiB of /dev/shm", "8 MiB")


@pytest.fixture
def ten_files(make_data_dir):
    """Ten files of half a second to a second, as crops of a second at three speeds."""
    folder = make_data_dir(speakers=range(5), seconds=[0.5, 1.0])
    manifest = read_manifest([folder], sample_rate=16000)
    draws = {
        "speed": lambda rng: Draw({}, int(rng.integers(3))),
        "mask": lambda rng: Draw({"mask": rng.random((2, 2))}),
    }
    return TrainCrops(
        manifest,
        draws,
        crop_samples=16000,
        speeds=(1.0, 0.9, 1.1),
        label_KN=np.arange(15).reshape(3, 5),
        seed=0,
    )


def test_the_bytes_of_a_batch_are_predicted(ten_files):
    order = EpochOrder(
        ten_files.manifest.num_samples_N, crop_samples=16000, global_batch=64, seed=0
    )
    slots = MicroBatches(order, start_step=0, stop_step=1, micro_batch=64)
    (batch,) = train_loader(ten_files, slots, num_workers=0, pin_memory=False)
    tensors = []
    batch.map(lambda tensor: tensors.append(tensor) or tensor)
    pages = sum(math.ceil(tensor.nbytes / 4096) * 4096 for tensor in tensors)
    assert pages <= batch_bytes(ten_files, 64) < 1.1 * pages


@pytest.mark.filterwarnings("ignore:This DataLoader will create 8 worker")
def test_four_ranks_of_eight_workers_share_ten_files(ten_files):
    """One step of 64 crops an epoch, though the files hold seven."""
    order = EpochOrder(
        ten_files.manifest.num_samples_N, crop_samples=16000, global_batch=64, seed=0
    )
    assert (order.steps_per_epoch, order.num_dropped) == (1, 0)
    positions = []
    for rank in range(4):
        slots = MicroBatches(
            order, start_step=0, stop_step=2, micro_batch=16, rank=rank, world_size=4
        )
        batches = list(train_loader(ten_files, slots, num_workers=8, pin_memory=False))
        assert [batch.wave_BS.shape[0] for batch in batches] == [16, 16]
        positions += batches[0].position_B.tolist()
        assert set(batches[0].row_B.tolist()) <= set(range(10))
    assert positions == list(range(64))
    assert MICRO_BATCHES_AHEAD > 1
