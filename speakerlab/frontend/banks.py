"""Rooms and noises as the front end holds them on its device, whole.

In: impulse responses, float; recordings of noise, int16. Out: one tensor of each.
Letters: K entries of a bank, L samples of a room, S samples of a crop or a recording.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LEAD_SECONDS = 0.005  # what a room keeps before its direct peak
ROOM_SECONDS = 1.0  # and how long it is in all


def bank_bytes(
    *,
    num_samples: int,
    room_lengths: Sequence[int] = (),
    noise_lengths: Sequence[int] = (),
    sample_rate: int = 16000,
) -> int:
    """Device memory that `Augment` will take for rooms and noises of these lengths, in samples."""
    rooms = 4 * len(room_lengths) * _room_width(room_lengths, sample_rate=sample_rate)
    noise_samples = sum(noise_lengths) + len(noise_lengths) * (num_samples - 1)
    return rooms + 2 * noise_samples + 16 * len(noise_lengths)


def room_bank(rooms: Sequence[np.ndarray], *, sample_rate: int) -> Tensor:
    """(K, L) float32 impulse responses of unit energy, the direct peak of each at the same sample.

    A room is cut from 5 ms before its largest sample, taken to be the direct sound, to 1 s in all.
    Raises ValueError for a room that is empty, silent or not a vector.
    """
    lead = round(LEAD_SECONDS * sample_rate)
    width = _room_width([len(room) for room in rooms], sample_rate=sample_rate)
    bank_KL = np.zeros((len(rooms), width), dtype=np.float32)
    for index, room in enumerate(rooms):
        room_S = np.asarray(room, dtype=np.float64)
        if room_S.ndim != 1 or not (np.isfinite(room_S).all() and room_S.any()):
            raise ValueError(
                f"augment: room {index} is not a vector of finite samples that sound, got shape "
                f"{room_S.shape}; remove it or choose one channel"
            )
        peak = int(np.abs(room_S).argmax())
        kept_S = np.pad(room_S, (max(0, lead - peak), 0))[max(0, peak - lead) :][:width]
        bank_KL[index, : len(kept_S)] = kept_S / np.sqrt(np.square(kept_S).sum())
    return torch.from_numpy(bank_KL)


def noise_bank(noises: Sequence[np.ndarray], *, num_samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """All noises in a row, (total,) int16; where each begins and how long it is, (K,) int64 both.

    Each is followed by its own beginning, so that S samples from any start are one plain stretch:
    on a CPU an index for every sample would cost more than all the rest of the noise.
    """
    for index, noise in enumerate(noises):
        if noise.ndim != 1 or noise.dtype != np.int16 or not len(noise):
            raise ValueError(
                f"augment: noise {index} is not a vector of int16 samples, got {noise.dtype} of "
                f"shape {noise.shape}; read one channel as int16"
            )
    lengths = np.array([len(noise) for noise in noises], dtype=np.int64)
    looped = lengths + num_samples - 1
    offsets = np.cumsum(looped) - looped
    bank = np.empty(int(looped.sum()), dtype=np.int16)
    for noise, offset, length in zip(noises, offsets, looped):
        bank[offset : offset + length] = np.resize(noise, length)
    return torch.from_numpy(bank), torch.from_numpy(offsets), torch.from_numpy(lengths)


def _room_width(room_lengths: Sequence[int], *, sample_rate: int) -> int:
    lead = round(LEAD_SECONDS * sample_rate)
    return min(round(ROOM_SECONDS * sample_rate), lead + max(room_lengths, default=0))
