"""Speech by loudness: what is kept, in samples; never nothing; recorded in the configuration."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.config import build
from speakerlab.config.schema import load_config
from speakerlab.frontend.vad import EnergyVad

RATE = 16000
FRAME = 320  # 20 ms


def noise(seconds: float, amplitude: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    num_samples = round(seconds * RATE)
    wave_S = amplitude * rng.standard_normal(num_samples)
    return wave_S.astype(np.float32)


def speech_and_silence() -> np.ndarray:
    """1 s at -20 dBFS, 2 s at -70 dBFS, 1 s at -26 dBFS."""
    speech = noise(1, 0.1)
    silence = noise(2, 0.1**3.5)
    soft_speech = noise(1, 0.05)
    return np.concatenate([speech, silence, soft_speech])


def test_silence_between_is_left_out():
    wave_S = speech_and_silence()
    remaining = EnergyVad().voiced_frames(wave_S)
    # A quarter of 11 frames must be loud: a frame is kept up to 3 frames from the loud ones.
    expected = 53 * [True] + 94 * [False] + 53 * [True]
    assert remaining.tolist() == expected

    speech_S = EnergyVad()(wave_S)
    assert speech_S.dtype == np.float32
    first_S = wave_S[: 53 * FRAME]
    last_S = wave_S[147 * FRAME :]
    expected_S = np.concatenate([first_S, last_S])
    assert np.array_equal(speech_S, expected_S)


@pytest.mark.parametrize("snr_db", [12, 20, 40])
def test_the_noise_of_pauses_is_left_out_at_any_level(snr_db):
    speech = noise(1, 0.1)
    hiss_amplitude = 0.1 * 10 ** (-snr_db / 20)
    hiss = noise(3, hiss_amplitude)
    wave_S = np.concatenate([speech, hiss, speech])
    remaining = EnergyVad(above_noise=0.25).voiced_frames(wave_S)
    expected = 53 * [True] + 144 * [False] + 53 * [True]
    assert remaining.tolist() == expected
    # Without `above_noise`, a loud hiss counts as speech.
    all_voiced = EnergyVad().voiced_frames(wave_S).all()
    assert all_voiced == (snr_db < 30)


@pytest.mark.parametrize("gain", [0.1, 3.0])
def test_the_level_of_the_recording_does_not_matter(gain):
    wave_S = speech_and_silence()
    vad = EnergyVad()
    voiced = vad.voiced_frames(wave_S)
    voiced_at_gain = vad.voiced_frames(gain * wave_S)
    assert np.array_equal(voiced, voiced_at_gain)


def test_int16_and_floating_point_decide_alike():
    scaled_S = speech_and_silence() * 32768
    raw_S = np.rint(scaled_S).astype(np.int16)
    vad = EnergyVad()
    speech_S = vad(raw_S)
    assert speech_S.dtype == np.int16
    assert 0 < len(speech_S) < len(raw_S)

    full_scale = np.float32(32768)
    of_floats_S = vad(raw_S / full_scale)
    assert np.array_equal(speech_S / full_scale, of_floats_S)


def test_a_click_is_neither_speech_nor_the_loudest():
    silence = noise(1, 0.1**3.5)
    voice = noise(1, 0.01)
    wave_S = np.concatenate([silence, voice, silence])
    wave_S[4000] = 1.0  # 25 dB above the voice, within one frame
    remaining = EnergyVad().voiced_frames(wave_S)
    assert not remaining[:47].any()
    assert remaining[50:100].all()


def test_a_short_pause_is_kept_and_an_offset_is_not_loud():
    vad = EnergyVad()
    speech = noise(1, 0.1)
    pause = noise(0.12, 0.0001)
    with_pause_S = np.concatenate([speech, pause, speech])
    assert vad.voiced_frames(with_pause_S).all()

    wave_S = speech_and_silence()
    shifted_S = wave_S + np.float32(0.2)
    voiced = vad.voiced_frames(wave_S)
    voiced_shifted = vad.voiced_frames(shifted_S)
    assert np.array_equal(voiced_shifted, voiced)


def test_the_rest_goes_with_the_last_frame():
    vad = EnergyVad()
    half_a_frame = noise(0.01, 0.05)
    voiced_end_S = np.concatenate([speech_and_silence(), half_a_frame])
    speech_S = vad(voiced_end_S)
    last_S = voiced_end_S[-100:]
    assert np.array_equal(speech_S[-100:], last_S)

    speech = noise(1, 0.1)
    silence = noise(1.01, 0.1**3.5)
    silent_end_S = np.concatenate([speech, silence])
    assert len(vad(silent_end_S)) == 53 * FRAME


@pytest.mark.parametrize("amplitude", [0.0, 0.0001, 0.1])
@pytest.mark.parametrize("num_samples", [1, FRAME - 1, FRAME, 5000])
def test_it_is_never_empty(amplitude, num_samples):
    wave_S = noise(1, amplitude)[:num_samples]
    speech_S = EnergyVad()(wave_S)
    assert np.array_equal(speech_S, wave_S)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("frame_ms", 0.01),
        ("range_db", 0.0),
        ("min_share", 1.5),
        ("above_noise", 1.0),
    ],
)
def test_impossible_settings_of_the_vad_are_refused(make_config, key, value):
    with refuses(f"--set vad.{key}={value}", value):
        make_config(f"vad.{key}={value}")


def test_it_is_part_of_the_configuration(make_config, tmp_path):
    assert make_config().vad is None
    assert make_config("vad=null").vad is None
    assert build.build_embedder(make_config()).vad is None
    config = make_config("vad={range_db: 25}", "frontend.sample_rate=8000")
    assert config.vad == {
        "range_db": 25.0,
        "floor_dbfs": -55.0,
        "frame_ms": 20.0,
        "context_frames": 5,
        "min_share": 0.25,
        "above_noise": 0.0,
    }
    config.write(tmp_path / "config.yaml")
    again = load_config([tmp_path / "config.yaml"])
    vad = build.build_embedder(again).vad
    assert vad is not None
    assert vad.range_db == 25.0
    assert vad.frame_samples == 160
    with refuses("--set vad={rang_db", "did you mean vad.range_db"):
        make_config("vad={rang_db: 25}")
    with refuses("--set vad={sample_rate", "vad.sample_rate"):
        make_config("vad={sample_rate: 8000}")
