"""Data workers: how many fit the CPUs and shared memory, and which one is stuck or has died."""

import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from contextlib import suppress
from multiprocessing import connection, resource_sharer
from pathlib import Path

import numpy as np
import pytest

from speakerlab.core.system import available_cpus
from speakerlab.data.loader import TrainCrops, micro_batches, train_loader
from speakerlab.data.manifest import read_manifest
from speakerlab.data.sampler import EpochOrder
from speakerlab.data.workers import (
    NCCL_BYTES,
    NO_ROW,
    Watch,
    auto_workers,
    fit_workers,
    start_worker,
)

MIB = 1 << 20


@pytest.fixture
def eight_cpus(monkeypatch):
    """A machine of eight CPUs, all of which this process may run on."""
    cpus = set(range(8))
    monkeypatch.setattr(
        os,
        "sched_getaffinity",
        lambda _process: cpus,
        raising=False,
    )


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
        # a container's own root
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
        ("0::/slurm/job_7\n", {"slurm/job_7/cpu.max": "300000 100000"}, 3),
        (
            "0::/a/b\n",
            {"a/b/cpu.max": "600000 100000", "a/cpu.max": "400000 100000"},
            4,
        ),
        # the path is the host's
        ("0::/docker/ab12\n", {"cpu.max": "500000 100000\n"}, 5),
        # beside version 1
        ("3:cpuset:/job\n0::/job\n", {"job/cpu.max": "300000 100000"}, 3),
    ],
)
def test_a_quota_limits_the_cpus(tmp_path, eight_cpus, membership, files, cpus):
    root = cgroups(tmp_path, membership, files)
    assert available_cpus(root) == cpus


def test_without_cgroups_the_cpus_are_those_of_the_affinity(tmp_path, eight_cpus):
    assert available_cpus(tmp_path) == 8


def test_as_many_workers_as_fit_into_shared_memory(tmp_path):
    """A worker of each of 2 ranks reads 4 batches ahead and 1.5 of each are there: 12 batches."""
    free = shutil.disk_usage(tmp_path).free
    # space for 3.5 workers
    options = {
        "batch_bytes": free // int(12 * 3.5),
        "local_ranks": 2,
    }
    for num_asked, num_fitting in [(8, 3), (3, 3), (0, 0)]:
        num_workers = fit_workers(num_asked, folder=tmp_path, **options)
        assert num_workers == num_fitting
    missing = tmp_path / "no"
    assert fit_workers(8, folder=missing, **options) == 8

    # one GPU needs no NCCL, and NCCL of so many GPUs takes all space
    assert fit_workers(8, folder=tmp_path, gpus=1, **options) == 3
    num_gpus = math.ceil(free / NCCL_BYTES)
    num_workers = fit_workers(8, folder=tmp_path, gpus=num_gpus, **options)
    assert num_workers == 0


def test_cpus_are_those_this_process_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cpus() == 1
        assert auto_workers(1) == 1
        assert auto_workers(2) == 1
    finally:
        os.sched_setaffinity(0, before)
    assert available_cpus() == len(before)
    most = max(1, len(before) - 1)
    assert 1 <= auto_workers(1) <= most


class StuckDisk(TrainCrops):
    """Reading this row takes until someone opens the pipe, as a file on a dead mount would."""

    pipe = Path()
    row = -1

    def __getitem__(self, slot):
        if slot[2] == self.row:
            # Waits for a writer, until the pipe is gone.
            with suppress(FileNotFoundError):
                descriptor = os.open(self.pipe, os.O_RDONLY)
                os.close(descriptor)
        return super().__getitem__(slot)


@pytest.fixture
def stuck(make_data_dir, tmp_path):
    """(pipe, file, load): load() begins to read a corpus of which one file does not answer."""
    folder = make_data_dir(speakers=range(4), seconds=[0.5, 0.6])
    manifest = read_manifest([folder], sample_rate=16000)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def load(num_workers: int):
        labels = np.arange(4)[None]
        crops = StuckDisk(
            manifest,
            {},
            crop_samples=8000,
            label_KN=labels,
            seed=0,
        )
        crops.pipe = pipe
        crops.row = list(manifest.ids).index("spk2-1")
        order = EpochOrder(
            manifest.num_samples_N,
            crop_samples=8000,
            global_batch=8,
            seed=0,
        )
        slots = micro_batches(
            order,
            start_step=0,
            stop_step=9,
            micro_batch=4,
        )
        return train_loader(
            crops,
            slots,
            num_workers=num_workers,
            pin_memory=False,
            stall_seconds=0.4,
        )

    return pipe, tmp_path / "wav" / "spk2-1.wav", load


