"""Stored frames of a teacher: files, and the frames of a crop."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.data.target_frames import join_frames, open_frames, write_frames

FACTS = {"model_sha256": "a", "precision": "fp32"}
NUM_CHANNELS = 3
# Samples of the utterances, and their frames.
NUM_SAMPLES = np.array([1000, 400, 80])
NUM_FRAMES = [100, 40, 8]


def frames_of(utterance: int) -> np.ndarray:
    """Return frames_CT that tell utterance, channel and time."""
    time_T = np.arange(NUM_FRAMES[utterance])
    channel_C1 = np.arange(NUM_CHANNELS)[:, None]
    return (1000 * utterance + 200 * channel_C1 + time_T).astype(np.float16)


@pytest.fixture
def stored(tmp_path):
    """Frames in two files, which hold the utterances in another order."""
    rows_of_files = [[2, 0], [1]]
    files = []
    for number, rows in enumerate(rows_of_files):
        path = tmp_path / f"{number}.safetensors"
        emb_UD = np.array([[row, row] for row in rows], dtype=np.float32)
        write_frames(path, [frames_of(row) for row in rows], emb_UD, FACTS)
        file = open_frames(path)
        assert file.facts == FACTS
        assert file.emb_UD.tolist() == emb_UD.tolist()
        files.append(file)
    return join_frames(files, rows_of_files, num_samples_N=NUM_SAMPLES, crop_frames=20)


@pytest.mark.parametrize(
    ("row", "first_sample", "first_frame"),
    [
        (0, 0, 0),
        (0, 500, 50),
        (0, 999, 80),  # the last crop ends with the last frame
        (1, 107, 11),
        (1, 399, 20),
    ],
)
def test_a_crop_gets_the_frames_of_its_place(stored, row, first_sample, first_frame):
    frames_CT = stored.read(row, first_sample)
    expected_CT = frames_of(row)[:, first_frame : first_frame + 20]
    np.testing.assert_array_equal(frames_CT, expected_CT)


def test_frames_of_a_short_utterance_are_repeated(stored):
    frames_CT = stored.read(2, 0)
    expected_CT = np.tile(frames_of(2), 3)[:, :20]
    np.testing.assert_array_equal(frames_CT, expected_CT)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_frames_that_float16_does_not_hold_are_refused(tmp_path, value):
    with np.errstate(over="ignore"):
        frames_CT = np.array([[0.0, value]]).astype(np.float16)
    emb_UD = np.zeros((1, 2), dtype=np.float32)
    path = tmp_path / "a.safetensors"
    with refuses(str(path), "too large for float16"):
        write_frames(path, [frames_CT], emb_UD, FACTS)
    assert open_frames(path) is None


@pytest.mark.parametrize("content", [b"", b"nothing", bytes(1000)])
def test_a_damaged_file_counts_as_missing(tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    assert open_frames(path) is None
