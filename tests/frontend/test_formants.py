"""Formants on vowels made of pulses or noise and resonators, whose formants are known."""

import numpy as np
import pytest
import scipy.linalg
import scipy.signal
import torch
from batches import decibels, make_batch
from refusals import refuses
from sounds import pitch_of

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment import spectra
from speakerlab.frontend.augment.formants import Formants

# In Hz, of three vowels like those of "cut", "see" and "law".
VOWELS = [(650.0, 1300.0, 2500.0), (320.0, 2200.0, 2900.0), (400.0, 800.0, 2400.0)]
BANDWIDTH = 90.0  # Hz


def make_vowel(formants: tuple[float, ...], *, pitch: float, rate: int) -> np.ndarray:
    """2 s of pulses, or of noise if `pitch` is 0, through a resonator for each formant."""
    num_samples = 2 * rate + 1  # odd on purpose
    cycle_S = np.arange(num_samples) * pitch / rate
    wave_S = np.diff(np.floor(cycle_S), prepend=0.0)
    if not pitch:
        wave_S = np.random.default_rng(0).standard_normal(num_samples)
    for hertz in formants:
        radius = np.exp(-np.pi * BANDWIDTH / rate)
        angle = 2 * np.pi * hertz / rate
        denominator = [1, -2 * radius * np.cos(angle), radius**2]
        wave_S = scipy.signal.lfilter([1.0], denominator, wave_S)
    return 0.1 * wave_S / wave_S.std()


def formants_of(wave_S: np.ndarray, *, rate: int) -> np.ndarray:
    """The three resonances of an all-pole model (linear prediction)."""
    windowed_S = wave_S * np.hanning(len(wave_S))
    spectrum_K = np.fft.rfft(windowed_S, n=1 << 17)
    correlation = np.fft.irfft(np.abs(spectrum_K) ** 2)[:9]
    correlation[0] *= 1 + 1e-9
    weights = scipy.linalg.solve_toeplitz(correlation[:-1], correlation[1:])
    poles = np.roots([1, *-weights])
    upper = poles[poles.imag > 0]
    sharpest = sorted(upper, key=np.abs)[-3:]
    return np.sort(np.angle(sharpest)) * rate / (2 * np.pi)


def stack(factor_R: list[float]) -> Draws:
    drawn = {}
    for row, factor in enumerate(factor_R):
        drawn[row] = {"formants": Draw({"factor": factor})}
    # The waves of the batch do not matter.
    placeholder_RS = np.zeros((len(factor_R), 1), np.int16)
    (draws,) = make_batch(placeholder_RS, drawn).draws["formants"]
    return draws


def move(wave_RS: np.ndarray, factor_R: list[float], *, rate: int) -> np.ndarray:
    formants = Formants(formants_prob=1, sample_rate=rate)
    x_RS = torch.from_numpy(wave_RS).float()
    return formants.apply(x_RS, stack(factor_R)).numpy()


@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize("pitch", [0.0, 90.0, 140.0, 220.0])
@pytest.mark.parametrize("formants", VOWELS)
def test_formants_move_by_the_factor_and_pitch_level_and_length_stay(
    formants, pitch, rate
):
    factor_R = [0.85, 0.93, 1.08, 1.15]
    vowel_S = make_vowel(formants, pitch=pitch, rate=rate)
    vowel_RS = np.stack([vowel_S] * len(factor_R))
    moved_RS = move(vowel_RS, factor_R, rate=rate)

    assert moved_RS.shape == vowel_RS.shape
    for moved_S, factor in zip(moved_RS, factor_R):
        # The same vowel, made with formants at the factor.
        scaled = tuple(factor * hertz for hertz in formants)
        expected_S = make_vowel(scaled, pitch=pitch, rate=rate)
        expected = formants_of(expected_S, rate=rate)
        error = np.abs(formants_of(moved_S, rate=rate) - expected)
        # The lowest formants are known to 20 Hz, and no more exactly than harmonics show them,
        # which are as far apart as the pitch.
        tolerance = np.maximum(0.05 * expected, max(20.0, 0.3 * pitch))
        assert (error < tolerance).all()

        level_db = decibels(np.square(moved_S).mean() / np.square(vowel_S).mean())
        assert abs(level_db) < 0.01
        if pitch:
            moved_pitch = pitch_of(moved_S, rate=rate, near=pitch)
            assert abs(moved_pitch / pitch - 1) < 0.01