def when(ready, act) -> threading.Thread:
    """Call act() from a thread once `ready()`, or after ten seconds."""

    def wait() -> None:
        deadline = time.monotonic() + 10
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_file_that_does_not_answer_is_named(stuck, caplog):
    pipe, path, load = stuck

    def let_go() -> None:
        # Nobody begins to wait any more. Who had found the pipe just before may still open it, so
        # it is opened several times: each time ends the waiting of those who have opened it.
        old = pipe.rename(pipe.with_name("old"))
        for _ in range(20):
            opened = os.open(old, os.O_RDWR | os.O_NONBLOCK)
            time.sleep(0.05)
            os.close(opened)

    # the message is repeated, and training continues
    opener = when(lambda: len(caplog.records) >= 2, let_go)
    batches = list(load(2))
    assert len(batches) == 18
    opener.join()
    for record in caplog.records[:2]:
        assert record.levelno == logging.WARNING
        assert re.match(
            rf"data: no batch for [0-5] s; [12] of 2 workers are reading; .*worker [01]"
            rf" \(process "
            rf"\d+\) reading spk2-1 \({re.escape(str(path))}\)",
            record.getMessage(),
        ), record.getMessage()
    # the same stall is not reported twice at once
    first, second = caplog.records[:2]
    assert second.created > first.created + 0.1


def test_a_killed_worker_is_one_line(stuck, caplog):
    _, path, load = stuck
    before = set(multiprocessing.active_children())
    killed: list[int] = []

    def kill() -> None:
        children = set(multiprocessing.active_children())
        (worker,) = children - before
        assert worker.pid is not None
        killed.append(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)

    killer = when(lambda: caplog.records, kill)
    with pytest.raises(ValueError) as died:
        list(load(1))
    killer.join()
    assert str(died.value) == (
        f"data worker 0 (process {killed[0]}) reading spk2-1 ({path}): ended with"
        " SIGKILL; often the kernel's out-of-memory killer, see dmesg: lower"
        " runtime.num_workers"
    )


class Unreadable(TrainCrops):
    def __getitem__(self, slot):
        raise ValueError("no audio")


def test_after_an_error_no_worker_is_left(make_data_dir):
    """Also while someone keeps the error, and with it the stack that refers to the loader."""
    manifest = read_manifest([make_data_dir(seconds=[0.6])], sample_rate=16000)
    labels = np.arange(4)[None]
    crops = Unreadable(manifest, {}, crop_samples=8000, label_KN=labels, seed=0)
    order = EpochOrder(
        manifest.num_samples_N, crop_samples=8000, global_batch=2, seed=0
    )
    slots = micro_batches(order, start_step=0, stop_step=1, micro_batch=1)
    before = set(multiprocessing.active_children())
    with pytest.raises(ValueError, match="no audio") as kept:
        list(train_loader(crops, slots, num_workers=2, pin_memory=False))
    assert kept.tb is not None
    assert set(multiprocessing.active_children()) == before


def test_the_line_on_a_stall_counts_the_workers_and_names_four():
    watch = Watch(7, lambda row: f"row {row}")
    watch.workers = [multiprocessing.Process() for _ in range(7)]
    watch.rows[:] = [3, NO_ROW, 5, 0, 4, 2, NO_ROW]
    text = watch.describe_stall(75.2)
    assert text.startswith(
        "data: no batch for 75 s; 5 of 7 workers are reading; data worker 0 ("
    )
    assert re.findall(r"row (\d+)", text) == ["3", "5", "0", "4"]
    watch.rows[:] = [NO_ROW] * 7
    text = watch.describe_stall(61.3)
    assert text == "data: no batch for 61 s; 0 of 7 workers are reading"


def hand_over(mailbox):
    start_worker(1)
    with Path(os.devnull).open() as file:
        mailbox.send(resource_sharer.DupFd(file.fileno()))
    mailbox.recv()


def test_a_worker_says_nothing_when_its_rank_is_killed_while_taking_a_batch(capfd):
    receiver, other = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(
        target=hand_over, args=(other,)
    )
    worker.start()
    key = multiprocessing.current_process().authkey
    address = receiver.recv()._id[0]
    connection.Client(address, authkey=key).close()
    time.sleep(0.2)
    receiver.send("end")
    worker.join(10)
    assert worker.exitcode == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-int(signal.SIGBUS), r"ended with SIGBUS; enlarge /dev/shm \(docker run "),
        (3, r"ended with exit code 3; report this"),
    ],
)
def test_the_remedy_follows_from_the_signal(code, text):
    def end() -> None:
        if code > 0:
            os._exit(code)
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)

    worker = multiprocessing.get_context("fork").Process(target=end)
    worker.start()
    worker.join()
    watch = Watch(2, str)
    watch.workers = [worker]
    line = watch.describe_death()
    assert line is not None
    assert re.match(rf"data worker 0 \(process {worker.pid}\): {text}", line), line
    watch.workers = []
    assert watch.describe_death() is None
