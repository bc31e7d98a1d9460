"""Exports for sherpa-onnx, loaded and run by that package itself."""

import re
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from exported_models import (
    XVECTOR,
    publish_model,
    require_close,
    with_each_model,
    write_waves,
)
from refusals import refuses
from voices import make_noise, make_wave

import speakerlab
from speakerlab.bin import export as command
from speakerlab.data.convert import read_wave
from speakerlab.inference.export import export_onnx
from speakerlab.inference.sherpa import export_sherpa

sherpa_onnx = pytest.importorskip("sherpa_onnx")

ROOT = Path(__file__).parents[2]
OVERLAY = [ROOT / "conf/features/sherpa.yaml"]

# Three speakers, two recordings each.
WAVES = []
for wave_number in range(6):
    speaker, take = divmod(wave_number, 2)
    duration = 1.0 + 0.123 * wave_number
    WAVES.append(make_wave(speaker, take, duration))


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> list[Path]:
    return write_waves(tmp_path_factory.mktemp("speech"), WAVES)


@with_each_model
def test_it_identifies_speakers_with_our_embeddings(tmp_path, speech, model):
    exp = publish_model(tmp_path, model, layers=OVERLAY)
    file = tmp_path / "speaker.onnx"
    assert export_sherpa(exp, file, test=speech) > 0.999999
    config = sherpa_onnx.SpeakerEmbeddingExtractorConfig(
        model=str(file),
        num_threads=1,
    )
    assert config.validate()
    extractor = sherpa_onnx.SpeakerEmbeddingExtractor(config)
    manager = sherpa_onnx.SpeakerEmbeddingManager(extractor.dim)
    ours = speakerlab.load(exp)

    # Waves arrive in three parts, as in a stream.
    embs = []
    for path in speech:
        stream = extractor.create_stream()
        wave_S = read_wave(path, sample_rate=16000)
        for part_S in np.split(wave_S, [1000, 7777]):
            stream.accept_waveform(sample_rate=16000, waveform=part_S)
        stream.input_finished()
        assert extractor.is_ready(stream)
        emb_D = np.array(extractor.compute(stream))
        require_close(emb_D, ours.embed(path), 1e-3)
        embs.append(emb_D)

    # The first recording of each speaker is enrolled, the second identified.
    for path, emb_D in zip(speech[::2], embs[::2]):
        assert manager.add(path.stem, emb_D)
        ours.enroll(path.stem, path)
    assert manager.num_speakers == 3
    for path, emb_D in zip(speech[1::2], embs[1::2]):
        identified = ours.identify(path)
        name, score = identified.ranking[0]
        below = score - 1e-3
        above = score + 1e-3
        assert manager.search(emb_D, threshold=below) == name
        assert manager.search(emb_D, threshold=above) == ""
        assert manager.verify(name, emb_D, threshold=below)


@pytest.mark.slow
def test_other_features_are_refused_with_the_cosine_unless_forced(
    tmp_path, speech, caplog
):
    caplog.set_level("INFO")
    exp = publish_model(tmp_path, XVECTOR, layers=())
    file = tmp_path / "speaker.onnx"
    file.write_bytes(b"of before")
    arguments = [
        str(exp),
        "--out",
        str(file),
        "--format",
        "sherpa-onnx",
        "--test",
        *map(str, speech),
    ]
    with refuses(str(file), "cosine >= 0.", "--force"):
        command.main(arguments)
    assert file.read_bytes() == b"of before"
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    command.main([*arguments, "--force"])
    cosines = re.findall(r"cosine >= ([-.0-9]+) .* on 6 recordings", caplog.text)
    (cosine,) = cosines
    assert float(cosine) < 0.99
    assert file.read_bytes() != b"of before"


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 32768.0])
def test_what_the_file_says(tmp_path, speech, scale):
    exp = publish_model(
        tmp_path,
        XVECTOR,
        f"frontend.scale={scale}",
        layers=OVERLAY,
    )
    file = tmp_path / "speaker.onnx"
    export_sherpa(exp, file, test=speech)
    session = onnxruntime.InferenceSession(str(file))
    facts = session.get_modelmeta().custom_metadata_map
    sha256 = facts.pop("sha256")
    assert sha256 == speakerlab.load(exp).sha256
    assert facts.pop("producer")
    assert facts == {
        "framework": "3d-speaker",
        "output_dim": "12",
        "sample_rate": "16000",
        "normalize_samples": str(int(scale == 1.0)),
        "language": "not stated",
        "architecture": "xvector",
    }
    (features,) = session.get_inputs()
    assert features.name == "features"
    assert features.shape == ["batch", "frames", 80]
    (embedding,) = session.get_outputs()
    assert embedding.name == "embedding"
    assert embedding.shape == ["batch", 12]
    with refuses(str(file), "speakerlab export"):
        speakerlab.load(file)


@pytest.mark.slow
def test_the_same_model_is_exported_with_its_front_end_too(tmp_path):
    exp = publish_model(tmp_path, XVECTOR, layers=OVERLAY)
    file = export_onnx(exp, tmp_path / "speaker.onnx")
    noise_S = make_noise(2.0)[0].numpy()
    for num_samples in (2480, 2481, 31999):
        wave_S = noise_S[:num_samples]
        expected_D = speakerlab.load(exp).embed(wave_S)
        emb_D = speakerlab.load(file).embed(wave_S)
        require_close(emb_D, expected_D, 1e-4)


def test_what_cannot_be_exported_is_refused_first(tmp_path, speech, monkeypatch):
    few_bins = publish_model(
        tmp_path,
        XVECTOR,
        "frontend.num_mel_bins=40",
        layers=(),
    )
    out = tmp_path / "a.onnx"
    with refuses(str(few_bins), "40 mel bins", "sherpa.yaml"):
        export_sherpa(few_bins, out, test=speech)
    for arguments in (["--format", "sherpa-onnx"], ["--test", "a.wav"], ["--force"]):
        with refuses("export", "--test"):
            command.main([str(few_bins), "--out", str(out), *arguments])
    monkeypatch.setitem(sys.modules, "sherpa_onnx", None)
    with pytest.raises(ModuleNotFoundError, match="sherpa_onnx"):
        export_sherpa(few_bins, out, test=speech)
