"""Speakers that buzz, and a configuration that trains on them in seconds: for tests."""

from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
SAMPLE_RATE = 16000
TINY = [
    "model.args.head_channels=4",
    "model.args.init_channels=16",
    "model.args.growth_rate=8",
    "model.args.blocks=[2,2,2]",
    "model.args.embed_dim=32",
    "data.crop_seconds=0.6",
    "data.valid_speakers=2",
    "training.global_batch=8",
    "training.num_epochs=4",
    "training.checkpoint_every_steps=2",
    "runtime.log_every_steps=1",
    "runtime.log_every_seconds=0.001",
    "runtime.num_workers=1",
    "runtime.precision=fp32",
]


def buzz(speaker: int, utterance: int, seconds: float) -> np.ndarray:
    """int16: harmonics of the speaker's pitch, fading at the speaker's own rate, with noise."""
    rng = np.random.default_rng([speaker, utterance])
    t = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    pitch = (90 + 17 * speaker) * (1 + 0.03 * np.sin(2 * np.pi * 3 * t + utterance))
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    wave = sum(np.sin(k * phase) * (0.6 + 0.04 * speaker) ** k for k in range(1, 20))
    wave = wave / np.abs(wave).max() + 0.05 * rng.standard_normal(len(t))
    return (wave * 8000).astype(np.int16)
