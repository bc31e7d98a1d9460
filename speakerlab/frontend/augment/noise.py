"""Noise: noise, music or babble is added to a crop, at an exact signal-to-noise ratio.

Letters: K recordings of the bank, R rows that are changed, V recordings in a noise (several make
babble), S samples of a crop.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import INT16_SCALE, Augmentation

SILENCE_POWER = 1e-6  # -60 dBFS: below this, an SNR is meaningless


class Noise(Augmentation):
    """Additive noise: one recording or, of the kind speech, the sum of several (babble).

    The bank is a tensor of the device, or stays on the host, where the data workers cut the noise
    and send it along (`wave` in the draw, instead of its `place` in the bank). `num_silent` counts
    the rows that got no noise because they or the noise were below -60 dBFS.
    """

    bank: Tensor

    def __init__(
        self,
        *,
        noise_prob: float,
        noises: Sequence[Any],
        noise_kinds: Sequence[str],
        num_samples: int,
        snr_db: tuple[float, float] = (0.0, 15.0),
        music_snr_db: tuple[float, float] = (5.0, 15.0),
        babble_snr_db: tuple[float, float] = (13.0, 20.0),
        babble_voices: tuple[int, int] = (3, 7),
        kind_odds: Mapping[str, float] | None = None,
        noise_on_device: bool = True,
    ) -> None:
        """Take `noises` (int16, read when sliced), their kinds, and odds of kinds (default 1)."""
        super().__init__()
        self.prob = noise_prob
        self.num_samples = num_samples
        self.babble_voices = babble_voices
        self.snr_db = {
            "noise": snr_db,
            "music": music_snr_db,
            "speech": babble_snr_db,
        }
        self.lengths_K = lengths_of(noises)

        # Kind -> indices of its recordings, and its odds; kinds with odds of 0 are never drawn.
        configured_odds = kind_odds or {}
        kind_K = np.array(noise_kinds, dtype=str)
        self.of_kind: dict[str, np.ndarray] = {}
        odds: dict[str, float] = {}
        for name in np.unique(kind_K):
            kind = str(name)
            self.of_kind[kind] = np.flatnonzero(kind_K == name)
            odds[kind] = configured_odds.get(kind, 1.0)
        self.kinds = [kind for kind in odds if odds[kind]]
        if odds and not self.kinds:
            raise ValueError(
                "augment.kind_odds: are 0 for all recordings, which are"
                f" {', '.join(odds)}; raise one, or set augment.noise_prob to 0"
            )
        # Kind k is drawn where a number below the total odds falls between ends k - 1 and k: with
        # the odds 1 and 3, the ends are 1 and 4, and 2.5 draws the second kind.
        drawn_odds = [odds[kind] for kind in self.kinds]
        self.kind_ends = np.cumsum(drawn_odds)

        self.host_bank = None if noise_on_device else noises
        bank_noises = noises if noise_on_device else ()
        bank, self.offset_K = noise_bank(bank_noises, num_samples=num_samples)
        self.register_buffer("bank", bank, persistent=False)

    def draw(self, rng: np.random.Generator) -> Draw | None:
        """Draw V recordings and their starts; add the noise itself where the host has the bank."""
        has_noises = len(self.lengths_K) > 0
        if not has_noises or rng.random() >= self.prob:
            return None

        # A kind, with a probability proportional to its odds.
        total_odds = self.kind_ends[-1]
        position = rng.random() * total_odds
        kind_index = np.searchsorted(self.kind_ends, position, side="right")
        kind = self.kinds[int(kind_index)]

        # Babble is several recordings of speech, without repeats where there are enough.
        min_voices, max_voices = (1, 1)
        if kind == "speech":
            min_voices, max_voices = self.babble_voices
        num_voices = int(rng.integers(min_voices, max_voices + 1))
        recordings = self.of_kind[kind]
        noise_V = rng.choice(
            recordings,
            num_voices,
            replace=num_voices > len(recordings),
        )
        start_V = rng.integers(self.lengths_K[noise_V])

        lowest_db, highest_db = self.snr_db[kind]
        snr_db = float(rng.uniform(lowest_db, highest_db))
        snr = 10 ** (torch.tensor(snr_db) / 10)  # a ratio of powers, in fp32
        values = {
            "noise": noise_V,
            "start": start_V,
            "snr_db": snr_db,
            "snr": snr.item(),
        }
        if self.host_bank is None:
            values["place"] = self.offset_K[noise_V] + start_V
        else:
            values["wave"] = self._cut(noise_V, start_V)
        return Draw(values)

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        """Return the rows plus noise; a row does not change if it or its noise is silent."""
        noise_RS = self._noise(draws)
        speech_power_R = x_R.square().mean(1)
        noise_power_R = noise_RS.square().mean(1)
        silent_R = torch.minimum(speech_power_R, noise_power_R) < SILENCE_POWER
        self.num_silent.append(silent_R.sum())

        snr_R = draws.values["snr"]
        gain_R = (speech_power_R / noise_power_R / snr_R).sqrt()
        gain_R = gain_R.masked_fill(silent_R, 0.0)
        noise_RS.mul_(gain_R[:, None])
        return x_R.add_(noise_RS)

    def _noise(self, draws: Draws) -> Tensor:
        """Return noise (R, S) at any level: as the workers cut it, or cut from the bank here."""
        if "wave" in draws.values:
            wave_RS = draws.values["wave"]
            return wave_RS.float().div_(INT16_SCALE)
        place_RV = draws.values["place"]

        # On a GPU all rows at once: the same few kernels for any numbers of voices.
        if place_RV.device.type != "cpu":
            return self._voices(place_RV)

        # On a CPU only rows of babble pay for a sum. The stretches are a view, one row per place.
        stretches = self.bank.unfold(0, self.num_samples, 1)
        first_R = place_RV[:, 0]
        noise_RS = stretches.index_select(0, first_R).float()
        noise_RS.div_(INT16_SCALE)
        is_voice_RV = place_RV >= 0
        voices_per_row = is_voice_RV.sum(1).tolist()
        for row, num_voices in enumerate(voices_per_row):
            if num_voices > 1:
                noise_RS[row] = self._voices(place_RV[row, :num_voices])
        return noise_RS

    def _voices(self, place_V: Tensor) -> Tensor:
        """Return the sum (..., S) of recordings at (..., V) in the bank, each at the same power.

        Rows with fewer voices than others are filled up with the place -1. As an index, it selects
        the last stretch of the bank, which is silence.
        """
        stretches = self.bank.unfold(0, self.num_samples, 1)
        voice_VS = stretches[place_V].float()
        power_V = voice_VS.square().mean(-1)

        # A silent voice gets an infinite power, and so a gain of 0.
        silence_power = SILENCE_POWER * INT16_SCALE**2
        power_V = F.threshold(power_V, silence_power, torch.inf)
        gain_V1 = power_V.rsqrt().unsqueeze(-1)
        return voice_VS.mul_(gain_V1).sum(-2)

    def _cut(self, noise_V: np.ndarray, start_V: np.ndarray) -> np.ndarray:
        """Cut noise (S,), int16, from the bank on the host: as it is, or babble at full scale.

        The level is free because the noise is scaled to an SNR later; at full scale, rounding
        errors stay below -96 dB of the peak.
        """
        assert self.host_bank is not None
        stretches: list[np.ndarray] = []
        for noise, start in zip(noise_V, start_V):
            stretch_S = self._stretch(self.host_bank[noise], int(start))
            stretches.append(stretch_S)
        if len(stretches) == 1:
            return stretches[0]

        # Babble: the sum of voices at the same power, without the silent ones.
        sum_S = np.zeros(self.num_samples, dtype=np.float32)
        for voice_S in stretches:
            float_S = voice_S.astype(np.float32) / INT16_SCALE
            energy = float(np.dot(float_S, float_S))
            power = energy / len(float_S)
            if power >= SILENCE_POWER:
                sum_S += float_S * power**-0.5

        magnitude_S = np.abs(sum_S)
        peak = float(magnitude_S.max()) or 1.0  # 1 if all voices are silent
        scaled_S = sum_S * (32767 / peak)
        return np.rint(scaled_S).astype(np.int16)

    def _stretch(self, noise: Any, start: int) -> np.ndarray:
        """Read samples of a noise from `start`; after its end, continue at its beginning."""
        wave_S = noise[start : start + self.num_samples]
        missing = self.num_samples - len(wave_S)
        if not missing:
            return wave_S
        # A noise that is shorter than the missing part repeats.
        repeated_S = np.resize(noise[:missing], missing)
        return np.concatenate([wave_S, repeated_S])


def noise_bank(noises: Sequence[Any], *, num_samples: int) -> tuple[Tensor, np.ndarray]:
    """Return all noises in one int16 vector, and the position where each begins, (K,) int64.

    Each noise is followed by its own beginning, S - 1 samples long: where S is 3, the noise 1 2 3 4
    is stored as 1 2 3 4 1 2. So a crop's noise, from any start, is one contiguous slice, also where
    the noise has to repeat. An index for every sample instead would take a CPU longer than
    everything else that the augmentation does. The last S samples of the bank are silence.
    """
    looped_lengths = lengths_of(noises) + num_samples - 1
    offsets = np.cumsum(looped_lengths) - looped_lengths
    total = int(looped_lengths.sum()) + num_samples
    bank = np.zeros(total, dtype=np.int16)
    for noise, offset, looped_length in zip(noises, offsets, looped_lengths):
        end = offset + looped_length
        wave_S = noise[:]  # reads the recording
        bank[offset:end] = np.resize(wave_S, looped_length)
    return torch.from_numpy(bank), offsets


def lengths_of(noises: Sequence[Any]) -> np.ndarray:
    """Return the number of samples of each recording, (K,) int64."""
    return np.array([len(noise) for noise in noises], dtype=np.int64)


def noise_bytes(lengths: Sequence[int], *, num_samples: int) -> int:
    """Return the bytes that noises of these lengths, in samples, take on the device."""
    # Each noise is followed by its beginning, and the bank ends in silence: see `noise_bank`.
    repeated_samples = len(lengths) * (num_samples - 1)
    silent_samples = num_samples
    return 2 * (sum(lengths) + repeated_samples + silent_samples)
