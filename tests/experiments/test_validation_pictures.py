"""What TensorBoard shows of a real validation: its DET curve and its embeddings."""

import io
import logging
import sys

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from voices import RATE

from speakerlab.data.manifest import read_manifest
from speakerlab.experiments.validation import Validation, _log_once, pictures_of
from speakerlab.training.distributed import start_ranks
from speakerlab.training.monitor import Monitor

BLUE = (0x1F, 0x5F, 0xA8)  # of the first curve


@pytest.fixture
def validation(make_data_dir, make_embedder):
    """Of two speakers with two utterances each, and two with one, whose halves count."""
    folders = [make_data_dir("two", speakers=[0, 1], seconds=[1.0, 1.2])]
    folders.append(make_data_dir("one", speakers=[2, 3], seconds=[1.6]))
    found = Validation(read_manifest(folders, sample_rate=RATE))
    assert pictures_of(found) is None  # it was not run yet
    assert 0 <= found.run(make_embedder(), start_ranks(timeout_minutes=1))["eer"] <= 1
    return found


def test_names_belong_to_their_embeddings(validation):
    shown = pictures_of(validation)
    assert shown is not None and np.array_equal(shown.emb_ND, validation.emb_ND)
    ids = ["spk0-0", "spk0-1", "spk1-0", "spk1-1", "spk2-0", "spk2-0", "spk3-0", "spk3-0"]
    assert len(shown.emb_ND) == 8 and sorted(shown.utterances) == ids
    assert list(shown.speakers) == [name.partition("-")[0] for name in shown.utterances]


def test_a_monitor_writes_the_curve(validation, tmp_path):
    pytest.importorskip("matplotlib")
    monitor = Monitor(
        tmp_path,
        total_steps=9,
        every_seconds=9,
        pictures=lambda: pictures_of(validation),
        picture_seconds=0,
    )
    monitor.begin(0)
    monitor.valid_row(7, {"eer": 0.5})
    monitor.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (image,) = events.Images("valid/det")
    pixels = np.array(Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB"))
    assert (image.step, image.height, image.width) == (7, *pixels.shape[:2])
    assert (np.abs(pixels.astype(int) - BLUE).max(axis=2) <= 4).sum() > 500
    assert (tmp_path / "tensorboard" / "projector_config.pbtxt").exists()


def test_without_matplotlib_there_are_points_and_one_line(validation, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _log_once.cache_clear()
    caplog.set_level(logging.INFO)
    for _ in range(2):
        shown = pictures_of(validation)
        assert shown is not None and shown.det_png is None and len(shown.emb_ND) == 8
    lines = [line for line in caplog.messages if "DET" in line]
    assert lines == [
        "TensorBoard: no DET curve: plot_det: matplotlib is not installed; pip install matplotlib"
    ]