def test_a_factor_of_1_changes_nothing():
    rng = np.random.default_rng(0)
    noise_1S = 0.1 * rng.standard_normal((1, 16001))
    moved_1S = move(noise_1S, [1.0], rate=16000)
    assert np.abs(moved_1S - noise_1S).max() < 1e-5


def test_noise_beyond_the_edge_of_a_band_is_raised_by_20_db_at_most():
    """Speech that went through a telephone has an envelope that falls by more at 3.4 kHz."""
    rng = np.random.default_rng(1)
    band = scipy.signal.firwin(401, 3400, fs=16000)
    noise_S = scipy.signal.lfilter(band, [1.0], 0.1 * rng.standard_normal(32000))
    noise_S += 1e-5 * rng.standard_normal(32000)
    (moved_S,) = move(noise_S[None], [1.15], rate=16000)

    def power_above(wave_S: np.ndarray) -> float:
        spectrum_K = np.fft.rfft(wave_S)
        return float(np.square(np.abs(spectrum_K[8000:9000])).sum())  # 4 to 4.5 kHz

    gain_db = decibels(power_above(moved_S) / power_above(noise_S))
    assert 5 < gain_db < 21


def test_a_loud_crop_is_not_clipped():
    square_S = np.sign(make_vowel(VOWELS[0], pitch=150.0, rate=16000)) * 32767 / 32768
    moved_RS = move(np.stack([square_S] * 2), [0.85, 1.15], rate=16000)
    for moved_S in moved_RS:
        assert abs(np.abs(moved_S).max() - 32767 / 32768) < 1e-6


@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize("num_samples", [200, 401, 1600])
def test_short_and_silent_crops(num_samples, rate):
    rng = np.random.default_rng(2)
    wave_RS = 0.1 * rng.standard_normal((3, num_samples))
    wave_RS[1] = 0
    moved_RS = move(wave_RS, [0.85, 1.1, 1.15], rate=rate)
    assert moved_RS.shape == wave_RS.shape
    assert np.isfinite(moved_RS).all()
    assert not moved_RS[1].any()
    for row in (0, 2):
        level_db = decibels(
            np.square(moved_RS[row]).mean() / np.square(wave_RS[row]).mean()
        )
        assert abs(level_db) < 0.01


def test_rows_that_are_computed_together_equal_rows_alone(monkeypatch):
    """A GPU computes many rows at a time, a CPU one."""
    rng = np.random.default_rng(4)
    wave_RS = 0.1 * rng.standard_normal((4, 8001))
    wave_RS[2, :5000] = 0
    setting_R = [0.85, 0.97, 1.08, 1.15]
    alone_RS = move(wave_RS, setting_R, rate=16000)
    monkeypatch.setattr(spectra, "CPU_ROWS", 3)
    together_RS = move(wave_RS, setting_R, rate=16000)
    assert np.abs(together_RS - alone_RS).max() < 1e-5


def test_the_host_never_waits():
    """Operations that need values of the device on the host fail on the device "meta"."""
    formants = Formants(formants_prob=1).to("meta")
    rows = torch.arange(3, device="meta")
    draws = Draws(rows, {"factor": torch.ones(3, device="meta")})
    x_R = torch.zeros(3, 4000, device="meta")
    assert formants.apply(x_R, draws).shape == (3, 4000)


def test_draws_are_evenly_spread_over_the_logarithm_of_the_range():
    formants = Formants(formants_prob=1, formant_range=(0.8, 1.25))
    rng = np.random.default_rng(3)
    factors = []
    for _ in range(2000):
        draw = formants.draw(rng)
        assert draw is not None
        factors.append(draw.values["factor"])
    assert 0.8 <= min(factors) < 0.81
    assert 1.24 < max(factors) <= 1.25
    assert abs(np.median(factors) - 1) < 0.02


@pytest.mark.parametrize("ends", [(1.2, 0.8), (0.4, 1.0), (1.0, 2.5)])
def test_other_ranges_are_refused(ends):
    with refuses("augment", "formant_range", f"{ends[0]:g}", f"{ends[1]:g}"):
        Formants(formants_prob=1, formant_range=ends)
