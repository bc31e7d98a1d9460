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

BAND_HERTZ = (300.0, 3400.0)  # edges, at which the filter attenuates by 6 dB
# Length of a filter that falls from 0 to -6 dB within 45 Hz, and from there to -60 dB.
FILTER_SECONDS = 0.04
KAISER_BETA = 5.65  # -60 dB


class Telephone(Augmentation):
    """A band-pass of linear phase, without its delay."""

    spectrum: Tensor

    def __init__(
        self,
        *,
        telephone_prob: float,
        num_samples: int,
        sample_rate: int = 16000,
    ) -> None:
        super().__init__()
        refuse_below_codec_rate(sample_rate)
        self.prob = telephone_prob
        self.num_samples = num_samples
        taps_L = band_filter(sample_rate)
        self.delay = len(taps_L) // 2

        # The convolution is a product of spectra, of a length at which nothing wraps around.
        num_convolved = num_samples + len(taps_L) - 1
        self.num_fft = scipy.fft.next_fast_len(num_convolved, real=True)
        taps = torch.from_numpy(taps_L)
        spectrum = torch.fft.rfft(taps, n=self.num_fft).to(torch.complex64)
        self.register_buffer("spectrum", spectrum, persistent=False)

    def draw(self, rng: np.random.Generator) -> Draw | None:
        if rng.random() >= self.prob:
            return None
        return Draw({})

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        spectra = torch.fft.rfft(x_R, n=self.num_fft)
        filtered_spectra = spectra * self.spectrum
        filtered = torch.fft.irfft(filtered_spectra, n=self.num_fft)
        end = self.delay + self.num_samples
        return filtered[:, self.delay : end]


def band_filter(sample_rate: int) -> np.ndarray:
    """Return a band-pass (L,) of linear phase, L odd, by the window method."""
    half = round(FILTER_SECONDS / 2 * sample_rate)
    tap_L = np.arange(-half, half + 1)
    seconds_L = tap_L / sample_rate
    window_L = np.kaiser(len(tap_L), KAISER_BETA)

    # The difference of two ideal low-pass filters passes the band between their edges.
    low_hertz, high_hertz = BAND_HERTZ
    below_low_L = _low_pass(low_hertz, seconds_L)
    below_high_L = _low_pass(high_hertz, seconds_L)
    return (below_high_L - below_low_L) / sample_rate * window_L


def _low_pass(edge_hertz: float, seconds_L: np.ndarray) -> np.ndarray:
    """Return the impulse response of an ideal low-pass filter at these times."""
    return 2 * edge_hertz * np.sinc(2 * edge_hertz * seconds_L)
