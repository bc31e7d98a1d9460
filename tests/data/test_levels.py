"""Levels that no recording of speech has are found; speech of any level is not suspected."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from voices import make_wave

from speakerlab.data import audio
from speakerlab.data.levels import (
    CLIPPED,
    FAINT,
    OFFSET,
    OTHER_SOUND,
    PADDED,
    SILENT,
    describe_kinds,
    find_fault,
    find_kind,
    find_other_sound,
    find_padding,
    find_shortness,
    is_white,
    measure,
)

RATE = 16000
SYLLABLES_PER_SECOND = 4
BESIDE = Path(__file__).parents[3] / "shared"
SHARED = Path(os.environ.get("SPEAKERLAB_SHARED", BESIDE))


def make_speech(speaker: int = 0, seconds: float = 3.0, rate: int = RATE) -> np.ndarray:
    """A harmonic voice, int16, with four syllables a second and pauses between words."""
    wave_S = make_wave(speaker, 0, seconds, rate)
    time_S = np.arange(len(wave_S)) / rate
    phase_S = 2 * np.pi * SYLLABLES_PER_SECOND * time_S
    syllables_S = 0.55 + 0.45 * np.sin(phase_S)
    # The last fifth of each second is a pause.
    is_word_S = time_S % 1.0 < 0.8
    words_S = np.where(is_word_S, 1.0, 0.01)
    speech_S = wave_S * syllables_S * words_S
    return speech_S.astype(np.int16)


def fault_of(wave_S: np.ndarray, rate: int = RATE) -> str | None:
    levels = measure(wave_S, sample_rate=rate)
    return find_fault(wave_S, levels, sample_rate=rate) or find_padding(wave_S)


def as_float(wave_S: np.ndarray) -> np.ndarray:
    return (wave_S / 32768).astype(np.float32)


@pytest.mark.parametrize("gain", [1.0, 0.1, 0.02])
@pytest.mark.parametrize("seconds", [0.1, 1.0, 20.0])
def test_speech_has_no_fault(gain, seconds):
    wave_S = make_speech(seconds=seconds)
    wave_S = (gain * wave_S).astype(np.int16)
    assert fault_of(wave_S) is None
    assert fault_of(as_float(wave_S)) is None
    # A steady voice, as of a held vowel, is none, either.
    vowel_S = make_wave(1, 0, seconds)
    assert fault_of(vowel_S) is None


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="needs ../shared")
@pytest.mark.parametrize("corpus", ["librispeech", "speechocean", "words"])
def test_recordings_of_speech_have_no_fault(corpus):
    folder = SHARED / f"data/{corpus}-mini"
    files = sorted(folder.rglob("*.flac")) + sorted(folder.rglob("*.wav"))
    assert files
    for path in files[:: len(files) // 20]:
        wave_S = audio.read(path)
        assert fault_of(wave_S) is None, path


def tone(*hertz: float) -> np.ndarray:
    time_S = np.arange(3 * RATE) / RATE
    wave_S = np.zeros_like(time_S)
    for line in hertz:
        wave_S += 0.3 * np.sin(2 * np.pi * line * time_S)
    return wave_S.astype(np.float32)


def dialled_digits(*, pause: float) -> np.ndarray:
    """Two tones at a time, for a fifth of a second each, as of a telephone's keys."""
    num_samples = round(RATE / 5)
    pause_S = np.zeros(round(pause * RATE), dtype=np.float32)
    keys = ((697, 1209), (770, 1336), (852, 1477), (941, 1633))
    waves: list[np.ndarray] = []
    for low, high in keys * 4:
        key_S = tone(low, high)[:num_samples]
        waves += [key_S, pause_S]
    return np.concatenate(waves)


def chirp() -> np.ndarray:
    """A tone that rises from 100 to 4000 Hz."""
    time_S = np.arange(3 * RATE) / RATE
    hertz_S = 100 + 3900 / 3 * time_S / 2
    return (0.3 * np.sin(2 * np.pi * hertz_S * time_S)).astype(np.float32)


