"""Records of finished work, and the locks around it."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from refusals import refuses

from speakerlab.core import done
from speakerlab.core.atomic import locked

FORK = multiprocessing.get_context("fork")
INPUTS = {
    "trials": "test/trials",
    "shares": [0.01, 0.05],
    "seed": None,
    "names": {"b": 1, "a": 2},
}


def test_the_same_inputs_are_done_and_others_are_not(tmp_path):
    path = tmp_path / "record"
    assert not done.is_done(path, INPUTS)
    done.record(path, INPUTS)
    assert done.is_done(path, INPUTS)
    assert done.is_done(path, {**INPUTS, "names": {"a": 2, "b": 1}})
    for name in INPUTS:
        assert not done.is_done(path, {**INPUTS, name: "another"}), name
        assert not done.is_done(
            path, {key: INPUTS[key] for key in INPUTS if key != name}
        ), name
    assert not done.is_done(path, {**INPUTS, "more": 1})
    done.forget(path)
    assert not done.is_done(path, INPUTS)
    done.forget(path)


def test_outputs_that_a_record_names_must_exist(tmp_path):
    path = tmp_path / "scores/record"
    outputs = {
        "../report.html": tmp_path / "report.html",
        "a b=c.txt": path.with_name("a b=c.txt"),
    }
    done.record(path, INPUTS, outputs=outputs)
    for output in outputs.values():
        assert not done.is_done(path, INPUTS)
        output.touch()
    assert done.is_done(path, INPUTS)
    assert done.read_record(path).keys() == INPUTS.keys()


def test_values_are_one_line_each(tmp_path):
    path = tmp_path / "record"
    inputs = {
        "path": Path("/a=b c"),
        "odd": "two\nlines",
        "bytes": os.fsdecode(b"\xff"),
    }
    done.record(path, inputs)
    assert path.read_text() == 'path=/a=b c\nodd="two\\nlines"\nbytes="\\udcff"\n'
    assert done.is_done(path, inputs)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"seed", b"\0" * 100, b"output=/\n" * 3]
)
def test_a_damaged_record_is_that_of_other_inputs(tmp_path, content):
    path = tmp_path / "record"
    path.write_bytes(content)
    assert not done.is_done(path, INPUTS)
    (tmp_path / "folder").mkdir()
    assert not done.is_done(tmp_path / "folder", INPUTS)


def test_stamps_change_with_size_and_time(tmp_path):
    paths = [tmp_path / str(number) for number in range(450)]
    for path in paths[1:]:
        path.write_text("a")
    before = done.stamps(paths)
    assert before == [done.stamp(path) for path in paths]
    assert before[0] == ""
    paths[3].write_text("ab")
    os.utime(paths[4], ns=(1, 1))
    after = done.stamps(paths)
    assert [i for i in range(450) if after[i] != before[i]] == [3, 4]
    assert done.stamp("a\0b") == ""


def test_digests_are_of_bytes_and_names(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    assert done.file_digest(tmp_path / "a") == done.file_digest(tmp_path / "b") != ""
    assert done.file_digest(tmp_path / "c") == ""
    assert done.files_digest(tmp_path, ["a"]) != done.files_digest(tmp_path, ["b"])
    assert len(done.code_digest()) == 64


def hold(path: Path, shared: bool, held, release) -> None:
    """Hold a lock until the test releases it."""
    with locked(path, shared=shared):
        held.set()
        release.wait(60)


@pytest.fixture
def holder(tmp_path):
    """holder(shared) -> a process that holds the lock, and what releases it."""
    processes = []

    def start(shared: bool):
        held = FORK.Event()
        release = FORK.Event()
        process = FORK.Process(
            target=hold, args=(tmp_path / "lock", shared, held, release)
        )
        process.start()
        processes.append(process)
        assert held.wait(30)
        return process, release

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (False, False, True),
        (False, True, True),
        (True, False, True),
        (True, True, False),
    ],
)
def test_a_lock_is_shared_or_waited_for(tmp_path, holder, caplog, first, second, waits):
    _, release = holder(first)
    taken = FORK.Event()
    done_with_it = FORK.Event()
    other = FORK.Process(
        target=hold, args=(tmp_path / "lock", second, taken, done_with_it)
    )
    other.start()
    assert taken.wait(0.5) != waits
    release.set()
    assert taken.wait(30)
    done_with_it.set()
    other.join()
    assert other.exitcode == 0


def test_the_lock_of_a_killed_process_is_free_and_the_waiting_is_reported(
    tmp_path, holder, caplog
):
    process, _ = holder(False)
    caplog.set_level("INFO")
    killer = FORK.Process(target=kill_later, args=(process.pid,))
    killer.start()
    with locked(tmp_path / "lock") as waited:
        assert waited
    killer.join()
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / 'lock'}: locked by another process")
    with locked(tmp_path / "lock") as waited:
        assert not waited


def kill_later(pid: int) -> None:
    time.sleep(1.5)
    os.kill(pid, signal.SIGKILL)


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "lock").mkdir()
    for shared in (False, True):
        with (
            refuses(str(tmp_path), "cannot be written"),
            locked(tmp_path / "lock", shared=shared),
        ):
            pass
