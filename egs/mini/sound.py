"""Rooms and noises of the mini corpus.

Shape suffixes: S samples, R samples of a room impulse response. Waves are float64 at 16 kHz.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.signal import fftconvolve

SAMPLE_RATE = 16_000
FFT_BLOCK = 4096
LOWEST_HZ = 20.0  # below, the power of coloured noise stays the same


def coloured_noise(
    rng: np.random.Generator, num_samples: int, *, slope_db: float
) -> np.ndarray:
    """Return unit-power noise whose power changes by `slope_db` per octave."""
    # Whole blocks, because their length is fast to transform.
    num_blocks = math.ceil(num_samples / FFT_BLOCK)
    length = num_blocks * FFT_BLOCK
    white_S = rng.standard_normal(length)
    hz = np.fft.rfftfreq(length, 1 / SAMPLE_RATE)
    hz = np.maximum(hz, LOWEST_HZ)
    # A power that doubles with the frequency rises by 3 dB per octave.
    exponent = slope_db / 20 / np.log10(2)
    spectrum = np.fft.rfft(white_S) * hz**exponent
    coloured_S = np.fft.irfft(spectrum, length)
    return _unit_power(coloured_S[:num_samples])


def hum(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Return mains hum: harmonics of about 50 or 60 Hz with a soft hiss."""
    time = np.arange(num_samples) / SAMPLE_RATE
    base_hz = rng.choice((50.0, 60.0)) * rng.uniform(0.99, 1.01)
    wave_S = 0.1 * coloured_noise(rng, num_samples, slope_db=-3.0)
    for harmonic in range(1, 25):
        height = rng.uniform(0.1, 1.0) / harmonic**0.7
        cycles = harmonic * base_hz * time + rng.uniform()
        wave_S += height * np.sin(2 * np.pi * cycles)
    return _unit_power(wave_S)


def modulated_noise(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Return noise modulated a few times per second, like traffic or a machine."""
    slope_db = rng.uniform(-6.0, 0.0)
    wave_S = coloured_noise(rng, num_samples, slope_db=slope_db)
    time = np.arange(num_samples) / SAMPLE_RATE
    times_per_second = rng.uniform(0.3, 4.0)
    phase = rng.uniform()
    swing = np.sin(2 * np.pi * (times_per_second * time + phase))
    depth = rng.uniform(0.5, 0.95)
    return _unit_power(wave_S * (1.0 + depth * swing))


def babble(
    rng: np.random.Generator, num_samples: int, *, voices: Sequence[np.ndarray]
) -> np.ndarray:
    """Return a mix of about equally loud voices, each repeated from a random position."""
    mix_S = np.zeros(num_samples)
    for voice_S in voices:
        begin = rng.integers(len(voice_S))
        places = (begin + np.arange(num_samples)) % len(voice_S)
        level_db = rng.uniform(-5.0, 0.0)
        mix_S += _unit_power(voice_S)[places] * 10 ** (level_db / 20)
    return _unit_power(mix_S)


def room(rng: np.random.Generator, *, rt60_seconds: float) -> np.ndarray:
    """Return a room impulse response: direct sound, then noise decaying 60 dB in `rt60_seconds`."""
    num_samples = round(rt60_seconds * SAMPLE_RATE)
    time = np.arange(num_samples) / SAMPLE_RATE
    # An amplitude of 1/1000 is -60 dB.
    decay_R = 10 ** (-3.0 * time / rt60_seconds)
    response_R = rng.standard_normal(num_samples) * decay_R
    # Nothing arrives between the direct sound and the first reflection.
    first_reflection_seconds = rng.uniform(0.001, 0.008)
    response_R[: round(first_reflection_seconds * SAMPLE_RATE)] = 0.0
    direct_to_late_db = rng.uniform(-2.0, 10.0)
    late = np.sqrt(np.sum(response_R**2))
    response_R *= 10 ** (-direct_to_late_db / 20) / late
    response_R[0] = 1.0
    return response_R


def augment(wave_S: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return an utterance in a small room, with noise at 12 to 30 dB SNR and a random level."""
    response_R = room(rng, rt60_seconds=rng.uniform(0.1, 0.45))
    reverberant_S = fftconvolve(wave_S, response_R)[: len(wave_S)]
    return add_noise(reverberant_S, rng)


def add_noise(speech_S: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a recording with noise at 12 to 30 dB SNR and a random level."""
    if rng.uniform() < 0.2:
        noise_S = hum(rng, len(speech_S))
    else:
        slope_db = rng.uniform(-7.0, 1.0)
        noise_S = coloured_noise(rng, len(speech_S), slope_db=slope_db)
    snr_db = rng.uniform(12.0, 30.0)
    speech_level = np.sqrt(np.mean(speech_S**2))
    mix_S = speech_S + noise_S * speech_level * 10 ** (-snr_db / 20)
    return at_level(mix_S, peak_db=rng.uniform(-20.0, -1.0))


def at_level(wave_S: np.ndarray, *, peak_db: float) -> np.ndarray:
    """Scale a wave so that its largest sample is at `peak_db` relative to full scale."""
    peak = np.max(np.abs(wave_S))
    return wave_S * (10 ** (peak_db / 20) / peak)


def _unit_power(wave_S: np.ndarray) -> np.ndarray:
    """Scale a wave so that its mean square is 1."""
    return wave_S / np.sqrt(np.mean(wave_S**2))
