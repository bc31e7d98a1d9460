"""Harmonic voices, made in a moment."""

import numpy as np
import torch

RATE = 16000


def make_wave(speaker: int, take: int, seconds: float, rate: int = RATE) -> np.ndarray:
    """wave_S, int16: ten harmonics of the speaker's pitch and a little noise."""
    rng = np.random.default_rng([speaker, take])
    time_S = np.arange(round(seconds * rate)) / rate
    pitch = 90 + 25 * speaker + take
    wave_S = sum(np.sin(2 * np.pi * pitch * k * time_S) / k for k in range(1, 11))
    return (4000 * wave_S + 300 * rng.standard_normal(len(time_S))).astype(np.int16)


def make_noise(seconds: float, rows: int = 1) -> torch.Tensor:
    """wave_BS of Gaussian noise, always the same."""
    generator = torch.Generator().manual_seed(1)
    return 0.1 * torch.randn(rows, round(seconds * RATE), generator=generator)
