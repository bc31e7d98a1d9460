"""A stalled or dead worker is reported with the file that it was reading."""

import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from speakerlab.data.loader import MicroBatches, TrainCrops, train_loader
from speakerlab.data.manifest import read_manifest
from speakerlab.data.sampler import EpochOrder
from speakerlab.data.workers import Board, Hop, Watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


class StuckDisk(TrainCrops):
    """Reading this row takes until someone opens the pipe, as a file on a dead mount would."""

    pipe, row = Path(), -1

    def __getitem__(self, slot):
        if slot[2] == self.row and self.pipe.exists():
            os.close(os.open(self.pipe, os.O_RDONLY))
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
        crops = StuckDisk(manifest, {}, crop_samples=8000, label_KN=labels, seed=0)
        crops.pipe, crops.row = pipe, list(manifest.ids).index("spk2-1")
        order = EpochOrder(manifest.num_samples_N, crop_samples=8000, global_batch=8, seed=0)
        slots = MicroBatches(order, start_step=0, stop_step=9, micro_batch=4)
        return train_loader(
            crops, slots, num_workers=num_workers, pin_memory=False, stall_seconds=0.4
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

    def let_go() -> None:  # of those who wait, and of those to come
        opened = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        pipe.unlink()
        os.close(opened)

    opener = when(lambda: len(caplog.records) >= 2, let_go)  # the message is repeated
    assert len(list(load(2))) == 18  # and training continues
    opener.join()
    who = r"worker [01] \(process \d+\)"
    told: list[float] = []
    for record in caplog.records[:2]:
        assert record.levelno == logging.WARNING
        found = re.match(
            rf"data: no batch for (\d+) s; {who} has been reading spk2-1 "
            rf"\({re.escape(str(path))}\) for (\d\.\d) s",
            record.getMessage(),
        )
        assert found is not None, record.getMessage()
        waited, read = int(found[1]), float(found[2])
        assert 0.3 <= read < 2
        assert (
            read - 0.6 <= waited < 3
        )  # a wait is rounded to seconds, and began before the reading
        told.append(read)
    assert told[1] > told[0] + 0.1  # the same stall is not reported twice at once


def test_a_killed_worker_is_one_line(stuck, caplog):
    _, path, load = stuck
    before = set(multiprocessing.active_children())
    killed: list[int] = []

    def kill() -> None:
        (worker,) = set(multiprocessing.active_children()) - before
        assert worker.pid is not None
        killed.append(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)

    killer = when(lambda: caplog.records, kill)
    with pytest.raises(ValueError) as died:
        list(load(1))
    killer.join()
    assert str(died.value) == (
        f"data worker 0 (process {killed[0]}): ended with SIGKILL while reading spk2-1 ({path}); "
        "often the kernel's out-of-memory killer, see dmesg: lower runtime.num_workers"
    )


def test_a_board_shows_the_longest_first_and_who_is_done():
    watch = Watch(Board(7), lambda row: f"row {row}")
    board = watch.board
    watch.workers = [multiprocessing.Process() for _ in range(7)]
    for line in (3, 1, 5, 0, 4):
        board.note(line, Hop.READING, 100 + line)
        time.sleep(0.002)
    board.note(2, Hop.COLLATING)
    board.note(6, Hop.IDLE)
    text = watch.describe_stall(75.2)
    assert text.startswith("data: no batch for 75 s; worker 3 (process None) has been reading row")
    assert re.findall(r"reading row (\d+)", text) == ["103", "101", "105", "100"]
    assert text.endswith("; 2 more are busy; 1 of 7 have sent their batches")
    for line in (3, 1):
        board.note(line, Hop.IDLE)
    text = watch.describe_stall(75.2)
    assert "; worker 2 (process None) has been collating for 0.0 s; 3 of 7 have sent" in text


def test_when_all_is_sent_the_batch_is_in_between():
    watch = Watch(Board(1), str)
    watch.board.note(0, Hop.IDLE)
    text = watch.describe_stall(61.3)
    assert text.startswith("data: no batch for 61 s; every worker has sent its batches: ")
    assert "MiB of /dev/shm are free" in text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-int(signal.SIGBUS), r"ended with SIGBUS while collating; enlarge /dev/shm \(docker run "),
        (3, r"ended with exit code 3 while collating; report this"),
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
    watch = Watch(Board(2), str)
    watch.board.note(0, Hop.COLLATING, -1)
    watch.workers = [worker]
    line = watch.describe_death()
    assert line is not None
    assert re.match(rf"data worker 0 \(process {worker.pid}\): {text}", line), line
    watch.workers = []
    assert watch.describe_death() is None
