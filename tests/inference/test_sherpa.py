"""Exports for sherpa-onnx, loaded and run by that package itself."""

import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from models_on_disk import publish_small
from refusals import refuses
from torch import nn
from voices import make_noise, make_wave

import speakerlab
from speakerlab.bin import export as command
from speakerlab.config.embedder import build_embedder
from speakerlab.config.schema import load_config
from speakerlab.data import audio
from speakerlab.data.convert import read_wave
from speakerlab.inference.export import export_onnx
from speakerlab.inference.sherpa import export_sherpa

sherpa_onnx = pytest.importorskip("sherpa_onnx")

OVERLAY = [Path(__file__).parents[2] / "conf/features/sherpa.yaml"]
XVECTOR = "{name: xvector, args: {embed_dim: 12, hidden_channels: 16, stats_channels: 24}}"
CAMPPLUS = (
    "{name: campplus, args: {embed_dim: 12, init_channels: 16, growth_rate: 8, bn_size: 2, "
    "blocks: [2, 3, 2], head_channels: 4}}"
)
ERES2NET = "{name: eres2net, args: {embed_dim: 12, m_channels: 4, blocks: [1, 1, 1, 1]}}"
RESNET34 = "{name: resnet, args: {embed_dim: 12, depth: 34, m_channels: 4}}"


WAVES = [make_wave(row // 2, row % 2, 1.0 + 0.123 * row) for row in range(6)]  # three speakers


def publish(folder: Path, model: str, *settings: str, layers=OVERLAY) -> Path:
    """Write an experiment with random weights whose BatchNorm spreads these recordings apart."""
    config = load_config(layers, [f"model={model}", *settings])
    embedder = build_embedder(config)
    for module in embedder.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = None  # the mean over all batches
    with torch.no_grad():
        embedder.train()(torch.tensor(np.stack([w[:16000] for w in WAVES])) / 32768)
    return publish_small(folder / "exp", config, embedder.eval())


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("speech") / f"{row}.wav" for row in range(len(WAVES))]
    for path, wave_S in zip(paths, WAVES):
        audio.write(path, wave_S, 16000)
    return paths


SLOWER = [pytest.param(model, marks=pytest.mark.slow) for model in (ERES2NET, RESNET34)]


@pytest.mark.parametrize("model", [CAMPPLUS, *SLOWER])
def test_it_identifies_speakers_with_our_embeddings(tmp_path, speech, model):
    exp, file = publish(tmp_path, model), tmp_path / "speaker.onnx"
    assert export_sherpa(exp, file, test=speech) > 0.999999
    config = sherpa_onnx.SpeakerEmbeddingExtractorConfig(model=str(file), num_threads=1)
    assert config.validate()
    extractor, ours = sherpa_onnx.SpeakerEmbeddingExtractor(config), speakerlab.load(exp)
    manager, embs = sherpa_onnx.SpeakerEmbeddingManager(extractor.dim), []
    for path in speech:
        stream = extractor.create_stream()
        for part_S in np.split(read_wave(path, sample_rate=16000), [1000, 7777]):
            stream.accept_waveform(sample_rate=16000, waveform=part_S)
        stream.input_finished()
        assert extractor.is_ready(stream)
        embs.append(np.array(extractor.compute(stream)))
        wanted_D = ours.embed(path)
        assert np.abs(embs[-1] - wanted_D).max() < 1e-3 * np.abs(wanted_D).max()
    for path, emb_D in zip(speech[::2], embs[::2]):
        assert manager.add(path.stem, emb_D)
        ours.enroll(path.stem, path)
    assert manager.num_speakers == 3
    for path, emb_D in zip(speech[1::2], embs[1::2]):
        name, score = ours.identify(path).ranking[0]
        assert manager.search(emb_D, threshold=score - 1e-3) == name
        assert manager.search(emb_D, threshold=score + 1e-3) == ""
        assert manager.verify(name, emb_D, threshold=score - 1e-3)


def test_other_features_are_refused_with_the_cosine_unless_forced(tmp_path, speech, caplog):
    caplog.set_level("INFO")
    exp = publish(tmp_path, XVECTOR, layers=())
    file = tmp_path / "speaker.onnx"
    file.write_bytes(b"of before")
    words = [str(exp), "--out", str(file), "--format", "sherpa-onnx", "--test", *map(str, speech)]
    with refuses(str(file), "cosine >= 0.", "--force"):
        command.main(words)
    assert file.read_bytes() == b"of before" and len(list(tmp_path.iterdir())) == 2
    command.main([*words, "--force"])
    (cosine,) = re.findall(r"cosine >= ([-.0-9]+) .* on 6 recordings", caplog.text)
    assert float(cosine) < 0.99 and file.read_bytes() != b"of before"


@pytest.mark.parametrize("scale", [1.0, 32768.0])
def test_what_the_file_says(tmp_path, speech, scale):
    exp, file = publish(tmp_path, XVECTOR, f"frontend.scale={scale}"), tmp_path / "speaker.onnx"
    export_sherpa(exp, file, test=speech)
    session = onnxruntime.InferenceSession(str(file))
    facts = session.get_modelmeta().custom_metadata_map
    assert facts.pop("sha256") == speakerlab.load(exp).sha256 and facts.pop("producer")
    assert facts == {
        "framework": "3d-speaker",
        "output_dim": "12",
        "sample_rate": "16000",
        "normalize_samples": str(int(scale == 1.0)),
        "language": "not stated",
        "architecture": "xvector",
    }
    (features,), (embedding,) = session.get_inputs(), session.get_outputs()
    assert (features.name, features.shape) == ("features", ["batch", "frames", 80])
    assert (embedding.name, embedding.shape) == ("embedding", ["batch", 12])
    with refuses(str(file), "speakerlab export"):
        speakerlab.load(file)


def test_the_same_model_is_exported_with_its_front_end_too(tmp_path):
    exp = publish(tmp_path, XVECTOR)
    file = export_onnx(exp, tmp_path / "speaker.onnx")
    for num_samples in (2480, 2481, 31999):
        wave_S = make_noise(2.0)[0, :num_samples].numpy()
        wanted_D = speakerlab.load(exp).embed(wave_S)
        found_D = speakerlab.load(file).embed(wave_S)
        assert np.abs(found_D - wanted_D).max() < 1e-4 * np.abs(wanted_D).max()


def test_what_cannot_be_exported_is_refused_first(tmp_path, speech, monkeypatch):
    few = publish(tmp_path, XVECTOR, "frontend.num_mel_bins=40", layers=())
    with refuses(str(few), "40 mel bins", "sherpa.yaml"):
        export_sherpa(few, tmp_path / "a.onnx", test=speech)
    for words in (["--format", "sherpa-onnx"], ["--test", "a.wav"], ["--force"]):
        with refuses("export", "--test"):
            command.main([str(few), "--out", str(tmp_path / "a.onnx"), *words])
    monkeypatch.setitem(__import__("sys").modules, "sherpa_onnx", None)
    with pytest.raises(ModuleNotFoundError, match="sherpa_onnx"):
        export_sherpa(few, tmp_path / "a.onnx", test=speech)
