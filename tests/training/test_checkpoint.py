"""Checkpoints are atomic and verified, written in the background; the newest intact one is read."""

import time

import pytest
import torch
from refusals import refuses

from speakerlab.training import checkpoint
from speakerlab.training.checkpoint import STATE, read_latest
from speakerlab.training.writer import CheckpointWriter


def state(step, attempt=0):
    weights = torch.full((3,), float(step))
    return {"task": {"w": weights}, "step": step, "attempt": attempt}


def save(folder, *steps, keep=3, **options):
    writer = CheckpointWriter(folder, keep=keep)
    for step in steps:
        writer.save(state(step), **options)
    writer.wait()
    return writer


def latest(folder):
    folder_and_data = read_latest(folder)
    assert folder_and_data is not None
    return checkpoint.load_state(folder_and_data[1])


def names(folder):
    return [path.name for path in checkpoint.list_checkpoints(folder)]


def test_the_newest_is_read_and_old_ones_go(tmp_path):
    assert read_latest(tmp_path / "none") is None
    save(tmp_path, 1, 2, 3, keep=2)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]
    expected = torch.full((3,), 3.0)
    assert torch.equal(latest(tmp_path)["task"]["w"], expected)


def test_the_best_is_kept_and_unscheduled_ones_are_removed(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=2)
    for step, eer, scheduled in [
        (1, 0.2, False),
        (2, 0.1, False),
        (3, None, True),
        (4, 0.3, True),
    ]:
        writer.save(state(step), valid=eer and {"eer": eer}, scheduled=scheduled)
    writer.save(state(5), scheduled=False)
    writer.save(state(6), scheduled=True)
    writer.wait()
    # the best, and the last two scheduled ones
    best = "step_00000002"
    assert names(tmp_path) == [best, "step_00000004", "step_00000006"]
    assert checkpoint.read_note(tmp_path / best).valid_eer == 0.1


def test_another_attempt_at_a_step_comes_after_the_first(tmp_path):
    writer = save(tmp_path, 7)
    writer.save(state(7, attempt=1), scheduled=False)
    writer.wait()
    assert names(tmp_path) == ["step_00000007", "step_00000007_attempt_1"]
    assert latest(tmp_path)["attempt"] == 1


@pytest.mark.parametrize("harm", ["cut", "flip", "gone", "no note"])
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path, harm, caplog):
    save(tmp_path, 1, 2)
    file = tmp_path / "step_00000002" / STATE
    data = bytearray(file.read_bytes())
    if harm == "cut":
        file.write_bytes(data[:-7])
    elif harm == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif harm == "gone":
        file.unlink()
    else:
        (file.parent / "note.json").unlink()
    assert latest(tmp_path)["step"] == 1
    assert "trying the previous one" in caplog.text
    assert str(file.parent) in caplog.text

    # without an intact checkpoint, a training must not begin again in this folder
    (tmp_path / "step_00000001" / STATE).unlink()
    with refuses(str(tmp_path), 2):
        read_latest(tmp_path)


def test_a_write_that_was_killed_leaves_nothing_that_counts(tmp_path):
    save(tmp_path, 1)
    # a temporary folder, which would have been renamed when it was whole
    half = tmp_path / ".step_00000002.abc"
    half.mkdir()
    (half / STATE).write_bytes(b"half")
    assert latest(tmp_path)["step"] == 1
    save(tmp_path, 2)
    assert latest(tmp_path)["step"] == 2
    assert not half.exists()


def test_the_state_at_the_call_is_written(tmp_path, monkeypatch):
    """`save` returns before a slow write ends, and later changes are not written."""
    slow = checkpoint.write_tensors

    def write_late(path, value):
        time.sleep(0.5)
        return slow(path, value)

    monkeypatch.setattr(checkpoint, "write_tensors", write_late)
    writer = CheckpointWriter(tmp_path, keep=1)
    values = state(1)
    began = time.monotonic()
    writer.save(values)
    assert time.monotonic() - began < 0.25
    values["task"]["w"].fill_(99)
    assert names(tmp_path) == []
    writer.wait()
    assert torch.equal(latest(tmp_path)["task"]["w"], torch.ones(3))
