"""The segmentation model run by onnxruntime: recordings of any length and rate, wrong files."""

import sys

import numpy as np
import pytest
from models_on_disk import publish_xvector
from refusals import refuses
from toy_segmentation import write_segmentation
from voices import RATE

from speakerlab.diarization.overlap import FRAME_SECONDS
from speakerlab.inference.export import export_onnx
from speakerlab.inference.segmentation import Segmentation


@pytest.fixture
def segmentation(tmp_path) -> Segmentation:
    return Segmentation(write_segmentation(tmp_path / "s.onnx", sample_rate=RATE))


def steps(*levels: tuple[float, float], rate: int = RATE) -> np.ndarray:
    """A tone of (mean amplitude, seconds), int16."""
    waves = [
        np.pi / 2 * 32768 * level * np.sin(0.9 * np.arange(round(seconds * rate)))
        for level, seconds in levels
    ]
    return np.concatenate(waves).astype(np.int16)


@pytest.mark.parametrize("rate", [RATE, 8000])
def test_windows_agree_on_a_long_recording(segmentation, rate):
    wave_S = steps((0, 3.0), (0.1, 20.0), (0.3, 4.0), (0, 6.51), rate=rate)
    local = segmentation.run(wave_S, sample_rate=rate)
    assert local.prob_WFC.shape == (11, 589, 7) and local.start_W[-1] == 1394
    np.testing.assert_allclose(local.speech(), [(3.0, 27.0)], atol=0.05)
    two_T = local.mean(slice(4, 7))
    found = np.flatnonzero(two_T > 0.5)[[0, -1]] * FRAME_SECONDS
    np.testing.assert_allclose(found, (23.0, 27.0), atol=0.05)
    assert len(two_T) * FRAME_SECONDS == pytest.approx(33.5, abs=0.05)


@pytest.mark.parametrize("seconds", [1 / RATE, 0.03, 2.0, 9.99, 10.0, 10.01])
def test_short_recordings(segmentation, seconds):
    local = segmentation.run(steps((0.1, seconds)), sample_rate=RATE)
    assert len(local.start_W) == (2 if seconds > 10 else 1)
    voiced = (local.mean(slice(1, 7)) > 0.5).sum() * FRAME_SECONDS
    assert voiced == pytest.approx(seconds, abs=0.07)
    assert (local.mean(slice(4, 7)) < 0.5).all()


def test_refusals(tmp_path, monkeypatch):
    with refuses(str(tmp_path / "none.onnx"), "no such file", error=FileNotFoundError):
        Segmentation(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("segmentation")
    with refuses(str(tmp_path / "text.onnx"), "ONNX"):
        Segmentation(tmp_path / "text.onnx")
    path = tmp_path / "other.onnx"
    for settings, shown in (
        ({"sample_rate": 8000}, "8000 Hz"),
        ({"num_classes": 8}, "(589, 8)"),
        ({"hop": 160}, "(994, 7)"),
    ):
        write_segmentation(path, **settings)
        with refuses(str(path), "segmentation-3.0", shown):
            Segmentation(path)
    path = export_onnx(publish_xvector(tmp_path / "exp"), tmp_path / "speakers.onnx")
    with refuses(str(path), "segmentation-3.0", "inputs and outputs"):
        Segmentation(path)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with refuses(str(path), "onnxruntime", "pip install", error=ModuleNotFoundError):
        Segmentation(path)
