"""Frames of a model: what it pools into the embedding, and when each frame is."""

from pathlib import Path

import numpy as np
import pytest
import torch
from models_on_disk import publish_small
from refusals import refuses
from voices import RATE, make_noise, make_wave

import speakerlab
from speakerlab.config.build import build_embedder
from speakerlab.config.schema import load_config
from speakerlab.data import audio
from speakerlab.models.frames import pooling_of

# Of each family with a `Pooling`, a small network, and the seconds between its frames.
SMALL = {
    "xvector": (
        "{name: xvector, args: {embed_dim: 16, hidden_channels: 16, stats_channels: 24}}",
        0.01,
    ),
    "campplus": (
        "{name: campplus, args: {embed_dim: 16, head_channels: 4, init_channels: 16,"
        " growth_rate: 4, blocks: [1, 1, 1]}}",
        0.02,
    ),
    "eres2net": ("{name: eres2net, args: {embed_dim: 16, m_channels: 8}}", 0.08),
    "resnet": ("{name: resnet, args: {embed_dim: 16, m_channels: 4}}", 0.08),
}
# Seconds. An x-vector hears as much before a frame as after it; the masks of CAM++ are of whole
# segments.
TOLERANCES = {"xvector": 0.01, "campplus": 0.045, "eres2net": 0.05, "resnet": 0.05}


@pytest.fixture
def open_family(tmp_path: Path):
    """open_family("xvector", "vad={}") -> a small model of the family, by the API."""

    def make(family: str, *overrides: str):
        config = load_config([], [f"model={SMALL[family][0]}", *overrides])
        embedder = build_embedder(config)
        with torch.no_grad():
            embedder.train()(make_noise(1.0, rows=4))
        exp = publish_small(tmp_path / "exp", config, embedder.eval())
        return speakerlab.load(exp, device="cpu")

    return make


@pytest.mark.parametrize("family", SMALL)
def test_they_are_what_is_pooled_for_the_embedding(open_family, family):
    model = open_family(family)
    pooling = pooling_of(model.runtime.embedder.backbone)
    pooled: list[torch.Tensor] = []
    hook = pooling.register_forward_hook(lambda *passed: pooled.append(passed[-1]))
    wave_S = make_wave(0, 0, 1.3)
    model.embed(wave_S)
    hook.remove()

    times_T, frames_TF = model.frames(wave_S)
    assert times_T.dtype == np.float64
    assert frames_TF.dtype == np.float32
    assert times_T.shape == frames_TF.shape[:1]
    frames_1CT = torch.from_numpy(frames_TF.T.copy())[None]
    with torch.inference_mode():
        stats_1K = pooling(frames_1CT)
    assert torch.allclose(stats_1K, pooled[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", SMALL)
def test_a_click_changes_the_frames_of_its_time(open_family, family):
    model = open_family(family)
    quiet_S = make_wave(0, 0, 2.0) // 100
    _, seconds = SMALL[family]
    for place in (0.3, 1.0, 1.7):
        with_click_S = quiet_S.copy()
        first = round(place * RATE)
        with_click_S[first : first + 80] += 20_000
        times_T, before_TF = model.frames(quiet_S)
        _, after_TF = model.frames(with_click_S)
        assert np.diff(times_T) == pytest.approx(seconds, abs=1e-4)
        assert 0 <= times_T[0] < times_T[-1] < 2.0
        change_T = np.abs(after_TF - before_TF).sum(axis=1)
        # The middle of the change is the click; context spreads to both sides of it.
        change_T = np.maximum(change_T - np.quantile(change_T, 0.9), 0)
        middle = (change_T * times_T).sum() / change_T.sum()
        assert middle == pytest.approx(place, abs=TOLERANCES[family])


def test_a_long_recording_is_cut_as_for_its_embedding(open_family):
    model = open_family("xvector", "model.max_seconds=1.0")
    wave_S = make_wave(0, 0, 2.0)
    times_T, frames_TF = model.frames(wave_S)
    first_T, first_TF = model.frames(wave_S[:RATE])
    second_T, second_TF = model.frames(wave_S[RATE:])
    assert times_T == pytest.approx(np.concatenate([first_T, 1.0 + second_T]))
    assert np.array_equal(frames_TF, np.concatenate([first_TF, second_TF]))


def test_removed_silence_has_no_frames(open_family):
    model = open_family("xvector", "vad={context_frames: 0}")
    voice_S = make_wave(0, 0, 1.0)
    silence_S = np.zeros(RATE, dtype=np.int16)
    wave_S = np.concatenate([voice_S, silence_S, voice_S])
    times_T, frames_TF = model.frames(wave_S)
    assert frames_TF.shape[0] == 198 - 14  # of the two seconds that are left
    is_silent_T = (times_T > 1.02) & (times_T < 1.98)
    assert not is_silent_T.any()
    assert (times_T < 1).sum() == pytest.approx((times_T > 2).sum(), abs=3)


def test_channels_and_files_are_those_of_embed(open_family, tmp_path):
    model = open_family("xvector")
    first_S = make_wave(0, 0, 1.0)
    second_S = make_wave(1, 0, 1.0)
    path = tmp_path / "a.wav"
    audio.write(path, np.stack([first_S, second_S], axis=1), RATE)
    _, frames_TF = model.frames(path, channels=2)
    _, wanted_TF = model.frames(second_S)
    assert np.array_equal(frames_TF, wanted_TF)


def test_what_has_no_frames_is_refused(open_family, tmp_path):
    model = open_family("xvector")
    with refuses("audio (ndarray)", "0.050 s", "0.175 s"):
        model.frames(make_wave(0, 0, 0.05))

    config = load_config(
        [], ["model={name: simam_resnet, args: {embed_dim: 16, m_channels: 4}}"]
    )
    exp = publish_small(tmp_path / "simam", config, build_embedder(config).eval())
    with refuses(str(exp), "Pooling"):
        speakerlab.load(exp, device="cpu").frames(make_wave(0, 0, 1.0))
