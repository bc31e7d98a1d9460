"""Files of enrolled speakers that several processes and threads change at the same time."""

import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from full_disk import cannot_write
from refusals import refuses

from speakerlab.core.atomic import locked
from speakerlab.inference.enrolled import add_speakers, read_speakers, write_speakers

FORKED = multiprocessing.get_context("fork")
SHA256 = "0" * 64
NUM_ADDED = 20


def speakers_of(*names: str) -> dict[str, np.ndarray]:
    unit_DD = np.eye(16, dtype=np.float32)
    return {name: unit_DD[index] for index, name in enumerate(names)}


def add_some(path: Path, writer: str) -> None:
    for number in range(NUM_ADDED):
        added = speakers_of(f"{writer}{number}")
        add_speakers(path, added, model_sha256=SHA256, space=SHA256)


@contextmanager
def process_of(function: Callable[..., None], *args: object) -> Iterator[int]:
    """Run a function in another process; yield its id, and kill it if it does not end."""
    process = FORKED.Process(target=function, args=args)
    process.start()
    assert process.pid is not None
    try:
        yield process.pid
        process.join(30)
    finally:
        process.kill()


def test_all_changes_of_processes_and_threads_are_kept(tmp_path):
    """Also of a process that knows the file by another name."""
    path = tmp_path / "new/team.safetensors"
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    with (
        process_of(add_some, path, "a"),
        process_of(add_some, link, "b"),
        ThreadPoolExecutor(2) as pool,
    ):
        list(pool.map(lambda writer: add_some(path, writer), "cd"))
    expected = {f"{writer}{number}" for writer in "abcd" for number in range(NUM_ADDED)}
    assert set(read_speakers(path, space=SHA256).speakers) == expected


def hold(lock: Path) -> None:
    with locked(lock):
        lock.with_name("held").touch()
        time.sleep(60)


def test_a_killed_writer_holds_up_nobody(tmp_path):
    path = tmp_path / "team.safetensors"
    lock = tmp_path / ".team.safetensors.lock"
    with process_of(hold, lock) as holder:
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
        with process_of(add_some, path, "a"):
            time.sleep(0.3)
            assert not path.exists()
            os.kill(holder, signal.SIGKILL)
    assert len(read_speakers(path, space=SHA256).speakers) == NUM_ADDED


def test_a_speaker_is_replaced_and_the_others_keep_their_place(tmp_path):
    path = tmp_path / "team.safetensors"
    write_speakers(path, speakers_of("ann", "bob"), model_sha256=SHA256, space=SHA256)
    ann_D = speakers_of("", "", "ann")["ann"]
    add_speakers(path, {"ann": ann_D}, model_sha256=SHA256, space=SHA256)
    stored = read_speakers(path, space=SHA256).speakers
    assert list(stored) == ["ann", "bob"]
    assert np.array_equal(stored["ann"], ann_D)

    content = path.read_bytes()
    with refuses(str(path), "was made with model 000000000000"):
        add_speakers(path, {"ann": ann_D}, model_sha256="1" * 64, space="1" * 64)
    assert path.read_bytes() == content


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_file_has_the_mode_of_the_umask(mask, mode, tmp_path):
    path = tmp_path / "team.safetensors"
    previous = os.umask(mask)
    try:
        add_speakers(path, speakers_of("ann"), model_sha256=SHA256, space=SHA256)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_full_disk_is_an_error_of_the_file_and_keeps_its_speakers(tmp_path):
    path = tmp_path / "team.safetensors"
    add_speakers(path, speakers_of("ann"), model_sha256=SHA256, space=SHA256)
    content = path.read_bytes()
    with cannot_write(path):
        add_speakers(path, speakers_of("bob"), model_sha256=SHA256, space=SHA256)
    assert path.read_bytes() == content
