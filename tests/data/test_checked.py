"""`speakerlab check` once: what is done is kept, each input makes it check again, locks."""

import logging
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import soundfile
from refusals import refuses
from voices import RATE, write_voices

from speakerlab.bin import check, pack
from speakerlab.core.atomic import locked
from speakerlab.data import checked
from speakerlab.data.pack import LOCK
from speakerlab.data.tables import (
    read_rejected,
    read_table,
    write_rejected,
    write_table,
)

FORK = multiprocessing.get_context("fork")
KEPT = "already checked with these inputs, kept (--force checks again)"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Four speakers with trials in `data/test`, not checked."""
    folder = write_voices(
        tmp_path / "data/test",
        seconds=[0.5, 0.75],
        suffix=".flac",
        trials="all",
        check=False,
    )
    speakers = read_table(folder / "utt2spk")
    devices = dict.fromkeys(speakers, "phone")
    write_table(folder / "utt2device", devices)
    write_table(folder / "enroll.map", {"model": "spk0-0 spk0-1"})
    return folder


@pytest.fixture
def checks(caplog):
    """checks(folder, *options) -> whether it was checked, not kept."""

    def run(*arguments: object) -> bool:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            check.main([*map(str, arguments), "--num-workers", "1"])
        is_kept = any(KEPT in line for line in caplog.messages)
        if is_kept:
            assert len(caplog.messages) == 1, caplog.messages
        return not is_kept

    return run


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of all files of a data directory."""
    state = {}
    for path in folder.iterdir():
        stat = path.stat()
        state[path.name] = (stat.st_ino, stat.st_mtime_ns)
    return state


def test_the_second_check_writes_nothing(folder, checks):
    assert checks(folder)
    before = state(folder)
    assert not checks(folder)
    assert state(folder) == before
    assert checks(folder, "--force")
    assert state(folder) != before
    assert not checks(folder)


def recording(folder: Path, utterance: str) -> Path:
    wavs = read_table(folder / "wav.scp")
    return Path(wavs[utterance])


def replace_recording(folder: Path) -> None:
    path = recording(folder, "spk1-0")
    wave_S, _ = soundfile.read(path, dtype="int16")
    soundfile.write(path, wave_S[:6000], RATE)


def change_time(folder: Path) -> None:
    path = recording(folder, "spk1-0")
    os.utime(path, ns=(5, 5))


def change_row(path: Path, utterance: str, value: str) -> None:
    table = read_table(path)
    table[utterance] = value
    write_table(path, table)


def change_device(folder: Path) -> None:
    change_row(folder / "utt2device", "spk0-0", "far")


def change_speaker(folder: Path) -> None:
    change_row(folder / "utt2spk", "spk3-0", "spk4")
    (folder / "trials").unlink()


def add_trials(folder: Path) -> None:
    shutil.copyfile(folder / "trials", folder / "trials_2")


def add_rejected(folder: Path) -> None:
    rejected = {"~0": ("/a b", "its name has several lines")}
    write_rejected(folder, rejected)


