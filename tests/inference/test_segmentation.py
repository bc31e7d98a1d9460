"""The segmentation model run by onnxruntime: recordings of any length and rate, wrong files."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from refusals import refuses
from toy_segmentation import write_segmentation
from voices import RATE

from speakerlab.diarization.local_speakers import FRAME_SECONDS
from speakerlab.inference import segmentation as segmentation_module
from speakerlab.inference.segmentation import Segmentation, TorchRuntime
from speakerlab.models.pyannet import PyanNet


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


@pytest.fixture
def torch_segmentation() -> Segmentation:
    """A network with random weights, run by torch on a CPU."""
    torch.manual_seed(0)
    sizes = {"num_filters": 8, "channels": 6, "lstm_layers": 2, "lstm_dim": 5}
    network = PyanNet(**sizes, linear_layers=1, linear_dim=4, dropout=0.0).eval()
    runtime = TorchRuntime.__new__(TorchRuntime)
    runtime.device = torch.device("cpu")
    runtime._segmenter = lambda wave_1S: network(wave_1S[:, :, None])
    segmentation = Segmentation.__new__(Segmentation)
    segmentation._runtime = runtime
    return segmentation


def test_windows_are_computed_at_the_same_time_each_with_one_thread(
    torch_segmentation, monkeypatch
):
    wave_S = steps((0.1, 8.0), (0.3, 5.0), (0.05, 9.0))
    (alone_FC,) = torch_segmentation.probabilities([wave_S[: 10 * RATE]])

    monkeypatch.setattr(segmentation_module, "available_cpus", lambda: 3)
    runtime = torch_segmentation._runtime
    num_threads: list[int] = []
    later_num_threads: list[int] = []
    threads_of_windows: set[int] = set()
    log_prob = runtime.log_prob

    def note_threads(window_S):
        # Python threads that start meanwhile have all threads of torch.
        later = threading.Thread(
            target=lambda: later_num_threads.append(torch.get_num_threads())
        )
        later.start()
        later.join()
        num_threads.append(torch.get_num_threads())
        threads_of_windows.add(threading.get_ident())
        return log_prob(window_S)

    monkeypatch.setattr(runtime, "log_prob", note_threads)
    num_before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        local = torch_segmentation.run(wave_S, sample_rate=RATE)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(num_before)

    assert num_threads == [1] * len(local.start_W)
    assert later_num_threads == [3] * len(local.start_W)
    assert len(threads_of_windows) > 1
    first_FC = local.prob_WFC[0]
    assert np.array_equal(first_FC, alone_FC.astype(np.float16))


def test_an_error_in_a_window_leaves_the_number_of_threads(torch_segmentation):
    num_threads = torch.get_num_threads()

    def fail(window_S):
        raise MemoryError("no memory")

    torch_segmentation._runtime.log_prob = fail
    with pytest.raises(MemoryError):
        torch_segmentation.run(steps((0.1, 12.0)), sample_rate=RATE)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == num_threads


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
