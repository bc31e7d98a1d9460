"""The segmentation model run by onnxruntime: recordings of any length and rate, wrong files."""

import sys

import numpy as np
import pytest
from refusals import refuses
from toy_segmentation import write_segmentation
from voices import RATE

from speakerlab.diarization.local_speakers import FRAME_SECONDS
from speakerlab.inference.segmentation import Segmentation


@pytest.fixture
def segmentation(tmp_path) -> Segmentation:
    path = write_segmentation(tmp_path / "s.onnx", sample_rate=RATE)
    return Segmentation(path)


def steps(*levels: tuple[float, float], rate: int = RATE) -> np.ndarray:
    """A tone of (mean amplitude, seconds), int16."""
    waves = []
    for level, seconds in levels:
        num_samples = round(seconds * rate)
        tone_S = np.sin(0.9 * np.arange(num_samples))
        # The mean of a rectified sine is 2 / pi of its peak.
        waves.append(np.pi / 2 * 32768 * level * tone_S)
    wave_S = np.concatenate(waves)
    return wave_S.astype(np.int16)


@pytest.mark.parametrize("rate", [RATE, 8000])
def test_windows_agree_on_a_long_recording(segmentation, rate):
    # Silence, one speaker, two speakers, silence.
    wave_S = steps(
        (0, 3.0),
        (0.1, 20.0),
        (0.3, 4.0),
        (0, 6.51),
        rate=rate,
    )
    local = segmentation.run(wave_S, sample_rate=rate)
    assert local.prob_WFC.shape == (11, 589, 7)
    assert local.start_W[-1] == 1394
    regions = local.speech()
    np.testing.assert_allclose(regions, [(3.0, 27.0)], atol=0.05)

    prob_two_T = local.mean(slice(4, 7))
    frames_of_two = np.flatnonzero(prob_two_T > 0.5)
    bounds = frames_of_two[[0, -1]] * FRAME_SECONDS
    np.testing.assert_allclose(bounds, (23.0, 27.0), atol=0.05)
    duration = len(prob_two_T) * FRAME_SECONDS
    assert duration == pytest.approx(33.5, abs=0.05)


@pytest.mark.parametrize("seconds", [1 / RATE, 0.03, 2.0, 9.99, 10.0, 10.01])
def test_short_recordings(segmentation, seconds):
    wave_S = steps((0.1, seconds))
    local = segmentation.run(wave_S, sample_rate=RATE)
    num_windows = 2 if seconds > 10 else 1
    assert len(local.start_W) == num_windows
    prob_voiced_T = local.mean(slice(1, 7))
    prob_two_T = local.mean(slice(4, 7))
    num_voiced = (prob_voiced_T > 0.5).sum()
    voiced_seconds = num_voiced * FRAME_SECONDS
    assert voiced_seconds == pytest.approx(seconds, abs=0.07)
    assert (prob_two_T < 0.5).all()


def write_other_graph(path) -> None:
    """Write an ONNX model that returns a matrix as it is."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    floats = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Identity", ["wave"], ["embedding"])],
        "other",
        [helper.make_tensor_value_info("wave", floats, ["N", 4])],
        [helper.make_tensor_value_info("embedding", floats, ["N", 4])],
    )
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    onnx.save_model(model, path)


def test_refusals(tmp_path, monkeypatch):
    missing = tmp_path / "none.onnx"
    with refuses(str(missing), "is no file", error=FileNotFoundError):
        Segmentation(missing)

    text_file = tmp_path / "text.onnx"
    text_file.write_text("segmentation")
    with refuses(str(text_file), "ONNX"):
        Segmentation(text_file)

    path = tmp_path / "other.onnx"
    for settings, shown in (
        ({"sample_rate": 8000}, "8000 Hz"),
        ({"num_classes": 8}, "(589, 8)"),
        ({"hop": 160}, "(994, 7)"),
    ):
        write_segmentation(path, **settings)
        with refuses(str(path), "segmentation-3.0", shown):
            Segmentation(path)
    write_other_graph(path)
    with refuses(str(path), "segmentation-3.0", "inputs and outputs"):
        Segmentation(path)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with refuses(str(path), "onnxruntime", "pip install", error=ModuleNotFoundError):
        Segmentation(path)
