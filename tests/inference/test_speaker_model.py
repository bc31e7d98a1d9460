"""The Python API: the numbers of stage 5 from any kind of audio, decisions, enrolled speakers."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import soundfile
import torch
from models_on_disk import CALIBRATION, publish_small
from refusals import refuses
from voices import RATE, make_noise, make_wave, manifest_of

import speakerlab
from speakerlab.checkpoints.published import load_published
from speakerlab.core.bars import NOTEBOOK_KERNEL
from speakerlab.data import audio
from speakerlab.inference import recording_embedder
from speakerlab.inference.batches import embed_pieces

CPU = torch.device("cpu")


@pytest.fixture
def open_small(tmp_path: Path, make_config, make_embedder):
    """open_small("vad={}", ..., calibration=None) -> the model at `tmp_path/exp`, by the API."""

    def make(*overrides: str, name: str = "exp", calibration=None):
        config = make_config(*overrides)
        embedder = make_embedder(*overrides)
        exp = publish_small(tmp_path / name, config, embedder, calibration)
        return speakerlab.load(exp, device="cpu")

    return make


@pytest.fixture
def wavs(tmp_path: Path) -> list[Path]:
    """Recordings of speakers 0 to 3, two each, of 1 s and 1.3 s by turns."""
    paths = []
    for speaker in range(4):
        for take in range(2):
            seconds = 1.0 + 0.3 * take
            wave_S = make_wave(speaker, take, seconds)
            path = tmp_path / f"s{speaker}-{take}.wav"
            audio.write(path, wave_S, RATE)
            paths.append(path)
    return paths


def stage_5(exp: Path, path: Path) -> np.ndarray:
    """emb_D as `speakerlab extract` computes it."""
    embedder = load_published(exp).embedder.for_inference()
    pieces = manifest_of(path).pieces()
    (emb_D,) = embed_pieces(embedder, pieces, device=CPU)
    return emb_D


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    difference = np.abs(a - b)
    largest = np.abs(b).max()
    return float(difference.max() / largest)


def unit(emb_D: np.ndarray) -> np.ndarray:
    return emb_D / np.linalg.norm(emb_D)


@pytest.mark.parametrize("overrides", [(), ("vad={}",), ("model.max_seconds=0.5",)])
@pytest.mark.parametrize("seconds", [0.01, 1.0, 2.34567])
def test_a_file_gives_the_embedding_of_stage_5(
    open_small, tmp_path, overrides, seconds
):
    model = open_small(*overrides)
    path = tmp_path / "a.wav"
    wave_S = make_wave(0, 0, seconds)
    wave_S[: len(wave_S) // 3] //= 1000  # silence, for the VAD
    audio.write(path, wave_S, RATE)

    emb_D = model.embed(path)
    assert emb_D.dtype == np.float32
    assert emb_D.shape == (16,)
    assert model.embed_dim == 16

    wanted_D = stage_5(tmp_path / "exp", path)
    if "model.max_seconds=0.5" in overrides:
        # A mean of windows, by numpy instead of torch.
        assert relative_error(emb_D, wanted_D) < 1e-6
    else:
        assert np.array_equal(emb_D, wanted_D)
    of_wave_D = model.embed(wave_S)
    of_bytes_D = model.embed(path.read_bytes())
    assert np.array_equal(of_wave_D, emb_D)
    assert np.array_equal(of_bytes_D, emb_D)


def test_many_are_each_as_alone_in_order(open_small, wavs):
    model = open_small("model.max_seconds=1.1")
    sources = [
        *wavs,
        make_wave(4, 0, 70.0),
        make_wave(4, 0, 0.01),
        wavs[0].read_bytes(),
    ]
    emb_ND = model.embed_many(sources)
    assert emb_ND.dtype == np.float32
    for source, emb_D in zip(sources, emb_ND):
        alone_D = model.embed(source)
        assert relative_error(emb_D, alone_D) < 1e-5
    # Recordings of two speakers differ by far more.
    first_D, _, third_D = emb_ND[:3]
    assert relative_error(first_D, third_D) > 1e-2
    of_nothing_ND = model.embed_many([])
    assert of_nothing_ND.shape == (0, 16)


def test_a_device_is_a_name_or_torchs(open_small, tmp_path):
    open_small()
    exp = tmp_path / "exp"
    for device in ("cpu", torch.device("cpu"), "auto"):
        assert speakerlab.load(exp, device=device).embed_dim == 16
    if not torch.cuda.is_available():
        for device in ("cuda", "cuda:7", torch.device("cuda", 1)):
            with refuses("device", device, "no GPU"):
                speakerlab.load(exp, device=device)
    for device in ("gpu", "cuda:x"):
        with refuses("device", device, "cuda:N"):
            speakerlab.load(exp, device=device)


@pytest.mark.parametrize("in_notebook", [True, False])
def test_a_bar_counts_the_recordings_but_not_in_a_log(
    open_small, wavs, capsys, monkeypatch, in_notebook
):
    if in_notebook:
        kernel = ModuleType(NOTEBOOK_KERNEL)
        monkeypatch.setitem(sys.modules, NOTEBOOK_KERNEL, kernel)
    model = open_small()
    capsys.readouterr()
    model.embed_many(wavs, progress=True)
    count = f"{len(wavs)}/{len(wavs)}"
    assert (count in capsys.readouterr().err) == in_notebook


def test_one_broken_among_many(open_small, wavs):
    model = open_small()
    sources = [wavs[0], "nowhere.wav", wavs[1]]
    with refuses("nowhere.wav", error=FileNotFoundError):
        model.embed_many(sources)
    results = dict(model.embed_each(sources))
    assert sorted(results) == [0, 1, 2]
    assert isinstance(results[1], FileNotFoundError)
    last_D = model.embed(wavs[1])
    assert np.array_equal(results[2], last_D)


def test_another_rate_is_given_for_arrays_and_read_from_files(open_small, tmp_path):
    model = open_small()
    wave_S = make_wave(0, 0, 2.0, 48000)
    soundfile.write(tmp_path / "a.flac", wave_S, 48000)
    emb_D = model.embed(tmp_path / "a.flac")

    at_its_rate_D = model.embed(wave_S, 48000)
    assert np.array_equal(at_its_rate_D, emb_D)
    emb_ND = model.embed_many([wave_S], 48000)
    assert np.array_equal(emb_ND[0], emb_D)

    taken_for_16_khz_D = model.embed(wave_S)
    assert relative_error(taken_for_16_khz_D, emb_D) > 1e-2
    # Much the same sound.
    wave_16_khz_S = make_wave(0, 0, 2.0)
    made_at_16_khz_D = model.embed(wave_16_khz_S)
    assert relative_error(made_at_16_khz_D, emb_D) < 0.2


def test_a_comparison_with_calibration(open_small, wavs):
    model = open_small(calibration=CALIBRATION)
    a, b = wavs[0], wavs[4]
    a_D = model.embed(a)
    b_D = model.embed(b)
    cosine = unit(a_D) @ unit(b_D)
    score = float(cosine)

    # CALIBRATION: LLR = 10 * score - 5, and a threshold of 0.5.
    result = model.verify(a, b)
    llr = 10 * score - 5
    assert result.score == pytest.approx(score, abs=1e-6)
    assert result.llr == pytest.approx(llr, abs=1e-4)
    assert result.threshold == 0.5
    assert result.is_same == (score >= 0.5)

    same = model.verify(a, str(a))
    assert same.score == pytest.approx(1, abs=1e-6)
    assert same.is_same

    strict = model.verify(a, b, far=0.01)
    assert strict.threshold == 0.9999
    assert strict.is_same == (score >= 0.9999)
    with refuses("calibration", 0.03):
        model.verify(a, b, far=0.03)


def test_a_comparison_without_calibration_decides_nothing(open_small, wavs):
    model = open_small()
    a, b = wavs[0], wavs[1]
    result = model.verify(a, b)
    assert result.llr is None
    assert result.is_same is None
    assert result.threshold is None
    with refuses("model", "far=0.01"):
        model.verify(a, b, far=0.01)


def test_a_copy_gives_its_recording_no_more_weight(open_small, wavs, tmp_path, caplog):
    model = open_small()
    copy = tmp_path / "copy.wav"
    copy.write_bytes(Path(wavs[0]).read_bytes())
    model.enroll("ann", [wavs[0], copy, wavs[1]])
    assert "enrol: ann has 1 copy of other recordings, used once" in caplog.text
    with_copy_D = model.speakers["ann"]
    model.enroll("ann", wavs[:2])
    np.testing.assert_allclose(with_copy_D, model.speakers["ann"], atol=1e-6)


@pytest.mark.parametrize(
    "name", ["Jose\u0301", "Jos\u00e9\u200b", " Jos\u00e9", "ann\t"]
)
def test_a_name_that_looks_like_another_is_refused(open_small, wavs, name):
    model = open_small()
    model.enroll("Jos\u00e9", wavs[0])
    with refuses("enrol"):
        model.enroll(name, wavs[1])
    model.enroll("Jos\u00e9", wavs[1])  # replaces the speaker
    assert list(model.speakers) == ["Jos\u00e9"]


def test_enrolled_speakers_are_found_again(open_small, wavs, tmp_path):
    model = open_small(calibration=CALIBRATION)
    with refuses("identify"):
        model.identify(wavs[0])
    model.enroll("ann", wavs[:2])
    model.enroll("bob", wavs[4])

    # A speaker is the mean of the unit vectors of the recordings.
    first_D = model.embed(wavs[0])
    second_D = model.embed(wavs[1])
    ann_D = unit(unit(first_D) + unit(second_D))
    bob_D = unit(model.embed(wavs[4]))
    probe_D = unit(model.embed(wavs[5]))
    ann_score = float(ann_D @ probe_D)
    bob_score = float(bob_D @ probe_D)

    identified = model.identify(wavs[5])
    scores = dict(identified.ranking)
    assert scores["ann"] == pytest.approx(ann_score, abs=1e-6)
    assert scores["bob"] == pytest.approx(bob_score, abs=1e-6)
    ranked_scores = [score for _, score in identified.ranking]
    assert ranked_scores == sorted(ranked_scores, reverse=True)
    assert identified.threshold == 0.5
    assert identified.is_known == (ranked_scores[0] >= 0.5)

    model.save_speakers(tmp_path / "team.safetensors")
    again = speakerlab.load(tmp_path / "exp", device="cpu")
    again.load_speakers(tmp_path / "team.safetensors")
    assert again.identify(wavs[5]) == identified

    # Enrolling a name again replaces the speaker.
    again.enroll("ann", wavs[6])
    assert sorted(again.speakers) == ["ann", "bob"]
    identified = again.identify(wavs[6])
    name, score = identified.ranking[0]
    assert name == "ann"
    assert score == pytest.approx(1, abs=1e-6)


def test_nobody_is_named_below_the_threshold(open_small, wavs):
    model = open_small(calibration=CALIBRATION)
    model.enroll("ann", wavs[0])
    far_away = model.identify(wavs[6], far=0.01)
    _, best_score = far_away.ranking[0]
    assert best_score < 0.9999
    assert far_away.is_known is False
    assert far_away.name is None
    near = model.identify(wavs[0], far=0.01)
    assert near.name == "ann"

    # Without a calibration the best name is given, undecided.
    undecided = open_small(name="b")
    undecided.enroll("ann", wavs[0])
    identified = undecided.identify(wavs[6])
    assert identified.is_known is None
    assert identified.threshold is None
    assert identified.name == "ann"


def test_a_given_threshold_decides(open_small, wavs):
    a, b = wavs[0], wavs[6]
    calibrated = open_small(calibration=CALIBRATION)
    # Without a calibration there is a decision, too.
    for model in (calibrated, open_small(name="b")):
        score = model.verify(a, b).score
        model.enroll("ann", a)
        for threshold in (-1, score, 1.0):
            is_above = score >= threshold
            result = model.verify(a, b, threshold=threshold)
            assert result.threshold == threshold
            assert result.is_same == is_above
            emb_a_D, emb_b_D = model.embed(a), model.embed(b)
            compared = model.compare(emb_a_D, emb_b_D, threshold=threshold)
            assert compared.is_same == is_above
        # Thresholds are often computed with numpy.
        lowest = np.float32(-1)
        assert model.verify(a, b, threshold=lowest).is_same is True
        known = model.identify(b, threshold=lowest)
        unknown = model.identify(b, threshold=1.0)
        assert known.is_known is True
        assert unknown.is_known is False
        # Noise is nobody, at any threshold.
        noise_S = make_noise(1.5)[0]
        assert model.verify(a, noise_S, threshold=-1).is_same is None

        for bad in (1.5, -2, float("nan"), "high"):
            with refuses("threshold", bad):
                model.verify(a, b, threshold=bad)
            with refuses("threshold", bad):
                model.identify(b, threshold=bad)
        with refuses("threshold", 0.4, "far=0.01"):
            model.verify(a, b, far=0.01, threshold=0.4)
        with refuses("threshold", 0.4, "far=0.01"):
            model.identify(b, far=0.01, threshold=0.4)


def test_speakers_of_another_model_or_of_none_are_refused(open_small, wavs, tmp_path):
    model = open_small(name="a")
    other = open_small("seed=1", name="b")
    model.enroll("ann", wavs[0])
    path = tmp_path / "team.safetensors"
    model.save_speakers(path)
    with refuses(str(path), model.sha256[:12], other.sha256[:12]):
        other.load_speakers(path)

    missing = tmp_path / "none"
    with refuses(str(missing), error=FileNotFoundError):
        model.load_speakers(missing)

    weights = tmp_path / "a" / "model" / "embedder.safetensors"
    for content in (b"junk", weights.read_bytes()):
        path.write_bytes(content)
        with refuses(str(path)):
            model.load_speakers(path)


def test_wrong_values_are_refused_in_one_line(open_small, wavs):
    model = open_small()
    emb_D = model.embed(wavs[0])
    wave_S = make_wave(0, 0, 1.0)
    # Method, arguments, subject of the message, value in it.
    for method, args, subject, value in (
        ("compare", (emb_D, "a.wav"), "compare", "'a.wav'"),
        ("compare", (emb_D, None), "compare", "None"),
        ("compare", (emb_D, emb_D[:3]), "compare", (3,)),
        ("compare", (emb_D, [emb_D]), "compare", (1, 16)),
        ("embed", (wave_S, "16k"), "audio (ndarray)", "'16k'"),
        ("embed_many", ("a.flac",), "sources", ""),
        ("embed_many", (None,), "sources", ""),
        ("embed_many", (iter(wavs),), "sources", "list(...)"),
        ("embed_many", ((path for path in wavs),), "sources", "got generator; make"),
        ("embed_many", (map(str, wavs),), "sources", "got map; make"),
        ("enroll", ("eve", iter(wavs)), "audio (list_iterator)", "list(...)"),
        ("enroll", ("", wavs[0]), "enrol", "''"),
        ("enroll", (None, wavs[0]), "enrol", "None"),
        ("enroll", ("eve", []), "enrol", "eve"),
    ):
        with refuses(subject, value) as caught:
            getattr(model, method)(*args)
        assert "\n" not in str(caught.value), method
    with refuses("far", "'x'"):
        model.compare(emb_D, emb_D, far="x")
    # An open file is an iterator of lines, but one recording.
    with Path(wavs[0]).open("rb") as opened, refuses("sources", "not one", "in a list"):
        model.embed_many(opened)

    # Lists and tensors are embeddings, too.
    tensor_D = torch.from_numpy(emb_D)
    result = model.compare(list(emb_D), tensor_D)
    assert result.score == pytest.approx(1, abs=1e-6)


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
    error = FileNotFoundError if model == "nowhere" else ValueError
    with refuses(subject, value, error=error):
        speakerlab.load(model, **options)


def test_decisions_say_how_much_speech_they_heard(open_small, wavs, caplog):
    model = open_small(calibration=CALIBRATION)
    model.enroll("ann", wavs[0])
    result = model.verify(wavs[0], wavs[1])
    assert result.speech_seconds == pytest.approx((1.0, 1.3), abs=0.05)
    identified = model.identify(wavs[1])
    assert identified.speech_seconds == pytest.approx(1.3, abs=0.05)
    # Between embeddings nothing was heard.
    emb_D = model.embed(wavs[0])
    assert model.compare(emb_D, emb_D).speech_seconds is None
    assert model.rank(emb_D).speech_seconds is None
    assert caplog.messages == []

    # A pause before the speech is not counted.
    wave_S = np.zeros(2 * RATE, dtype=np.int16)
    wave_S[RATE:] = make_wave(0, 0, 1.0)
    wave_S[:RATE:100] = 3
    result = model.verify(wave_S, wavs[0])
    assert result.speech_seconds == pytest.approx((1.0, 1.0), abs=0.15)


def test_little_speech_is_reported(open_small, wavs, caplog):
    model = open_small(calibration=CALIBRATION)
    model.enroll("ann", wavs[0])
    wave_S = make_wave(0, 0, 2.0)
    wave_S[:] = wave_S // 4000
    wave_S[:5000] = make_wave(0, 0, 2.0)[:5000]
    barely_S = make_wave(0, 0, 2.0) // 1500
    for call in (
        lambda source: model.verify(wavs[0], source),
        lambda source: model.verify(source, wavs[0]),
        model.identify,
        lambda source: model.enroll("bob", [source, wavs[0]]),
    ):
        call(wave_S)
        (line,) = caplog.messages
        assert line.startswith("audio (ndarray): only 0.")
        caplog.clear()
        call(barely_S)
        lines = "\n".join(caplog.messages)
        assert "no speech was found" in lines
        caplog.clear()
    assert model.verify(wave_S, wave_S).is_same
    assert model.verify(wave_S, barely_S).is_same is None
    assert model.identify(barely_S).name is None
    with refuses("enrol", "eve has no speech in any recording"):
        model.enroll("eve", [barely_S, barely_S])
    assert "eve" not in model.speakers


def test_nothing_is_decided_from_noise_or_silence_without_a_word(open_small, caplog):
    model = open_small(calibration=CALIBRATION)
    noise_2S = make_noise(2.0, rows=2).numpy()
    voice_S = make_wave(0, 0, 2.0)
    result = model.verify(noise_2S[0], noise_2S[1])
    assert len(caplog.messages) == 2
    for line in caplog.messages:
        assert "white noise" in line
    # The score is returned, but no decision.
    assert result.llr == pytest.approx(10 * result.score - 5, abs=1e-4)
    assert result.threshold == 0.5
    assert result.is_same is None
    assert result.speech_seconds == (0.0, 0.0)
    for pair in ((voice_S, noise_2S[0]), (noise_2S[0], voice_S)):
        assert model.verify(*pair).is_same is None
    with refuses("enrol", "ann has no speech in any recording"):
        model.enroll("ann", noise_2S[0])
    model.enroll("ann", voice_S)
    identified = model.identify(noise_2S[0])
    assert identified.is_known is None
    assert identified.name is None
    assert identified.ranking[0][0] == "ann"
    assert model.identify(voice_S).is_known is not None
    caplog.clear()
    # Silence, and near silence.
    quiet_S = np.sign(noise_2S[0]).astype(np.int16)
    for source in (0 * quiet_S, quiet_S):
        for call in (model.embed, lambda source: model.verify(source, source)):
            with refuses("audio (ndarray)"):
                call(source)


def test_channels_of_a_recording(open_small, caplog):
    model = open_small(calibration=CALIBRATION)
    first_S = make_wave(0, 0, 1.5)
    second_S = make_wave(3, 0, 1.5)
    wave_SC = np.stack([first_S, second_S], axis=1)
    first_D = model.embed(first_S)
    second_D = model.embed(second_S)

    both_CD = model.embed(wave_SC, channels="each")
    assert both_CD.shape == (2, model.embed_dim)
    assert relative_error(both_CD[0], first_D) < 1e-5
    assert relative_error(both_CD[1], second_D) < 1e-5
    assert np.array_equal(model.embed(wave_SC, channels=2), second_D)
    of_many_ND = model.embed_many([wave_SC], channels=2)
    assert np.array_equal(of_many_ND[0], second_D)
    mixed_S = wave_SC.mean(axis=1) / 32768
    mixed_D = model.embed(mixed_S.astype(np.float32))
    assert relative_error(model.embed(wave_SC, channels="mix"), mixed_D) < 1e-5
    assert model.verify(wave_SC, second_S, channels=1).score < 0.9999
    assert model.verify(wave_SC, wave_SC, channels=2).score > 0.9999
    model.enroll("eve", wave_SC, channels=2)
    _, score = model.identify(wave_SC, channels=2).ranking[0]
    assert score == pytest.approx(1, abs=1e-5)
    assert caplog.messages == []

    # By default the first channel, with a line for each recording.
    assert np.array_equal(model.embed(wave_SC), first_D)
    assert len(caplog.messages) == 1
    model.verify(wave_SC, wave_SC)
    assert len(caplog.messages) == 3
    # The embeddings of all channels of several recordings have no common shape.
    with refuses("channels", "'each'"):
        model.embed_many([wave_SC], channels="each")
    with refuses("channels", "'each'"):
        model.verify(wave_SC, wave_SC, channels="each")


def test_a_channel_is_the_same_in_every_method(open_small, tmp_path, caplog):
    """Method -> what it returns for a recording of two voices, and for the one that is chosen."""
    model = open_small()
    chosen_S = make_wave(3, 0, 2.0)
    two_SC = np.stack([make_wave(0, 0, 2.0), chosen_S], axis=1)
    path = tmp_path / "two.wav"
    soundfile.write(path, two_SC, RATE)

    def enroll(source, **options):
        model.enroll("ann", source, **options)
        return model.speakers["ann"]

    def diarize(source, **options):
        (speaker,) = model.diarize(source, num_speakers=1, **options).speakers.values()
        return speaker

    methods = {
        "embed": model.embed,
        "embed_many": lambda source, **options: model.embed_many([source], **options),
        "embed_each": lambda source, **options: dict(
            model.embed_each([source], **options)
        )[0],
        "embed_windows": lambda source, **options: model.embed_windows(
            source, **options
        )[1],
        "frames": lambda source, **options: model.frames(source, **options)[1],
        "enroll": enroll,
        "verify": lambda source, **options: (
            model.verify(source, source, **options).score
        ),
        "identify": lambda source, **options: model.identify(source, **options).ranking[
            0
        ][1],
        "diarize": diarize,
    }
    for name, method in methods.items():
        caplog.clear()
        wanted = method(chosen_S)
        for source in (path, two_SC, two_SC.T):
            found = method(source, channels=2)
            assert np.allclose(found, wanted, rtol=1e-5, atol=1e-6), name
        assert "channels" not in caplog.text, name
        # By default the first one, with a warning.
        method(path)
        assert "only channel 1 was read" in caplog.text, name
        for channels in (0, 3, "both", True):
            with pytest.raises(ValueError) as caught:
                result = method(path, channels=channels)
                if isinstance(result, Exception):
                    raise result
            assert "channel" in str(caught.value), name


def test_freed_memory_is_returned_from_time_to_time(open_small, monkeypatch):
    model = open_small()
    returns: list[float] = []
    monkeypatch.setattr(
        recording_embedder,
        "return_freed_memory",
        lambda: returns.append(model.seconds_embedded),
    )
    # Two and a half times 2 minutes.
    waves = [make_wave(0, 0, 10.0)] * 5
    for _ in range(6):
        model.embed_many(waves)
    assert len(returns) == 2


def test_a_batch_is_embedded_by_its_rows(open_small):
    model = open_small()
    batch_BS = np.stack([make_wave(speaker, 0, 1.0) for speaker in range(8)])
    with refuses("audio (ndarray)", "embed_many(list(x))"):
        model.embed(batch_BS)
    emb_BD = model.embed_many(list(batch_BS))
    of_array_BD = model.embed_many(batch_BS)
    assert np.array_equal(of_array_BD, emb_BD)
    alone_D = model.embed(batch_BS[5])
    assert relative_error(emb_BD[5], alone_D) < 1e-5


def test_16_bits_in_int32_are_refused(open_small, caplog):
    model = open_small(calibration=CALIBRATION)
    wave_S = make_wave(0, 0, 1.0)
    assert model.verify(wave_S, wave_S).is_same
    assert caplog.messages == []
    int32_S = wave_S.astype(np.int32)
    for call in (model.embed, lambda source: model.verify(wave_S, source)):
        with refuses("audio (ndarray)", "int16"):
            call(int32_S)


def test_text_of_a_model_says_what_it_is(open_small, tmp_path):
    text = repr(open_small())
    for fact in (
        "SpeakerModel(",
        "campplus",
        "16 dimensions",
        "16000 Hz",
        "fp32 on cpu",
        str(tmp_path / "exp"),
    ):
        assert fact in text


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, speakerlab;"
        " sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True)
