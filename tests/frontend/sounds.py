"""What tests measure of a sound."""

import numpy as np


def pitch_of(wave_S: np.ndarray, *, rate: int, near: float) -> float:
    """The frequency whose period fits best, within 40 % of `near`, by autocorrelation."""
    spectrum_K = np.fft.rfft(wave_S, n=1 << 17)
    power_K = np.abs(spectrum_K) ** 2
    # Ten values a sample.
    correlation = np.fft.irfft(power_K, n=10 << 17)
    shortest = int(10 * rate / (1.4 * near))
    longest = int(10 * rate / (0.6 * near))
    period = shortest + int(correlation[shortest:longest].argmax())
    return 10 * rate / period
