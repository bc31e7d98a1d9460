"""An int8 file: near PyTorch, marked in the file, opened like any other, refused if too far."""

from pathlib import Path

import numpy as np
import pytest
from models_on_disk import publish_xvector
from refusals import refuses
from voices import make_wave

import speakerlab
from speakerlab.bin import export
from speakerlab.inference import quantize
from speakerlab.inference.export import speech_like
from speakerlab.inference.onnx_model import OnnxModel

onnx = pytest.importorskip("onnx")


@pytest.fixture
def exp(tmp_path: Path) -> Path:
    return publish_xvector(tmp_path / "exp")


@pytest.mark.slow
def test_int8_from_the_command_line(exp, tmp_path, make_data_dir):
    data, out = make_data_dir(speakers=range(4)), tmp_path / "m.int8.onnx"
    export.main([str(exp), "--out", str(out), "--int8", "--calibrate", str(data)])
    whole, small = speakerlab.load(exp, device="cpu"), speakerlab.load(out)
    assert (small.precision, small.sha256) == ("int8", whole.sha256)
    emb_D, wanted_D = (model.embed(make_wave(5, 0, 2.0)) for model in (small, whole))
    cosine = emb_D @ wanted_D / np.linalg.norm(emb_D) / np.linalg.norm(wanted_D)
    assert quantize.MIN_COSINE < cosine < 1 - 1e-7
    # Five convolutions have 8-bit weights; what is after the pooling has none.
    graph = onnx.load(out).graph
    types = [t.data_type for t in graph.initializer if len(t.dims) > 1]
    assert types.count(onnx.TensorProto.INT8) == 5
    seg_1 = [t for t in graph.initializer if t.name == "embedder.backbone.seg_1.weight"]
    assert [t.data_type for t in seg_1] == [onnx.TensorProto.FLOAT]
    mel = [t for t in graph.initializer if t.name.endswith("mel_CF")]
    assert [t.data_type for t in mel] == [onnx.TensorProto.FLOAT]
    assert OnnxModel(out).embed_window(speech_like(2, 16000)).shape == (2, 16)


@pytest.mark.slow
def test_what_is_too_far_is_not_written(exp, tmp_path, make_data_dir, monkeypatch):
    monkeypatch.setattr(quantize, "MIN_COSINE", 0.9999999)  # more than 8 bits can keep
    out = tmp_path / "m.onnx"
    with refuses(str(out), "cosine"):
        quantize.export_int8(exp, out, data_dir=make_data_dir(speakers=[0, 1]))
    assert not out.exists()


def test_what_is_refused(exp, tmp_path, make_data_dir):
    words = [str(exp), "--out", str(tmp_path / "m.onnx")]
    for more in (["--int8"], ["--calibrate", "data"]):
        with refuses("export", "--calibrate"):
            export.main([*words, *more])
    data = make_data_dir(speakers=[0, 1], seconds=[0.15])  # 16 frames are 0.175 s
    with refuses(str(data), "2800 samples, got 0"):
        quantize.export_int8(exp, tmp_path / "m.onnx", data_dir=data)
