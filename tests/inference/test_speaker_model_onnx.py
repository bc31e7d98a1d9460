"""The Python API and `speakerlab embed` by onnxruntime: a network of three numbers, made by hand.

That exported models equal PyTorch's is tested where they are exported.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx
import pytest
from models_on_disk import CALIBRATION
from onnx import TensorProto, helper
from refusals import refuses
from voices import RATE, make_wave

import speakerlab
from speakerlab.bin import embed
from speakerlab.data import audio
from speakerlab.inference.onnx_model import Facts, OnnxModel
from speakerlab.scoring.embeddings import EmbeddingTable


def write_network(path: Path, **more) -> None:
    """emb_B3: mean, mean absolute value and mean square of the wave."""
    wave = helper.make_tensor_value_info("wave", TensorProto.FLOAT, ["B", "S"])
    output = helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["B", 3])
    nodes = [
        helper.make_node("Abs", ["wave"], ["size"]),
        helper.make_node("Mul", ["wave", "wave"], ["square"]),
        *(
            helper.make_node("ReduceMean", [name, "axes"], [f"mean_{name}"], keepdims=1)
            for name in ("wave", "size", "square")
        ),
        helper.make_node(
            "Concat", ["mean_wave", "mean_size", "mean_square"], ["embedding"], axis=1
        ),
    ]
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(nodes, "by hand", [wave], [output], [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    facts = Facts(
        sample_rate=RATE,
        embed_dim=3,
        min_samples=720,
        max_samples=RATE,
        sha256="ab" * 32,
        architecture="by hand",
        frontend={},
        **more,
    )
    helper.set_model_props(model, facts.to_texts())
    onnx.save(model, str(path))


def wanted(wave_S: np.ndarray) -> np.ndarray:
    wave_S = wave_S / np.float64(32768)
    return np.array([wave_S.mean(), np.abs(wave_S).mean(), (wave_S**2).mean()])


@pytest.mark.parametrize("num_samples", [100, 5000, 16000, 40000])
def test_an_onnx_file_is_opened_by_its_ending(tmp_path, num_samples):
    write_network(tmp_path / "model.onnx")
    model = speakerlab.load(tmp_path / "model.onnx")
    assert isinstance(model.runtime, OnnxModel)
    assert (model.embed_dim, model.sha256) == (3, "ab" * 32)
    wave_S = make_wave(0, 0, 3.0)[:num_samples]
    heard_S = np.resize(wave_S, max(num_samples, 720))  # short ones are repeated
    if num_samples == 40000:  # three windows of 13333; what is left over is dropped
        heard_S = np.delete(heard_S, 13333)
    emb_D = model.embed(wave_S)
    assert emb_D.dtype == np.float32
    assert np.allclose(emb_D, wanted(heard_S), rtol=1e-5, atol=1e-8)


def test_vad_and_calibration_come_with_the_file(tmp_path):
    vad = {"range_db": 20.0, "floor_dbfs": -50.0}
    write_network(tmp_path / "a.onnx", vad=vad, calibration=asdict(CALIBRATION))
    model = speakerlab.load(tmp_path / "a.onnx")
    speech_S = make_wave(0, 0, 0.4)
    wave_S = np.concatenate([speech_S, np.zeros(8000, np.int16)])
    kept_S = np.concatenate([speech_S, np.zeros(3 * 320, np.int16)])  # three frames more
    assert np.allclose(model.embed(wave_S), wanted(kept_S), rtol=1e-5, atol=1e-8)
    assert model.verify(wave_S, speech_S).threshold == 0.5


def test_embedding_files_by_onnx(tmp_path):
    write_network(tmp_path / "a.onnx")
    audio.write(tmp_path / "x.wav", make_wave(0, 0, 0.5), RATE)
    words = [str(tmp_path / "x.wav"), "--model", str(tmp_path / "a.onnx"), "--runtime"]
    embed.main([*words, "onnx", "--out", str(tmp_path / "out")])
    table = EmbeddingTable.load(tmp_path / "out")
    assert table.model_sha256 == "ab" * 32
    assert np.allclose(table.emb_ND[0], wanted(make_wave(0, 0, 0.5)), rtol=1e-5, atol=1e-8)
    with refuses("--runtime", "a.onnx runs with onnx"):
        embed.main([*words, "torch", "--out", str(tmp_path / "out")])


def test_only_the_cpu(tmp_path):
    write_network(tmp_path / "a.onnx")
    with refuses("device", "cuda"):
        speakerlab.load(tmp_path / "a.onnx", device="cuda")
