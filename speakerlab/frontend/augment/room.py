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

LEAD_SECONDS = 0.005  # of a room before its direct sound; earlier samples are cut
ROOM_SECONDS = 1.0  # of a room in all
# On a CPU, the spectra of up to so many rooms, a quarter of a megabyte each, are computed once.
CACHED_ROOMS = 200


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
        """Take `rooms`: vectors of any scale, or objects that return one when sliced."""
        super().__init__()
        self.prob = room_prob
        self.num_rooms = len(rooms)
        self.num_samples = num_samples
        self.lead = round(LEAD_SECONDS * sample_rate)
        room_KL = room_bank(rooms, sample_rate=sample_rate)

        # The convolution is a product of spectra, of a length at which nothing wraps around.
        num_convolved = num_samples + room_KL.shape[1] - 1
        self.num_fft = scipy.fft.next_fast_len(num_convolved, real=True)
        self.register_buffer("room_KL", room_KL, persistent=False)
        self.cached_spectra: Tensor | None = None

    def draw(self, rng: np.random.Generator) -> Draw | None:
        if not self.num_rooms or rng.random() >= self.prob:
            return None
        room = int(rng.integers(self.num_rooms))
        return Draw({"room": room})

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        room_R = draws.values["room"]
        # The product of two spectra is the spectrum of the convolution.
        spectra = torch.fft.rfft(x_R, n=self.num_fft)
        spectra *= self._room_spectra(room_R)
        reverberant = torch.fft.irfft(spectra, n=self.num_fft)
        # Every room has its direct sound at the sample `lead`; without it, speech is not delayed.
        end = self.lead + self.num_samples
        return reverberant[:, self.lead : end]

    def _room_spectra(self, room_R: Tensor) -> Tensor:
        """Return the spectra of the rooms with these indices."""
        on_cpu = room_R.device.type == "cpu"
        if not on_cpu or self.num_rooms > CACHED_ROOMS:
            room_RL = self.room_KL.index_select(0, room_R)
            return torch.fft.rfft(room_RL, n=self.num_fft)

        spectra = self.cached_spectra
        if spectra is None:
            spectra = torch.fft.rfft(self.room_KL, n=self.num_fft)
            self.cached_spectra = spectra
        return spectra.index_select(0, room_R)


def room_bank(rooms: Sequence[Any], *, sample_rate: int) -> Tensor:
    """Return impulse responses (K, L) of unit energy whose direct peaks are at the same sample.

    A room is cut from 5 ms before its largest sample, taken to be the direct sound, to 1 s in all.
    Raises ValueError for a room that is empty or silent.
    """
    lead = round(LEAD_SECONDS * sample_rate)
    lengths = [len(room) for room in rooms]
    width = _room_width(lengths, sample_rate=sample_rate)
    shape = (len(rooms), width)
    bank_KL = np.zeros(shape, dtype=np.float32)
    for index, room in enumerate(rooms):
        room_S = np.asarray(room[:], dtype=np.float64)
        if not room_S.any():
            raise ValueError(f"data.rirs: room {index} is empty or silent; remove it")

        # Put the direct sound at the sample `lead`. Where that is 80, a room with its peak at 50
        # gets 30 zeros in front, one with its peak at 200 loses the first 120 samples.
        magnitude_S = np.abs(room_S)
        peak = int(magnitude_S.argmax())
        padding = max(0, lead - peak)
        start = max(0, peak - lead)
        padded_S = np.pad(room_S, (padding, 0))
        aligned_S = padded_S[start : start + width]

        energy = np.square(aligned_S).sum()
        normalised_S = aligned_S / np.sqrt(energy)
        bank_KL[index, : len(normalised_S)] = normalised_S
    return torch.from_numpy(bank_KL)


def room_bytes(lengths: Sequence[int], *, sample_rate: int) -> int:
    """Return the bytes that rooms of these lengths, in samples, take on the device."""
    width = _room_width(lengths, sample_rate=sample_rate)
    return 4 * len(lengths) * width


def _room_width(room_lengths: Sequence[int], *, sample_rate: int) -> int:
    """Return the length of the bank's rows in samples: enough for all rooms, at most 1 s."""
    lead = round(LEAD_SECONDS * sample_rate)
    longest = lead + max(room_lengths, default=0)
    return min(round(ROOM_SECONDS * sample_rate), longest)
