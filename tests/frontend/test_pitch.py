"""Pitch on tones and harmonic sounds whose frequencies are known."""

import numpy as np
import pytest
import torch
from batches import decibels, make_batch
from refusals import refuses
from sounds import pitch_of

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment import spectra
from speakerlab.frontend.augment.pitch import Pitch, ratio_of

SECONDS = 2.0


def time_of(rate: int, seconds: float = SECONDS) -> np.ndarray:
    num_samples = round(seconds * rate) + 1  # odd on purpose
    return np.arange(num_samples) / rate


def harmonic_sound(hertz: float, *, rate: int) -> np.ndarray:
    """Harmonics up to 3.2 kHz, each of which is weaker than the one before."""
    time_S = time_of(rate)
    wave_S = np.zeros_like(time_S)
    num_harmonics = int(3200 / hertz)
    for harmonic in range(1, num_harmonics + 1):
        phase_S = 2 * np.pi * harmonic * hertz * time_S + harmonic**2
        wave_S += 0.1 / harmonic * np.sin(phase_S)
    return wave_S


def stack(semitones_R: list[float]) -> Draws:
    drawn = {}
    for row, semitones in enumerate(semitones_R):
        draw = Draw({"semitones": semitones, "ratio": ratio_of(semitones)})
        drawn[row] = {"pitch": draw}
    # The waves of the batch do not matter.
    placeholder_RS = np.zeros((len(semitones_R), 1), np.int16)
    (draws,) = make_batch(placeholder_RS, drawn).draws["pitch"]
    return draws


def shift(wave_RS: np.ndarray, semitones_R: list[float], *, rate: int) -> np.ndarray:
    """Rows after changes of pitch by these semitones, of a range that has them all."""
    pitch = Pitch(
        pitch_prob=1,
        num_samples=wave_RS.shape[1],
        pitch_semitones=(-6.0, 6.0),
        sample_rate=rate,
    )
    x_RS = torch.from_numpy(wave_RS).float()
    return pitch.apply(x_RS, stack(semitones_R)).numpy()


def power_spectrum(wave_S: np.ndarray) -> np.ndarray:
    """Power in bins of 1 Hz or less, without the ends of the wave."""
    middle_S = wave_S[2000:-2000]
    windowed_S = middle_S * np.blackman(len(middle_S))
    return np.abs(np.fft.rfft(windowed_S, n=1 << 16)) ** 2


def strongest_hertz(wave_S: np.ndarray, *, rate: int) -> float:
    power_K = power_spectrum(wave_S)
    return float(power_K.argmax()) * rate / (1 << 16)


@pytest.mark.parametrize("rate", [8000, 16000])
def test_a_tone_moves_by_the_semitones_and_stays_a_tone(rate):
    semitones_R = [-6.0, -3.0, -0.3, 0.4, 2.5, 6.0]
    tone_S = 0.3 * np.sin(2 * np.pi * 1000 * time_of(rate))
    tone_RS = np.stack([tone_S] * len(semitones_R))
    shifted_RS = shift(tone_RS, semitones_R, rate=rate)

    assert shifted_RS.shape == tone_RS.shape
    for shifted_S, semitones in zip(shifted_RS, semitones_R):
        expected = 1000 * 2 ** (semitones / 12)
        hertz = strongest_hertz(shifted_S, rate=rate)
        assert abs(hertz / expected - 1) < 0.001

        # What is more than 40 Hz away is neither an image nor a modulation.
        power_K = power_spectrum(shifted_S)
        hertz_K = np.arange(len(power_K)) * rate / (1 << 16)
        is_far_K = np.abs(hertz_K - expected) > 40
        rest_db = decibels(power_K[is_far_K].sum() / power_K.sum())
        assert rest_db < -45


@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize("hertz", [90.0, 210.0])
def test_the_pitch_moves_and_level_and_length_stay(rate, hertz):
    semitones_R = [-3.0, 0.0, 3.0]
    sound_S = harmonic_sound(hertz, rate=rate)
    sound_RS = np.stack([sound_S] * len(semitones_R))
    shifted_RS = shift(sound_RS, semitones_R, rate=rate)

    assert shifted_RS.shape == sound_RS.shape
    for shifted_S, semitones in zip(shifted_RS, semitones_R):
        expected = hertz * 2 ** (semitones / 12)
        pitch = pitch_of(shifted_S, rate=rate, near=hertz)
        assert abs(pitch / expected - 1) < 0.005
        level_db = decibels(np.square(shifted_S).mean() / np.square(sound_S).mean())
        assert abs(level_db) < 0.01


def test_a_sound_stays_in_its_place():
    """Its middle and its duration, between silences, are those of the sound before."""
    time_S = time_of(16000)
    envelope_S = np.exp(-(((time_S - 0.7) / 0.15) ** 2))
    sound_S = harmonic_sound(120.0, rate=16000) * envelope_S
    shifted_RS = shift(np.stack([sound_S] * 2), [-4.0, 4.0], rate=16000)
    for shifted_S in shifted_RS:
        share_S = np.square(shifted_S) / np.square(shifted_S).sum()
        middle = (share_S * time_S).sum()
        deviation = np.sqrt((share_S * (time_S - middle) ** 2).sum())
        assert abs(middle - 0.7) < 0.005
        assert abs(deviation - 0.075) < 0.01


