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
    return (amplitude * rng.standard_normal(round(seconds * RATE))).astype(np.float32)


def speech_and_silence() -> np.ndarray:
    """1 s at -20 dBFS, 2 s at -70 dBFS, 1 s at -26 dBFS."""
    return np.concatenate([noise(1, 0.1), noise(2, 0.1**3.5), noise(1, 0.05)])


def test_silence_between_is_left_out():
    wave_S = speech_and_silence()
    kept = EnergyVad().voiced_frames(wave_S)
    # a quarter of 11 frames must be loud: a frame is kept up to 3 frames from the loud ones
    assert kept.tolist() == [True] * 53 + [False] * 94 + [True] * 53
    speech_S = EnergyVad()(wave_S)
    assert speech_S.dtype == np.float32
    wanted_S = np.concatenate([wave_S[: 53 * FRAME], wave_S[147 * FRAME :]])
    assert np.array_equal(speech_S, wanted_S)


@pytest.mark.parametrize("snr_db", [12, 20, 40])
def test_the_noise_of_pauses_is_left_out_at_any_level(snr_db):
    hiss = noise(3, 0.1 * 10 ** (-snr_db / 20))
    wave_S = np.concatenate([noise(1, 0.1), hiss, noise(1, 0.1)])
    kept = EnergyVad(above_noise=0.25).voiced_frames(wave_S)
    assert kept.tolist() == [True] * 53 + [False] * 144 + [True] * 53
    assert EnergyVad().voiced_frames(wave_S).all() == (snr_db < 30)


@pytest.mark.parametrize("gain", [0.1, 3.0])
def test_the_level_of_the_recording_does_not_matter(gain):
    wave_S = speech_and_silence()
    vad = EnergyVad()
    assert np.array_equal(vad.voiced_frames(wave_S), vad.voiced_frames(gain * wave_S))


def test_int16_and_floating_point_decide_alike():
    raw_S = np.rint(speech_and_silence() * 32768).astype(np.int16)
    vad = EnergyVad()
    speech_S = vad(raw_S)
    assert speech_S.dtype == np.int16
    assert 0 < len(speech_S) < len(raw_S)
    assert np.array_equal(speech_S / np.float32(32768), vad(raw_S / np.float32(32768)))


def test_a_click_is_neither_speech_nor_the_loudest():
    wave_S = np.concatenate([noise(1, 0.1**3.5), noise(1, 0.01), noise(1, 0.1**3.5)])
    wave_S[4000] = 1.0  # 25 dB above the voice, within one frame
    kept = EnergyVad().voiced_frames(wave_S)
    assert not kept[:47].any()
    assert kept[50:100].all()


def test_a_short_pause_is_kept_and_an_offset_is_not_loud():
    pause = np.concatenate([noise(1, 0.1), noise(0.12, 0.0001), noise(1, 0.1)])
    assert EnergyVad().voiced_frames(pause).all()
    wave_S = speech_and_silence()
    shifted = EnergyVad().voiced_frames(wave_S + np.float32(0.2))
    assert np.array_equal(shifted, EnergyVad().voiced_frames(wave_S))


def test_the_rest_goes_with_the_last_frame():
    wave_S = np.concatenate([speech_and_silence(), noise(0.01, 0.05)])
    assert np.array_equal(EnergyVad()(wave_S)[-100:], wave_S[-100:])
    wave_S = np.concatenate([noise(1, 0.1), noise(1.01, 0.1**3.5)])
    assert len(EnergyVad()(wave_S)) == 53 * FRAME


@pytest.mark.parametrize("amplitude", [0.0, 0.0001, 0.1])
@pytest.mark.parametrize("num_samples", [1, FRAME - 1, FRAME, 5000])
def test_it_is_never_empty(amplitude, num_samples):
    wave_S = noise(1, amplitude)[:num_samples]
    assert np.array_equal(EnergyVad()(wave_S), wave_S)


@pytest.mark.parametrize(
    ("key", "value"),
    [("frame_ms", 0.01), ("range_db", 0.0), ("min_share", 1.5), ("above_noise", 1.0)],
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
    assert (vad.range_db, vad.frame_samples) == (25.0, 160)
    with refuses("--set vad={rang_db", "did you mean range_db"):
        make_config("vad={rang_db: 25}")
    with refuses("--set vad={sample_rate", "vad.sample_rate"):
        make_config("vad={sample_rate: 8000}")
