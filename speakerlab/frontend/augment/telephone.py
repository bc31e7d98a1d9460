"""Telephone: only the band of a telephone line is left, 300 to 3400 Hz (ITU-T G.712).

Letters: R rows that are changed, S samples, L taps of a filter.
"""

import numpy as np
import scipy.fft
import torch
from torch import Tensor

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import Augmentation
from speakerlab.frontend.augment.codec import refuse_below_codec_rate

BAND_HERTZ = (300.0, 3400.0)  # where the filter has lost 6 dB
FILTER_SECONDS = 0.04  # as long as 45 Hz between 0 and -6 dB, and as much to -60 dB, need
KAISER_BETA = 5.65  # -60 dB


class Telephone(Augmentation):
    """A band-pass of linear phase, without its delay."""

    spectrum: Tensor

    def __init__(
        self, *, telephone_prob: float, num_samples: int, sample_rate: int = 16000
    ) -> None:
        super().__init__()
        refuse_below_codec_rate(sample_rate)
        self.prob, self.num_samples = telephone_prob, num_samples
        taps_L = band_filter(sample_rate)
        self.delay = len(taps_L) // 2
        self.num_fft = scipy.fft.next_fast_len(num_samples + len(taps_L) - 1, real=True)
        spectrum = torch.fft.rfft(torch.from_numpy(taps_L), n=self.num_fft).to(torch.complex64)
        self.register_buffer("spectrum", spectrum, persistent=False)

    def draw(self, rng: np.random.Generator) -> Draw | None:
        return Draw({}) if rng.random() < self.prob else None

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        spectrum = torch.fft.rfft(x_R, n=self.num_fft) * self.spectrum
        wave = torch.fft.irfft(spectrum, n=self.num_fft)
        return wave[:, self.delay : self.delay + self.num_samples]


def band_filter(sample_rate: int) -> np.ndarray:
    """Return a band-pass (L,) of linear phase, L odd, by the window method."""
    half = round(FILTER_SECONDS / 2 * sample_rate)
    time = np.arange(-half, half + 1) / sample_rate
    low, high = (2 * hertz * np.sinc(2 * hertz * time) for hertz in BAND_HERTZ)
    return (high - low) / sample_rate * np.kaiser(2 * half + 1, KAISER_BETA)