def test_without_a_change_of_pitch_nothing_changes():
    rng = np.random.default_rng(0)
    noise_1S = 0.1 * rng.standard_normal((1, 16001))
    shifted_1S = shift(noise_1S, [0.0], rate=16000)
    # The highest frequencies fade out: 8 kHz has no place in the longer wave.
    before_K = np.fft.rfft(noise_1S[0])[:7500]
    after_K = np.fft.rfft(shifted_1S[0])[:7500]
    error_db = decibels(
        np.square(np.abs(after_K - before_K)).sum() / np.square(np.abs(before_K)).sum()
    )
    assert error_db < -40


def test_frequencies_that_would_be_too_high_are_removed():
    tone_1S = 0.3 * np.sin(2 * np.pi * 7000 * time_of(16000))[None]
    shifted_1S = shift(tone_1S, [6.0], rate=16000)
    # At both ends, where the tone begins and ends at once, it has all frequencies.
    middle_S = shifted_1S[0, 2000:-2000]
    assert decibels(np.square(middle_S).mean() / np.square(tone_1S).mean()) < -50


def test_a_loud_crop_is_not_clipped():
    square_S = np.sign(harmonic_sound(150.0, rate=16000)) * 32767 / 32768
    shifted_RS = shift(np.stack([square_S] * 2), [-2.0, 3.0], rate=16000)
    for shifted_S in shifted_RS:
        peak = np.abs(shifted_S).max()
        assert abs(peak - 32767 / 32768) < 1e-6
    # A crop that is beyond full scale already may keep its peak.
    shifted_1S = shift(3 * square_S[None], [3.0], rate=16000)
    assert 1.5 < np.abs(shifted_1S).max() < 3.0


@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize("num_samples", [200, 401, 1600])
def test_short_and_silent_crops(num_samples, rate):
    rng = np.random.default_rng(1)
    wave_RS = 0.1 * rng.standard_normal((3, num_samples))
    wave_RS[1] = 0
    shifted_RS = shift(wave_RS, [-5.0, 3.0, 5.0], rate=rate)
    assert shifted_RS.shape == wave_RS.shape
    assert np.isfinite(shifted_RS).all()
    assert not shifted_RS[1].any()
    level_R = np.square(shifted_RS).mean(1) / np.square(wave_RS).mean(1).clip(1e-9)
    assert level_R[[0, 2]].min() > 0.9


def test_speech_among_zeros():
    """Digital silence before and after speech, which many corpora have."""
    sound_S = harmonic_sound(120.0, rate=16000)
    sound_S[:12000] = 0
    sound_S[20000:] = 0
    shifted_1S = shift(sound_S[None], [3.0], rate=16000)
    # A frame is 800 samples long.
    assert not shifted_1S[0, :11000].any()
    assert not shifted_1S[0, 21000:].any()
    assert shifted_1S[0, 12000:20000].std() > 0.9 * sound_S[12000:20000].std()


def test_rows_that_are_computed_together_equal_rows_alone(monkeypatch):
    """A GPU computes many rows at a time, a CPU one."""
    rng = np.random.default_rng(4)
    wave_RS = 0.1 * rng.standard_normal((4, 8001))
    wave_RS[2, :5000] = 0
    setting_R = [-6.0, -1.0, 2.0, 6.0]
    alone_RS = shift(wave_RS, setting_R, rate=16000)
    monkeypatch.setattr(spectra, "CPU_ROWS", 3)
    together_RS = shift(wave_RS, setting_R, rate=16000)
    assert np.abs(together_RS - alone_RS).max() < 1e-5


def test_the_host_never_waits():
    """Operations that need values of the device on the host fail on the device "meta"."""
    pitch = Pitch(pitch_prob=1, num_samples=4000).to("meta")
    rows = torch.arange(3, device="meta")
    ratio_R = torch.zeros(3, dtype=torch.int64, device="meta")
    draws = Draws(rows, {"ratio": ratio_R})
    x_R = torch.zeros(3, 4000, device="meta")
    assert pitch.apply(x_R, draws).shape == (3, 4000)


def test_draws_are_evenly_spread_over_the_range():
    pitch = Pitch(pitch_prob=1, num_samples=4000, pitch_semitones=(-2.0, 4.0))
    rng = np.random.default_rng(2)
    semitones = []
    for _ in range(2000):
        draw = pitch.draw(rng)
        assert draw is not None
        semitones.append(draw.values["semitones"])
        ratio = draw.values["ratio"] / 65536
        assert abs(12 * np.log2(ratio) - semitones[-1]) < 0.001
    assert -2 <= min(semitones) < -1.9
    assert 3.9 < max(semitones) <= 4
    assert abs(np.mean(semitones) - 1) < 0.2


@pytest.mark.parametrize("ends", [(3.0, -3.0), (-13.0, 0.0), (0.0, 13.0)])
def test_other_ranges_are_refused(ends):
    with refuses("augment", "pitch_semitones", f"{ends[0]:g}", f"{ends[1]:g}"):
        Pitch(pitch_prob=1, num_samples=4000, pitch_semitones=ends)
