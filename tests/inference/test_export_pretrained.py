"""Models over a pretrained one as ONNX files: waves in, the same embeddings out."""

from pathlib import Path

import numpy as np
import pytest
from pretrained_models import write_pretrained
from refusals import refuses

import speakerlab
from speakerlab.checkpoints.published import publish
from speakerlab.config.build import build_embedder
from speakerlab.config.schema import load_config
from speakerlab.inference import export
from speakerlab.inference.export import export_onnx, speech_like

# Small pretrained model -> network over its layers.
NETWORKS = {
    "w2v_bert": "{name: adapter_mfa, args: {embed_dim: 16, adapter_dim: 8}}",
    "wavlm_large": "{name: mhfa, args: {embed_dim: 16, num_heads: 4}}",
    "hubert": "{name: xvector, args: {embed_dim: 16, hidden_channels: 16}}",
    "whisper": "{name: pmfa, args: {embed_dim: 16}}",
}


def write_model(folder: Path, name: str) -> Path:
    """Publish a small model with random weights over a pretrained one."""
    base = write_pretrained(folder / "base", name)
    settings = [f"model={NETWORKS[name]}", f"frontend={{name: ssl, model: {base}}}"]
    config = load_config([], settings)
    embedder = build_embedder(config).eval()
    publish(folder / "model", embedder=embedder, config=config, facts={})
    return folder / "model"


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_file_computes_what_the_model_does(tmp_path, name):
    model = write_model(tmp_path, name)
    file = export_onnx(model, tmp_path / "model.onnx")
    ours = speakerlab.load(model)
    exported = speakerlab.load(file)
    for num_samples in (900, 16000, 24080, 50000):
        wave_S = speech_like(1, num_samples)[0]
        expected_D = ours.embed(wave_S)
        error_D = np.abs(exported.embed(wave_S) - expected_D)
        assert error_D.max() < 1e-4 * np.abs(expected_D).max()


def data_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("model.onnx.*.data"))


@pytest.mark.slow
def test_weights_of_a_large_model_lie_beside_the_file(tmp_path, monkeypatch):
    """As for w2v-BERT 2.0, whose weights exceed what ONNX allows in one file."""
    file = tmp_path / "model.onnx"
    model = write_model(tmp_path, "wavlm_large")
    monkeypatch.setattr(export, "MOST_BYTES", 1000)
    export_onnx(model, file)
    (weights,) = data_files(tmp_path)
    assert file.stat().st_size < (tmp_path / weights).stat().st_size

    # They move together, and open anywhere.
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in (file.name, weights):
        (moved / name).write_bytes((tmp_path / name).read_bytes())
    wave_S = speech_like(1, 16000)[0]
    expected_D = speakerlab.load(model).embed(wave_S)
    emb_D = speakerlab.load(moved / file.name).embed(wave_S)
    assert np.abs(emb_D - expected_D).max() < 1e-4 * np.abs(expected_D).max()

    # Without them, the file is refused; another export leaves only its own.
    (moved / weights).unlink()
    with refuses(str(moved / file.name), "not a complete ONNX file"):
        speakerlab.load(moved / file.name)
    other = write_model(tmp_path / "other", "hubert")
    export_onnx(other, file)
    (others,) = data_files(tmp_path)
    assert others != weights

    # An export that fails keeps the weights of the file that stays.
    monkeypatch.setattr(export, "MIN_COSINE", 2.0)
    with refuses(str(file), "differs from PyTorch"):
        export_onnx(model, file)
    assert data_files(tmp_path) == [others]