CHANGES = {
    "trials": add_trials,
    "utt2spk": change_speaker,
    "conditions": change_device,
    "enrolment": lambda folder: (folder / "enroll.map").unlink(),
    "a recording": replace_recording,
    "the time of a recording": change_time,
    "utt2dur is missing": lambda folder: (folder / "utt2dur").unlink(),
    "utt2dur is damaged": (
        lambda folder: (folder / "utt2dur").write_text("spk0-0 1\n")
    ),
    "the record is damaged": (
        lambda folder: (folder / ".checked").write_bytes(b"\xff\0")
    ),
    "files that prepare.py left out": add_rejected,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_checked_again(folder, checks, name):
    allowed = ("--allow-rejected", "0.2")
    assert checks(folder, *allowed)
    assert not checks(folder, *allowed)
    CHANGES[name](folder)
    assert checks(folder, *allowed)
    assert not checks(folder, *allowed)


def test_other_options_and_other_folders_are_checked_again(folder, checks, tmp_path):
    other = write_voices(
        tmp_path / "data/train",
        speakers=[7, 8],
        seconds=[0.5],
        check=False,
    )
    assert checks(folder)
    assert not checks(folder)
    assert checks(folder, "--allow-rejected", "0.1")
    assert checks(folder, other)
    assert not checks(other, folder)
    assert checks(folder)
    assert not checks(folder)
    with pytest.raises(ValueError, match="Hz"):
        checks(folder, "--sample-rate", "8000")
    assert checks(folder), "a check that fails leaves no record of an earlier one"


def test_both_checks_of_a_recipe_are_kept(folder, checks):
    assert checks(folder)
    assert checks(folder, "--decode")
    assert not checks(folder)
    assert not checks(folder, "--decode")
    change_device(folder)
    assert checks(folder, "--decode")
    assert checks(folder)
    assert not checks(folder)
    assert not checks(folder, "--decode")


def test_a_recording_that_only_decoding_rejects(folder, checks):
    """A check of headers that is forced takes it back: it must be decoded again."""
    assert checks(folder)
    path = recording(folder, "spk2-0")
    (folder / "trials").unlink()
    # in the first frame: the end is looked at in any case
    content = bytearray(path.read_bytes())
    first = len(content) // 4
    content[first : first + 200] = bytes(200)
    path.write_bytes(content)
    assert checks(folder)
    assert checks(folder, "--decode", "--allow-rejected", "0.2")
    assert read_rejected(folder).keys() == {"spk2-0"}
    assert not checks(folder)
    assert not checks(folder, "--decode", "--allow-rejected", "0.2")
    assert read_rejected(folder).keys() == {"spk2-0"}
    assert checks(folder, "--force")
    assert not read_rejected(folder)
    assert checks(folder, "--decode", "--allow-rejected", "0.2")
    (folder / "rejected.tsv").unlink()
    assert checks(folder, "--decode", "--allow-rejected", "0.2")
    assert read_rejected(folder).keys() == {"spk2-0"}


def test_rejections_of_a_packing_are_not_those_of_the_check(folder, checks):
    (folder / "trials").unlink()
    assert checks(folder)
    path = recording(folder, "spk2-0")
    stat = path.stat()
    # damaged, of the same size and time, so only reading all of it shows the fault
    content = path.read_bytes()[:-200]
    path.write_bytes(content.ljust(stat.st_size, b"\0"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    pack.main(
        [
            str(folder),
            "--allow-rejected",
            "0.2",
            "--num-workers",
            "1",
        ]
    )
    assert read_rejected(folder).keys() == {"spk2-0"}
    assert not checks(folder)
    assert read_rejected(folder).keys() == {"spk2-0"}


def test_a_list_that_is_refused_is_refused_again(folder, checks):
    trials = folder / "trials"
    lines = trials.read_text().splitlines(keepends=True)
    with trials.open("a") as file:
        file.write(lines[0])
    for _ in range(2):
        with pytest.raises(ValueError, match="trials"):
            checks(folder)


def test_data_of_another_user_that_is_done_needs_no_lock(folder, checks):
    (folder.parent / ".lock").touch()
    assert checks(folder)
    assert checks(folder, "--decode")
    pack.main([str(folder), "--num-workers", "1"])
    for lock in (folder.parent / ".lock", folder / LOCK):
        lock.unlink()
        # opening it fails as without permission
        lock.mkdir()
    before = state(folder)
    assert not checks(folder)
    assert not checks(folder, "--decode")
    pack.main([str(folder), "--num-workers", "1"])
    assert state(folder) == before

    with refuses(str(folder.parent), "cannot be written"):
        checks(folder, "--force")
    with refuses(str(folder.parent), "cannot be written"):
        checks(folder, "--decode", "--force")
    with refuses(str(folder.parent), "cannot be written"):
        pack.main([str(folder), "--codec", "flac", "--num-workers", "1"])


def test_a_check_that_fails_is_not_remembered_as_the_one_before(folder, checks):
    assert checks(folder)
    paths = read_table(folder / "wav.scp")
    path = Path(next(iter(paths.values())))
    stat = path.stat()
    # a damaged header, of the same size and time
    path.write_bytes(b"x" * stat.st_size)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with refuses(path):
        checks(folder, "--force")
    with refuses(path):
        checks(folder)


def run_in_background(main, *arguments: object):
    command = [*map(str, arguments), "--num-workers", "1"]
    process = FORK.Process(target=main, args=(command,))
    process.start()
    return process


def test_of_two_checks_the_second_waits_and_finds_it_done(folder, monkeypatch):
    calls = FORK.Value("i", 0)
    whole = check.check_data_dirs

    def count(*args, **options):
        with calls.get_lock():
            calls.value += 1
        time.sleep(0.5)
        return whole(*args, **options)

    monkeypatch.setattr(check, "check_data_dirs", count)
    processes = [run_in_background(check.main, folder) for _ in range(3)]
    for process in processes:
        process.join(60)
    for process in processes:
        assert process.exitcode == 0
    assert calls.value == 1


@pytest.mark.parametrize("main", [check.main, pack.main], ids=["check", "pack"])
def test_a_check_and_a_packing_wait_for_prepare(folder, main, tmp_path):
    """The folder is replaced while they wait; they work on the new one."""
    spare = shutil.copytree(folder, tmp_path / "spare")
    check.main([str(folder), "--num-workers", "1"])
    with locked(folder.parent / ".lock"):  # as a prepare.py
        process = run_in_background(main, folder)
        process.join(0.7)
        assert process.is_alive()
        shutil.rmtree(folder)
        speakers = {}
        for utterance, speaker in read_table(spare / "utt2spk").items():
            if speaker < "spk2":
                speakers[utterance] = speaker
        write_table(folder / "utt2spk", speakers)
        wavs = read_table(spare / "wav.scp")
        remaining = {utterance: wavs[utterance] for utterance in speakers}
        write_table(folder / "wav.scp", remaining)
        if main is pack.main:
            check.check_data_dirs([folder])
    process.join(60)
    assert process.exitcode == 0
    durations = read_table(folder / "utt2dur")
    assert durations.keys() == speakers.keys()
    is_packed = (folder / "shards").exists()
    assert is_packed == (main is pack.main)


def test_the_check_of_a_killed_process_is_done_by_the_next(folder, checks, monkeypatch):
    started = FORK.Event()

    def hang(*_args, **_options):
        started.set()
        time.sleep(60)

    with monkeypatch.context() as patch:
        patch.setattr(check, "check_data_dirs", hang)
        process = run_in_background(check.main, folder)
        assert started.wait(30)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert checks(folder)
    assert not checks(folder)


def test_every_recording_is_asked_for_its_time_once(folder, monkeypatch):
    asked = []
    whole = checked.done.stamps

    def stamps(paths):
        asked.append(paths)
        return whole(paths)

    monkeypatch.setattr(checked.done, "stamps", stamps)
    for _ in range(2):
        check.main([str(folder), "--num-workers", "1"])
    paths = list(read_table(folder / "wav.scp").values())
    assert asked == [paths, paths]
