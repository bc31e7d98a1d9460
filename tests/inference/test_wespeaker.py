"""Exports in WeSpeaker's format, run as the programs that take WeSpeaker's models run them."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from exported_models import (
    RATE,
    XVECTOR,
    publish_model,
    require_close,
    with_each_model,
    write_waves,
)
from refusals import refuses
from voices import make_wave

import speakerlab
from speakerlab.bin import export as command
from speakerlab.data.convert import read_wave
from speakerlab.inference.wespeaker import export_wespeaker

ROOT = Path(__file__).parents[2]
OVERLAY = [ROOT / "conf/features/wespeaker.yaml"]
SPEECH = ROOT.parent / "shared/data/librispeech-mini/test-other"


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> list[Path]:
    waves = [make_wave(speaker, 1, 1.0 + 0.517 * speaker) for speaker in range(3)]
    return write_waves(tmp_path_factory.mktemp("speech"), waves)


def read(path: Path) -> np.ndarray:
    """Read a wave in [-1, 1]."""
    return read_wave(str(path), sample_rate=RATE)


def their_features(wave_S: np.ndarray) -> np.ndarray:
    """What wespeaker/bin/infer_onnx.py and pyannote.audio compute, feats_1TF."""
    pytest.importorskip("torchaudio")
    from torchaudio.compliance import kaldi

    feats_TF = kaldi.fbank(
        torch.from_numpy(wave_S)[None] * (1 << 15),
        num_mel_bins=80,
        frame_length=25,
        frame_shift=10,
        dither=0.0,
        sample_frequency=RATE,
        window_type="hamming",
        use_energy=False,
    )
    feats_TF = feats_TF - feats_TF.mean(0)
    return feats_TF[None].numpy()


@with_each_model
def test_a_program_with_its_own_features_has_our_embeddings(tmp_path, speech, model):
    exp = publish_model(tmp_path, model, layers=OVERLAY)
    file = tmp_path / "speaker.onnx"
    command.main([str(exp), "--format", "wespeaker", "--out", str(file)])
    session = onnxruntime.InferenceSession(str(file))
    (feats,) = session.get_inputs()
    assert (feats.name, feats.shape) == ("feats", ["batch", "frames", 80])
    (embs,) = session.get_outputs()
    assert (embs.name, embs.shape) == ("embs", ["batch", 12])

    ours = speakerlab.load(exp)
    for path in speech:
        (emb_1D,) = session.run(["embs"], {"feats": their_features(read(path))})
        require_close(emb_1D[0], ours.embed(path))

    # Too few frames give NaN, by which pyannote.audio knows them; a batch has any size.
    rng = np.random.default_rng(0)
    needed = max(9, ours.runtime.embedder.backbone.min_frames)
    for num_frames in (1, 2, needed - 1, needed, needed + 1):
        feats_BTF = rng.standard_normal((3, num_frames, 80)).astype(np.float32)
        (emb_BD,) = session.run(["embs"], {"feats": feats_BTF})
        assert emb_BD.shape == (3, 12)
        assert np.isnan(emb_BD).all() == (num_frames < needed)
        assert np.isfinite(emb_BD).all() == (num_frames >= needed)


@pytest.mark.slow
def test_pyannote_audio_has_our_embeddings(tmp_path, speech):
    pytest.importorskip("pyannote.audio")
    from pyannote.audio.pipelines.speaker_verification import (
        ONNXWeSpeakerPretrainedSpeakerEmbedding,
    )

    exp = publish_model(tmp_path, XVECTOR, layers=OVERLAY)
    file = tmp_path / "speaker.onnx"
    export_wespeaker(exp, file)
    get_embedding = ONNXWeSpeakerPretrainedSpeakerEmbedding(str(file))
    assert get_embedding.dimension == 12
    # The fewest frames of an x-vector, and the samples that they take.
    ours = speakerlab.load(exp)
    needed = ours.runtime.embedder.backbone.min_frames
    assert get_embedding.min_num_frames == needed
    assert get_embedding.min_num_samples == 400 + (needed - 1) * 160
    recordings = speech
    if SPEECH.exists():
        recordings = [*speech, *sorted(SPEECH.glob("*/*/*.flac"))[::30]]
    for path in recordings:
        wave_11S = torch.from_numpy(read(path))[None, None]
        require_close(get_embedding(wave_11S)[0], ours.embed(path))


@pytest.mark.slow
def test_other_features_need_a_comparison(tmp_path, speech, caplog):
    caplog.set_level("INFO")
    exp = publish_model(tmp_path, XVECTOR, layers=())
    file = tmp_path / "speaker.onnx"
    arguments = [str(exp), "--format", "wespeaker", "--out", str(file)]
    with refuses(str(exp), "window povey instead of hamming", "scale", "--test"):
        command.main(arguments)
    tests = ["--test", *map(str, speech)]
    with refuses(str(file), "cosine >= ", "must be 0.99", "--force"):
        command.main([*arguments, *tests])
    assert not file.exists()
    command.main([*arguments, *tests, "--force"])
    assert "with WeSpeaker's features" in caplog.text
    assert "on 3 recordings" in caplog.text
    assert file.exists()


@pytest.mark.parametrize(
    ("setting", "difference"),
    [
        ("frontend.num_mel_bins=40", "num_mel_bins 40 instead of 80"),
        ("frontend.sample_rate=8000", "sample_rate 8000 instead of 16000"),
        ("frontend.mean_norm=false", "mean_norm False instead of True"),
        ("frontend.kind=tfmel", "kind tfmel instead of kaldi"),
    ],
)
def test_features_that_cannot_fit_are_refused(tmp_path, speech, setting, difference):
    exp = publish_model(tmp_path, XVECTOR, setting, layers=OVERLAY)
    with refuses(str(exp), difference, "--format onnx"):
        export_wespeaker(exp, tmp_path / "a.onnx", test=speech, force=True)


@pytest.mark.slow
def test_a_model_that_removes_silence_is_warned_of(tmp_path, caplog):
    exp = publish_model(tmp_path, XVECTOR, "vad={}", layers=OVERLAY)
    export_wespeaker(exp, tmp_path / "a.onnx")
    assert "removes silence" in caplog.text


def test_options_that_contradict_are_refused(tmp_path):
    exp = publish_model(tmp_path, XVECTOR, layers=OVERLAY)
    out = ["--out", str(tmp_path / "a.onnx")]
    for arguments in (
        ["--format", "wespeaker", "--force"],
        ["--test", "a.wav"],
        ["--format", "wespeaker", "--int8", "--calibrate", "data"],
    ):
        with refuses("export"):
            command.main([str(exp), *out, *arguments])
