"""Room: a crop is convolved with a room impulse response.

Letters: K rooms, L samples of a room, R rows that are changed, S samples of a crop.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.fft
import torch
from torch import Tensor

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import Augmentation

LEAD_SECONDS = 0.005  # kept of a room before its direct sound
ROOM_SECONDS = 1.0  # kept in all
KEPT_ROOMS = 200  # spectra of so many rooms, a quarter of a megabyte each, are kept on a CPU


class Room(Augmentation):
    """Convolution with a random room, without the delay of its direct sound."""

    room_KL: Tensor

    def __init__(
        self,
        *,
        room_prob: float,
        rooms: Sequence[Any],
        num_samples: int,
        sample_rate: int = 16000,
    ) -> None:
        """Take `rooms`: vectors of any scale, or objects that give one when sliced."""
        super().__init__()
        self.prob, self.num_rooms = room_prob, len(rooms)
        self.num_samples, self.lead = num_samples, round(LEAD_SECONDS * sample_rate)
        room_KL = room_bank(rooms, sample_rate=sample_rate)
        self.num_fft = scipy.fft.next_fast_len(num_samples + room_KL.shape[1] - 1, real=True)
        self.register_buffer("room_KL", room_KL, persistent=False)
        self.kept_spectra: Tensor | None = None

    def draw(self, rng: np.random.Generator) -> Draw | None:
        if not self.num_rooms or rng.random() >= self.prob:
            return None
        return Draw({"room": int(rng.integers(self.num_rooms))})

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        spectrum = torch.fft.rfft(x_R, n=self.num_fft)
        room_R = draws.values["room"]
        if x_R.device.type != "cpu" or self.num_rooms > KEPT_ROOMS:
            spectrum *= torch.fft.rfft(self.room_KL.index_select(0, room_R), n=self.num_fft)
        else:
            kept = self.kept_spectra
            if kept is None:
                kept = self.kept_spectra = torch.fft.rfft(self.room_KL, n=self.num_fft)
            spectrum *= kept.index_select(0, room_R)
        wet = torch.fft.irfft(spectrum, n=self.num_fft)
        return wet[:, self.lead : self.lead + self.num_samples]


def room_bank(rooms: Sequence[Any], *, sample_rate: int) -> Tensor:
    """Return impulse responses (K, L) of unit energy whose direct peaks are at the same sample.

    A room is cut from 5 ms before its largest sample, taken to be the direct sound, to 1 s in all.
    Raises ValueError for a room that is empty or silent.
    """
    lead = round(LEAD_SECONDS * sample_rate)
    width = _room_width([len(room) for room in rooms], sample_rate=sample_rate)
    bank_KL = np.zeros((len(rooms), width), dtype=np.float32)
    for index, room in enumerate(rooms):
        room_S = np.asarray(room[:], dtype=np.float64)
        if not room_S.any():
            raise ValueError(f"data.rirs: room {index} is empty or silent; remove it")
        peak = int(np.abs(room_S).argmax())
        kept_S = np.pad(room_S, (max(0, lead - peak), 0))[max(0, peak - lead) :][:width]
        bank_KL[index, : len(kept_S)] = kept_S / np.sqrt(np.square(kept_S).sum())
    return torch.from_numpy(bank_KL)


def room_bytes(lengths: Sequence[int], *, sample_rate: int) -> int:
    """Return the bytes on the device of rooms of these lengths in samples."""
    return 4 * len(lengths) * _room_width(lengths, sample_rate=sample_rate)


def _room_width(room_lengths: Sequence[int], *, sample_rate: int) -> int:
    lead = round(LEAD_SECONDS * sample_rate)
    return min(round(ROOM_SECONDS * sample_rate), lead + max(room_lengths, default=0))
