"""Checkpoints are whole, verified, and the newest intact one is used."""

import pytest
import torch

from speakerlab.training.checkpoint import Checkpoints, load_state


def state(value):
    return {"task": {"w": torch.full((3,), value)}, "optimizer": {"state": {}}, "step": value}


def latest(checkpoints):
    data = checkpoints.read_latest()
    assert data is not None
    return load_state(data)


def test_the_newest_is_read_and_old_ones_go(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step))
    assert [path.name for path in checkpoints.list()] == ["step_00000002", "step_00000003"]
    assert latest(checkpoints)["step"] == 3
    assert torch.equal(latest(checkpoints)["task"]["w"], torch.full((3,), 3.0))


@pytest.mark.parametrize("harm", ["cut", "flip", "gone"])
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path, harm, caplog):
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(1, state(1))
    file = checkpoints.save(2, state(2)) / "state.pt"
    data = bytearray(file.read_bytes())
    if harm == "cut":
        file.write_bytes(data[:-7])
    elif harm == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        file.unlink()
    assert latest(checkpoints)["step"] == 1
    assert "trying the one before" in caplog.text


def test_a_write_that_was_killed_leaves_nothing_that_counts(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(1, state(1))
    half = tmp_path / ".step_00000002"
    half.mkdir()
    (half / "state.pt").write_bytes(b"half")
    assert latest(checkpoints)["step"] == 1
    checkpoints.save(2, state(2))
    assert latest(checkpoints)["step"] == 2


def test_values_that_are_not_finite_are_refused_and_the_last_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(1, state(1))
    with pytest.raises(ValueError, match=r"step 2: state is not finite, got task\.w; nothing"):
        checkpoints.save(2, state(float("nan")))
    assert latest(checkpoints)["step"] == 1


def test_no_checkpoint_is_none(tmp_path):
    assert Checkpoints(tmp_path / "none", keep=1).read_latest() is None
