"""Batches with given draws, and what to fill them with."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from speakerlab.core.batch import Batch, Crop, Draw
from speakerlab.data.loader import collate
from speakerlab.frontend.augment import Augment, Augmentation
from speakerlab.frontend.augment.codec import LOWEST_OCTAVES, OFFSETS
from speakerlab.frontend.augment.noise import Noise

S = 8001  # samples of a crop, odd on purpose


def make_batch(wave_BS: np.ndarray, drawn: Mapping[int, Mapping[str, Draw]]) -> Batch:
    """A batch of int16 rows; `drawn`: the draws of some of them."""
    crops = []
    for row, wave_S in enumerate(wave_BS):
        crop = Crop(
            wave_S=wave_S,
            feats_TF=None,
            first=0,
            label=0,
            position=row,
            row=row,
            draws=drawn.get(row, {}),
        )
        crops.append(crop)
    return collate(crops)


def apply_all(
    augmentations: Mapping[str, Augmentation],
    wave_BS: np.ndarray,
    drawn: Mapping[int, Mapping[str, Draw]],
    num_samples: int = S,
) -> torch.Tensor:
    """wave_BS, float32, of int16 rows with these draws."""
    augment = Augment(augmentations, num_samples=num_samples)
    batch = make_batch(wave_BS, drawn)
    return augment(batch)


def apply_one(
    augmentation: Augmentation,
    wave_BS: np.ndarray,
    drawn: Mapping[int, Draw],
) -> torch.Tensor:
    """Apply a single augmentation, whose draws are given by row."""
    named_draws = {row: {"it": draw} for row, draw in drawn.items()}
    return apply_all({"it": augmentation}, wave_BS, named_draws)


def noise_draw(
    noise: Noise,
    noises: int | Sequence[int],
    starts: int | Sequence[int],
    snr_db: float,
) -> Draw:
    """A draw of `noise`; several noises and starts are babble."""
    place_V = noise.offset_K[np.atleast_1d(noises)] + starts
    power_ratio = 10 ** (snr_db / 10)
    return Draw({"place": place_V, "snr": power_ratio})


def codec_draw(law: int) -> Draw:
    values = {
        "offset": OFFSETS[law],
        "lowest": LOWEST_OCTAVES[law],
    }
    return Draw(values)


def int16_noise(*shape: int, seed: int, deviation: float = 3000.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    noise = deviation * rng.standard_normal(shape)
    return noise.astype(np.int16)


def decaying_room(num_samples: int, *, seed: int, delay: int) -> np.ndarray:
    """An impulse response: a peak after `delay` samples, then a decaying tail."""
    rng = np.random.default_rng(seed)
    decay = np.exp(-np.arange(num_samples) / 1500)
    room = 0.1 * rng.standard_normal(num_samples) * decay
    room[:delay] *= 0.01
    room[delay] = 1.0
    return room


def decibels(ratio: float) -> float:
    return 10 * np.log10(ratio)
