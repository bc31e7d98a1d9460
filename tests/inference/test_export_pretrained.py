"""Models over a pretrained one as ONNX files: waves in, the same embeddings out."""

from pathlib import Path

import numpy as np
import pytest
import torch
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


def test_a_model_too_large_for_a_file_is_refused_before_any_work(tmp_path, monkeypatch):
    model = write_model(tmp_path, "wavlm_large")
    monkeypatch.setattr(export, "MOST_BYTES", 1000)
    monkeypatch.setattr(torch.onnx, "export", None)
    with refuses("export", "an ONNX file at most 2"):
        export_onnx(model, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
