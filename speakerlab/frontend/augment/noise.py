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
    """A recording of one kind or, of the kind speech, the sum of several: babble.

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
        """Take `noises`, int16, read when sliced, the kind of each, and the kinds' odds (1)."""
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
        bank, self.offset_K = noise_bank(noises if noise_on_device else (), num_samples=num_samples)
        self.register_buffer("bank", bank, persistent=False)

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
        snr = (10 ** (torch.tensor(snr_db) / 10)).item()
        values = {"noise": noise_V, "start": start_V, "snr_db": snr_db, "snr": snr}
        if self.host_bank is None:
            values["place"] = self.offset_K[noise_V] + start_V
        else:
            values["wave"] = self._cut(noise_V, start_V)
        return Draw(values)

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        noise_RS = self._noise(draws)
        speech_power_R, noise_power_R = x_R.square().mean(1), noise_RS.square().mean(1)
        silent_R = torch.minimum(speech_power_R, noise_power_R) < SILENCE_POWER
        self.num_silent.append(silent_R.sum())
        gain_R = (speech_power_R / noise_power_R / draws.values["snr"]).sqrt()
        gain_R = gain_R.masked_fill(silent_R, 0.0)
        return x_R.add_(noise_RS.mul_(gain_R[:, None]))

    def _noise(self, draws: Draws) -> Tensor:
        """Return noise (R, S) at any level: as the workers cut it, or cut from the bank here."""
        if "wave" in draws.values:
            return draws.values["wave"].float().div_(INT16_SCALE)
        place_RV = draws.values["place"]
        if place_RV.device.type != "cpu":  # the same few kernels for any numbers of voices
            return self._voices(place_RV)
        stretches = self.bank.unfold(0, self.num_samples, 1)  # a view, one row per place
        noise_RS = stretches.index_select(0, place_RV[:, 0]).float().div_(INT16_SCALE)
        for row, num_voices in enumerate((place_RV >= 0).sum(1).tolist()):
            if num_voices > 1:
                noise_RS[row] = self._voices(place_RV[row, :num_voices])
        return noise_RS

    def _voices(self, place_V: Tensor) -> Tensor:
        """Return the sum (..., S) of recordings at (..., V) in the bank, each at the same power.

        A place that is missing, -1, is that of the last stretch: silence.
        """
        voice_VS = self.bank.unfold(0, self.num_samples, 1)[place_V].float()
        power_V = voice_VS.square().mean(-1)
        gain_V = F.threshold(power_V, SILENCE_POWER * INT16_SCALE**2, torch.inf).rsqrt()
        return voice_VS.mul_(gain_V.unsqueeze(-1)).sum(-2)

    def _cut(self, noise_V: np.ndarray, start_V: np.ndarray) -> np.ndarray:
        """Cut noise (S,), int16, from the bank on the host: as it is, or babble at full scale.

        The level is free because the noise is scaled to an SNR later; at full scale, rounding
        errors stay below -96 dB of the peak.
        """
        assert self.host_bank is not None
        stretches = [
            self._stretch(self.host_bank[noise], int(start))
            for noise, start in zip(noise_V, start_V)
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

    def _stretch(self, noise: Any, start: int) -> np.ndarray:
        """Read samples of a noise from `start`, and from its beginning where it ends."""
        wave_S = noise[start : start + self.num_samples]
        missing = self.num_samples - len(wave_S)
        if not missing:
            return wave_S
        return np.concatenate([wave_S, np.resize(noise[:missing], missing)])


def noise_bank(noises: Sequence[Any], *, num_samples: int) -> tuple[Tensor, np.ndarray]:
    """Return all noises in a row, (total,) int16, and where each begins, (K,) int64.

    Each is followed by its own beginning, so that S samples from any start are one plain stretch:
    on a CPU an index for every sample would cost more than all the rest of the noise. The last
    stretch is silence.
    """
    lengths = np.array([len(noise) for noise in noises], dtype=np.int64)
    looped = lengths + num_samples - 1
    offsets = np.cumsum(looped) - looped
    bank = np.zeros(int(looped.sum()) + num_samples, dtype=np.int16)
    for noise, offset, length in zip(noises, offsets, looped):
        bank[offset : offset + length] = np.resize(noise[:], length)
    return torch.from_numpy(bank), offsets


def noise_bytes(lengths: Sequence[int], *, num_samples: int) -> int:
    """Return the bytes on the device of noises of these lengths in samples."""
    return 2 * (sum(lengths) + len(lengths) * (num_samples - 1) + num_samples)
