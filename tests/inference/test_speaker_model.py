"""The Python API: the numbers of stage 5 from any kind of audio, decisions, enrolled speakers."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from models_on_disk import CALIBRATION, publish_small
from refusals import refuses
from voices import RATE, make_wave, manifest_of

import speakerlab
from speakerlab.checkpoints.published import load_published
from speakerlab.data import audio
from speakerlab.inference.batches import embed_pieces, utterance_pieces

CPU = torch.device("cpu")


@pytest.fixture
def open_small(tmp_path: Path, make_config, make_embedder):
    """open_small("vad={}", ..., calibration=None) -> the model at `tmp_path/exp`, by the API."""

    def make(*overrides: str, name: str = "exp", calibration=None):
        config, embedder = make_config(*overrides), make_embedder(*overrides)
        exp = publish_small(tmp_path / name, config, embedder, calibration)
        return speakerlab.load(exp, device="cpu")

    return make


@pytest.fixture
def wavs(tmp_path: Path) -> list[Path]:
    """Recordings of speakers 0 to 3, two each, of 1 s and 1.3 s by turns."""
    paths = []
    for speaker in range(4):
        for take in range(2):
            paths.append(tmp_path / f"s{speaker}-{take}.wav")
            audio.write(paths[-1], make_wave(speaker, take, 1.0 + 0.3 * take), RATE)
    return paths


def stage_5(exp: Path, path: Path) -> np.ndarray:
    """emb_D as `speakerlab extract` computes it."""
    embedder = load_published(exp).embedder.for_inference()
    return embed_pieces(embedder, utterance_pieces(manifest_of(path)), device=CPU)[0]


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("overrides", [(), ("vad={}",), ("model.max_seconds=0.5",)])
@pytest.mark.parametrize("seconds", [0.01, 1.0, 2.34567])
def test_a_file_gives_the_embedding_of_stage_5(open_small, tmp_path, overrides, seconds):
    model = open_small(*overrides)
    wave_S = make_wave(0, 0, seconds)
    wave_S[: len(wave_S) // 3] //= 1000  # silence, for the VAD
    audio.write(tmp_path / "a.wav", wave_S, RATE)
    emb_D = model.embed(tmp_path / "a.wav")
    assert emb_D.dtype == np.float32
    assert emb_D.shape == (model.embed_dim,) == (16,)
    wanted_D = stage_5(tmp_path / "exp", tmp_path / "a.wav")
    if "model.max_seconds=0.5" in overrides:  # a mean of windows, by numpy instead of torch
        assert relative_error(emb_D, wanted_D) < 1e-6
    else:
        assert np.array_equal(emb_D, wanted_D)
    assert np.array_equal(model.embed(wave_S), emb_D)
    assert np.array_equal(model.embed((tmp_path / "a.wav").read_bytes()), emb_D)


def test_many_are_each_as_alone_in_order(open_small, wavs):
    model = open_small("model.max_seconds=1.1")
    sources = [*wavs, make_wave(4, 0, 70.0), make_wave(4, 0, 0.01), wavs[0].read_bytes()]
    emb_ND = model.embed_many(sources)
    assert emb_ND.dtype == np.float32
    for source, emb_D in zip(sources, emb_ND):
        assert relative_error(emb_D, model.embed(source)) < 1e-5
    assert relative_error(emb_ND[0], emb_ND[2]) > 1e-2
    assert model.embed_many([]).shape == (0, 16)


def test_one_broken_among_many(open_small, wavs):
    model, sources = open_small(), [wavs[0], "nowhere.wav", wavs[1]]
    with refuses("nowhere.wav", error=FileNotFoundError):
        model.embed_many(sources)
    results = dict(model.embed_each(sources))
    assert sorted(results) == [0, 1, 2]
    assert isinstance(results[1], FileNotFoundError)
    assert np.array_equal(results[2], model.embed(wavs[1]))


def test_another_rate_is_given_for_arrays_and_read_from_files(open_small, tmp_path):
    model = open_small()
    wave_S = make_wave(0, 0, 2.0, 48000)
    soundfile.write(tmp_path / "a.flac", wave_S, 48000)
    emb_D = model.embed(tmp_path / "a.flac")
    assert np.array_equal(model.embed(wave_S, 48000), emb_D)
    assert np.array_equal(model.embed_many([wave_S], 48000)[0], emb_D)
    assert relative_error(model.embed(wave_S), emb_D) > 1e-2  # taken for 16 kHz
    assert relative_error(model.embed(make_wave(0, 0, 2.0)), emb_D) < 0.2  # much the same sound


def test_a_comparison_with_calibration(open_small, wavs):
    model = open_small(calibration=CALIBRATION)
    a, b = model.embed(wavs[0]), model.embed(wavs[4])
    score = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    result = model.verify(wavs[0], wavs[4])
    assert result.score == pytest.approx(score, abs=1e-6)
    assert result.llr == pytest.approx(10 * score - 5, abs=1e-4)
    assert (result.threshold, result.is_same) == (0.5, score >= 0.5)
    same = model.verify(wavs[0], str(wavs[0]))
    assert same.score == pytest.approx(1, abs=1e-6)
    assert same.is_same
    strict = model.verify(wavs[0], wavs[4], far=0.01)
    assert (strict.threshold, strict.is_same) == (0.9999, score >= 0.9999)
    with refuses("calibration", 0.03):
        model.verify(wavs[0], wavs[4], far=0.03)


def test_a_comparison_without_calibration_decides_nothing(open_small, wavs):
    model = open_small()
    result = model.verify(wavs[0], wavs[1])
    assert (result.llr, result.is_same, result.threshold) == (None, None, None)
    with refuses("model", "far=0.01"):
        model.verify(wavs[0], wavs[1], far=0.01)


def test_enrolled_speakers_are_found_again(open_small, wavs, tmp_path):
    model = open_small(calibration=CALIBRATION)
    with refuses("identify"):
        model.identify(wavs[0])
    model.enroll("ann", [wavs[0], wavs[1]])
    model.enroll("bob", wavs[4])
    units = [e / np.linalg.norm(e) for e in map(model.embed, wavs[:2])]
    mean = sum(units) / np.linalg.norm(sum(units))
    probe = model.embed(wavs[5])
    probe /= np.linalg.norm(probe)
    found = model.identify(wavs[5])
    scores = dict(found.ranking)
    assert scores["ann"] == pytest.approx(float(mean @ probe), abs=1e-6)
    bob = model.embed(wavs[4])
    assert scores["bob"] == pytest.approx(float(bob @ probe / np.linalg.norm(bob)), abs=1e-6)
    assert [row[1] for row in found.ranking] == sorted(scores.values(), reverse=True)
    assert found.threshold == 0.5
    assert found.is_known == (found.ranking[0][1] >= 0.5)
    model.save_speakers(tmp_path / "team.safetensors")
    again = speakerlab.load(tmp_path / "exp", device="cpu")
    again.load_speakers(tmp_path / "team.safetensors")
    assert again.identify(wavs[5]) == found
    again.enroll("ann", wavs[6])  # in place of the one that was
    assert sorted(again.speakers) == ["ann", "bob"]
    assert again.identify(wavs[6]).ranking[0] == ("ann", pytest.approx(1, abs=1e-6))


def test_nobody_is_named_below_the_threshold(open_small, wavs):
    model = open_small(calibration=CALIBRATION)
    model.enroll("ann", wavs[0])
    far_away = model.identify(wavs[6], far=0.01)
    assert far_away.ranking[0][1] < 0.9999
    assert (far_away.is_known, far_away.name) == (False, None)
    assert model.identify(wavs[0], far=0.01).name == "ann"
    undecided = open_small(name="b")
    undecided.enroll("ann", wavs[0])
    found = undecided.identify(wavs[6])
    assert (found.is_known, found.threshold, found.name) == (None, None, "ann")


def test_speakers_of_another_model_or_of_none_are_refused(open_small, wavs, tmp_path):
    model, other = open_small(name="a"), open_small("seed=1", name="b")
    model.enroll("ann", wavs[0])
    path = tmp_path / "team.safetensors"
    model.save_speakers(path)
    with refuses(str(path), model.sha256[:12], other.sha256[:12]):
        other.load_speakers(path)
    with refuses(str(tmp_path / "none"), error=FileNotFoundError):
        model.load_speakers(tmp_path / "none")
    for content in (b"junk", (tmp_path / "a" / "model" / "embedder.safetensors").read_bytes()):
        path.write_bytes(content)
        with refuses(str(path)):
            model.load_speakers(path)


def test_wrong_values_are_refused_in_one_line(open_small, wavs):
    model = open_small()
    emb_D = model.embed(wavs[0])
    for method, given, subject, value in (
        *(("compare", (emb_D, wrong), "compare", repr(wrong)) for wrong in ("a.wav", None)),
        ("compare", (emb_D, emb_D[:3]), "compare", (3,)),
        ("compare", (emb_D, [emb_D]), "compare", (1, 16)),
        ("embed", (make_wave(0, 0, 1.0), "16k"), "audio (ndarray)", "'16k'"),
        *(("embed_many", (wrong,), "sources", "") for wrong in ("a.flac", None)),
        *(("enroll", (name, wavs[0]), "enrol", repr(name)) for name in ("", None)),
        ("enroll", ("eve", []), "enrol", "eve"),
    ):
        with refuses(subject, value) as caught:
            getattr(model, method)(*given)
        assert "\n" not in str(caught.value), method
    with refuses("far", "'x'"):
        model.compare(emb_D, emb_D, far="x")
    assert model.compare(list(emb_D), torch.from_numpy(emb_D)).score == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("model", "options", "subject", "value"),
    [
        ("nowhere", {}, "nowhere", ""),
        ("hub:no-such-model", {}, "hub:no-such-model", ""),
        (None, {}, "model", None),
        (".", {"precision": "fp8"}, "precision", "fp8"),
        (".", {"precision": None}, "precision", None),
        ("exp", {"device": "tpu"}, "device", "tpu"),
        ("exp", {"device": "cuda"}, "device", "cuda"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    open_small, tmp_path, monkeypatch, model, options, subject, value
):
    open_small()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with refuses(subject, value, error=FileNotFoundError if model == "nowhere" else ValueError):
        speakerlab.load(model, **options)


def test_text_of_a_model_says_what_it_is(open_small, tmp_path):
    found = repr(open_small())
    facts = ("SpeakerModel(", "campplus", "16 dimensions", "16000 Hz", "fp32 on cpu")
    assert all(fact in found for fact in (*facts, str(tmp_path / "exp")))


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, speakerlab; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    subprocess.run([sys.executable, "-c", code], check=True)
