"""Noise: noise, music or babble is added to a crop, at an exact signal-to-noise ratio.

Letters: K recordings of the bank, R rows that are changed, V recordings in a noise (several make
babble), S samples of a crop.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import INT16_SCALE, Augmentation

SILENCE_POWER = 1e-6  # -60 dBFS: below this, an SNR is meaningless


class Noise(Augmentation):
    """A recording of one kind or, of the kind speech, the sum of several: babble.

    The bank is a tensor of the device, or stays on the host, where the data workers cut the noise
    and send it along. `num_silent` counts the rows that got no noise because they or the noise
    were below -60 dBFS.
    """

    bank: Tensor
    offset_K: Tensor

    def __init__(
        self,
        *,
        noise_prob: float,
        noises: Sequence[np.ndarray],
        noise_kinds: Sequence[str],
        num_samples: int,
        snr_db: tuple[float, float] = (0.0, 15.0),
        music_snr_db: tuple[float, float] = (5.0, 15.0),
        babble_snr_db: tuple[float, float] = (13.0, 20.0),
        babble_voices: tuple[int, int] = (3, 7),
        kind_odds: Mapping[str, float] | None = None,
        noise_on_device: bool = True,
    ) -> None:
        """noises: int16; noise_kinds: noise, music or speech, of each; kind_odds: by default 1."""
        super().__init__()
        self.prob, self.num_samples, self.babble_voices = noise_prob, num_samples, babble_voices
        self.snr_db = {"noise": snr_db, "music": music_snr_db, "speech": babble_snr_db}
        self.lengths_K = np.array([len(noise) for noise in noises], dtype=np.int64)
        kinds = np.array(noise_kinds, dtype=str)
        self.of_kind = {str(kind): np.flatnonzero(kinds == kind) for kind in np.unique(kinds)}
        odds = {kind: (kind_odds or {}).get(kind, 1.0) for kind in self.of_kind}
        self.kinds = [kind for kind in odds if odds[kind]]
        if odds and not self.kinds:
            raise ValueError(
                f"augment.kind_odds: are 0 for all recordings, which are {', '.join(odds)}; "
                "raise one, or set augment.noise_prob to 0"
            )
        self.kind_ends = np.cumsum([odds[kind] for kind in self.kinds])
        self.host_bank = None if noise_on_device else noises
        bank, offset_K = noise_bank(noises if noise_on_device else (), num_samples=num_samples)
        self.register_buffer("bank", bank, persistent=False)
        self.register_buffer("offset_K", offset_K, persistent=False)

    def draw(self, rng: np.random.Generator) -> Draw | None:
        """Draw V recordings and their starts; add the noise itself where the host has the bank."""
        if not len(self.lengths_K) or rng.random() >= self.prob:
            return None
        ends = self.kind_ends
        kind = self.kinds[int(np.searchsorted(ends, rng.random() * ends[-1], side="right"))]
        least, most = self.babble_voices if kind == "speech" else (1, 1)
        count, own = int(rng.integers(least, most + 1)), self.of_kind[kind]
        noise_V = rng.choice(own, count, replace=count > len(own))
        start_V = rng.integers(self.lengths_K[noise_V])
        snr_db = float(rng.uniform(*self.snr_db[kind]))
        values = {"noise": noise_V, "start": start_V, "snr_db": snr_db}
        if self.host_bank is not None:
            values["wave"] = self._cut(noise_V, start_V)
        return Draw(values, len(noise_V))

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        noise_RS = self._noise(draws)
        speech_power_R, noise_power_R = x_R.square().mean(1), noise_RS.square().mean(1)
        silent_R = torch.minimum(speech_power_R, noise_power_R) < SILENCE_POWER
        self.num_silent += silent_R.sum()
        snr_R = 10 ** (draws.values["snr_db"] / 10)
        gain_R = (speech_power_R / noise_power_R / snr_R).sqrt()
        gain_R = torch.where(silent_R, 0.0, gain_R)
        return x_R.add_(noise_RS.mul_(gain_R[:, None]))

    def _noise(self, draws: Draws) -> Tensor:
        """Return noise (R, S) at any level: as the workers cut it, or cut from the bank here."""
        if "wave" in draws.values:
            return draws.values["wave"].float().div_(INT16_SCALE)
        noise_RV, start_RV = draws.values["noise"], draws.values["start"]
        start_RV = start_RV + self.offset_K[noise_RV]
        stretches = self.bank.unfold(0, self.num_samples, 1)  # a view, one row per start
        if draws.group == 1:
            return stretches.index_select(0, start_RV[:, 0]).float().div_(INT16_SCALE)
        noise_RS = torch.zeros((len(start_RV), self.num_samples), device=start_RV.device)
        for start_R in start_RV.unbind(1):
            voice_RS = stretches.index_select(0, start_R).float().div_(INT16_SCALE)
            power_R = voice_RS.square().mean(1)
            gain_R = torch.where(power_R < SILENCE_POWER, 0.0, power_R.rsqrt())
            noise_RS += voice_RS.mul_(gain_R[:, None])
        return noise_RS

    def _cut(self, noise_V: np.ndarray, start_V: np.ndarray) -> np.ndarray:
        """Cut noise (S,), int16, from the bank on the host: as it is, or babble at full scale.

        The level is free because the noise is scaled to an SNR later; at full scale, rounding
        errors stay below -96 dB of the peak.
        """
        assert self.host_bank is not None
        stretches = [
            wave.take(np.arange(start, start + self.num_samples), mode="wrap")
            for wave, start in zip([self.host_bank[noise] for noise in noise_V], start_V)
        ]
        if len(stretches) == 1:
            return stretches[0]
        sum_S = np.zeros(self.num_samples, dtype=np.float32)
        for voice_S in stretches:
            float_S = voice_S.astype(np.float32) / INT16_SCALE
            power = float(np.dot(float_S, float_S)) / len(float_S)
            if power >= SILENCE_POWER:
                sum_S += float_S * power**-0.5
        peak = float(np.abs(sum_S).max()) or 1.0
        return np.rint(sum_S * (32767 / peak)).astype(np.int16)


def noise_bank(noises: Sequence[np.ndarray], *, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return all noises in a row, (total,) int16, and where each begins, (K,) int64.

    Each is followed by its own beginning, so that S samples from any start are one plain stretch:
    on a CPU an index for every sample would cost more than all the rest of the noise.
    """
    lengths = np.array([len(noise) for noise in noises], dtype=np.int64)
    looped = lengths + num_samples - 1
    offsets = np.cumsum(looped) - looped
    bank = np.empty(int(looped.sum()), dtype=np.int16)
    for noise, offset, length in zip(noises, offsets, looped):
        bank[offset : offset + length] = np.resize(noise, length)
    return torch.from_numpy(bank), torch.from_numpy(offsets)


def noise_bytes(lengths: Sequence[int], *, num_samples: int) -> int:
    """Return the bytes on the device of noises of these lengths in samples."""
    return 2 * (sum(lengths) + len(lengths) * (num_samples - 1)) + 8 * len(lengths)