RNG = np.random.default_rng(0)
NOISE = RNG.standard_normal(3 * RATE).astype(np.float32)
SPEECH = make_speech()
FLOAT = as_float(SPEECH)
INT32 = SPEECH.astype(np.int32) << 16
FAULTY = {
    "16 bits as 32": (FLOAT / 65536, "too faint"),
    "from 0 to 1": ((FLOAT + 1) / 2, "around 0.50"),
    "magnitudes": (np.abs(FLOAT), "instead of 0"),
    "a large offset": (FLOAT + 0.5, "around 0.50"),
    "clipped": (np.clip(10 * FLOAT, -1, 1), "clipped"),
    "a square wave": (np.sign(tone(440)), "clipped"),
    "a tone": (tone(1000), "a tone"),
    "a tone with noise": (tone(1000) + 0.001 * NOISE, "a tone"),
    "a dial tone": (tone(350, 440), "a tone"),
    "dialled digits": (dialled_digits(pause=0.0), "a tone"),
    "dialled digits with pauses": (dialled_digits(pause=0.3), "a tone"),
    "a chirp": (chirp(), "a tone"),
    "hum": (tone(50, 100, 150), "a tone"),
    "a tone after silence": (tone(440) * (NOISE.cumsum() != 0), "a tone"),
    "white noise": (0.05 * NOISE, "white noise"),
    "noise at full scale": (RNG.uniform(-1, 1, 3 * RATE), "white noise"),
    "bytes in the wrong order": (make_wave(0, 0, 3.0).byteswap(), "white noise"),
    "floats as int16": (FLOAT.view(np.int16), "white noise"),
    "int32 as int16": (INT32.view(np.int16), "white noise"),
    "interleaved channels": (np.stack([SPEECH, make_speech(1)], 1).ravel(), "white"),
    "padded": (np.concatenate([SPEECH, 0 * SPEECH]), "digital silence"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_what_is_no_speech(name):
    wave_S, expected = FAULTY[name]
    if wave_S.dtype == np.float64:
        wave_S = wave_S.astype(np.float32)
    fault = fault_of(wave_S)
    assert fault is not None
    assert expected in fault


def test_steady_coloured_noise_is_found():
    spectrum_F = np.fft.rfft(NOISE)
    pink_S = np.fft.irfft(spectrum_F / np.sqrt(np.arange(1, len(spectrum_F) + 1)))
    pink_S = 0.3 * pink_S / np.abs(pink_S).max()
    fault = fault_of(pink_S.astype(np.float32))
    assert fault is not None
    assert "steady noise" in fault


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("16 bits as 32", SILENT),
        ("magnitudes", OFFSET),
        ("clipped", CLIPPED),
        ("hum", OTHER_SOUND),
        ("white noise", OTHER_SOUND),
        ("padded", PADDED),
    ],
)
def test_the_kind_of_a_fault(name, kind):
    wave_S, _ = FAULTY[name]
    assert find_kind(wave_S, sample_rate=RATE) == kind


def test_the_kind_of_quiet_waves():
    assert find_kind(np.zeros(RATE, dtype=np.int16), sample_rate=RATE) == SILENT
    assert find_kind(SPEECH // 2000, sample_rate=RATE) == FAINT
    assert find_kind(SPEECH, sample_rate=RATE) is None
    assert find_kind(SPEECH[:0], sample_rate=RATE) is None


def test_each_kind_is_a_line_with_the_first_names():
    kind_of = {"a": CLIPPED, "b": SILENT, "c": SILENT, "d": SILENT, "e": SILENT}
    lines = describe_kinds(kind_of, 9, where="data/x", unit="utterances")
    assert lines == [
        "data/x: 4 of 9 utterances are silent (b, c, d, ...); listen to them",
        "data/x: 1 of 9 utterances are clipped (a); listen to them",
    ]
    assert describe_kinds({}, 9, where="data/x", unit="utterances") == []


def test_a_tone_after_a_block_of_silence_is_measured():
    silence_S = np.zeros(audio.BLOCK_SAMPLES, dtype=np.float32)
    wave_S = np.concatenate([silence_S, tone(440)])
    levels = measure(wave_S, sample_rate=RATE)
    assert levels.spread_db < 0.1
    # Only the first block is looked at.
    assert find_other_sound(wave_S, levels, sample_rate=RATE) is None


def test_white_noise_after_a_block_of_silence_is_found():
    silence_S = np.zeros(audio.BLOCK_SAMPLES, dtype=np.float32)
    noise_S = np.random.default_rng(0).standard_normal(len(silence_S)) * 0.1
    # The mean is 0 as in the silence, which has no correlations.
    noise_S -= noise_S.mean()
    wave_S = np.concatenate([silence_S, noise_S.astype(np.float32)])
    levels = measure(wave_S, sample_rate=RATE)
    assert is_white(wave_S, replace(levels, mean=0.0))


def test_long_waves_are_measured_in_blocks():
    wave_S = make_speech(seconds=20.0)
    assert len(wave_S) > audio.BLOCK_SAMPLES
    levels = measure(wave_S, sample_rate=RATE)
    float_S = as_float(wave_S).astype(np.float64)
    assert levels.mean == pytest.approx(float_S.mean(), abs=1e-6)
    assert levels.power == pytest.approx(float_S.var(), rel=1e-4)
    assert levels.highest == float_S.max()
    expected = np.corrcoef(float_S[1:], float_S[:-1])[0, 1]
    assert levels.correlation == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("num_samples", [2, 16, 320, 1599])
def test_a_few_samples_are_short_and_not_clipped(num_samples):
    wave_S = np.full(num_samples, 0.5, dtype=np.float32)
    wave_S[::2] *= -1
    assert fault_of(wave_S) is None
    assert find_kind(wave_S, sample_rate=RATE) is None
    shortness = find_shortness(wave_S, sample_rate=RATE)
    assert shortness is not None
    assert "too short for a voice" in shortness


def test_a_tenth_of_a_second_may_be_clipped():
    wave_S = FAULTY["clipped"][0][: RATE // 10]
    assert "clipped" in str(fault_of(wave_S))
    assert find_shortness(wave_S, sample_rate=RATE) is None


@pytest.mark.parametrize("num_samples", [1, 2, 799, 800, 801])
def test_short_waves_are_measured(num_samples):
    wave_S = make_speech()[1:][:num_samples]
    levels = measure(wave_S, sample_rate=RATE)
    assert levels.lowest == wave_S.min() / 32768
