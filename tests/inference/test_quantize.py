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
    data = make_data_dir(speakers=range(4))
    out = tmp_path / "m.int8.onnx"
    arguments = [
        str(exp),
        "--out",
        str(out),
        "--int8",
        "--calibrate",
        str(data),
    ]
    export.main(arguments)
    whole = speakerlab.load(exp, device="cpu")
    small = speakerlab.load(out)
    assert small.precision == "int8"
    assert small.sha256 == whole.sha256

    wave_S = make_wave(5, 0, 2.0)
    emb_D = small.embed(wave_S)
    whole_emb_D = whole.embed(wave_S)
    lengths = np.linalg.norm(emb_D) * np.linalg.norm(whole_emb_D)
    cosine = emb_D @ whole_emb_D / lengths
    assert quantize.MIN_COSINE < cosine < 1 - 1e-7

    # Five convolutions have 8-bit weights; what is after the pooling has none.
    graph = onnx.load(out).graph
    matrix_types = []
    types_by_name = {}
    for tensor in graph.initializer:
        types_by_name[tensor.name] = tensor.data_type
        if len(tensor.dims) > 1:
            matrix_types.append(tensor.data_type)
    int8 = onnx.TensorProto.INT8
    fp32 = onnx.TensorProto.FLOAT
    assert matrix_types.count(int8) == 5
    assert types_by_name["embedder.backbone.seg_1.weight"] == fp32
    (mel_name,) = [name for name in types_by_name if name.endswith("mel_CF")]
    assert types_by_name[mel_name] == fp32

    wave_BS = speech_like(2, 16000)
    emb_BD = OnnxModel(out).embed_window(wave_BS)
    assert emb_BD.shape == (2, 16)


@pytest.mark.slow
def test_what_is_too_far_is_not_written(exp, tmp_path, make_data_dir, monkeypatch):
    # More than 8 bits can keep.
    monkeypatch.setattr(quantize, "MIN_COSINE", 0.9999999)
    data = make_data_dir(speakers=[0, 1])
    out = tmp_path / "m.onnx"
    with refuses(str(out), "cosine"):
        quantize.export_int8(exp, out, data_dir=data)
    assert not out.exists()


def test_what_is_refused(exp, tmp_path, make_data_dir):
    out = tmp_path / "m.onnx"
    arguments = [str(exp), "--out", str(out)]
    for options in (["--int8"], ["--calibrate", "data"]):
        with refuses("export", "--calibrate"):
            export.main([*arguments, *options])

    # `load` takes only this ending.
    with refuses("--out", "m.txt", ".onnx"):
        export.main([str(exp), "--out", str(tmp_path / "m.txt")])

    # Too short: 16 frames are 0.175 s.
    data = make_data_dir(speakers=[0, 1], seconds=[0.15])
    with refuses(str(data), "2800 samples, got 0"):
        quantize.export_int8(exp, out, data_dir=data)
