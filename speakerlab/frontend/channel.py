"""What a telephone line does to speech: its band, and the eight bits of its codec.

In: wave_BS, float32; amplitudes beyond [-1, 1] are clipped by the codec. Out: wave_BS, float32.
Letters: B rows of the batch, S samples, P rows with the telephone's band, C rows with a codec, L
taps of a filter.

The band is that of ITU-T G.712, 300 to 3400 Hz; the codec is ITU-T G.711, at its 8 kHz.
"""

import math

import numpy as np
import scipy.fft
import torch
from torch import Tensor, nn

from speakerlab.frontend.resampling import resampler_between

BAND_HERTZ = (300.0, 3400.0)  # where the filter has lost 6 dB
FILTER_SECONDS = 0.04  # as long as 45 Hz between 0 and -6 dB, and as much to -60 dB, need
KAISER_BETA = 5.65  # -60 dB
CODEC_RATE = 8000
INT16_SCALE = 32768
MU_LAW_BIAS = 132.0  # what is added to a 16-bit magnitude, and taken from it again
LOWEST_OCTAVE = 128.0  # where mu-law's steps are smallest; A-law's stop shrinking an octave earlier
STEPS = 16  # in an octave
EXPONENT_BITS = 0x7F800000  # of a float32


def band_filter(sample_rate: int) -> np.ndarray:
    """(L,) float64, L odd: a band-pass of linear phase by the window method."""
    half = round(FILTER_SECONDS / 2 * sample_rate)
    time = np.arange(-half, half + 1) / sample_rate
    low, high = (2 * hertz * np.sinc(2 * hertz * time) for hertz in BAND_HERTZ)
    return (high - low) / sample_rate * np.kaiser(2 * half + 1, KAISER_BETA)


def through_g711(wave_BS: Tensor, law_B: Tensor) -> Tensor:
    """Each sample as a decoder of G.711 gives it back; `law_B`: 0 for mu-law, 1 for A-law.

    Both laws quantise a magnitude in 16 even steps an octave; mu-law first adds a bias, A-law does
    not let the steps shrink in its lowest octave. That is all there is to 8 bits with a sign.
    """
    law_B1 = law_B[:, None].float()
    bias_B1, lowest_B1 = MU_LAW_BIAS * (1 - law_B1), LOWEST_OCTAVE * (1 + law_B1)
    magnitude_BS = (wave_BS.abs() * INT16_SCALE + bias_B1).clamp(max=INT16_SCALE - 1)
    # The power of two below: the exponent's bits alone, exact and faster than a logarithm.
    octave_BS = (magnitude_BS.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    step_BS = torch.maximum(octave_BS, lowest_B1) / STEPS
    decoded_BS = ((magnitude_BS / step_BS).floor() + 0.5) * step_BS - bias_B1
    return torch.copysign(decoded_BS, wave_BS) / INT16_SCALE


class Channel(nn.Module):
    """The telephone's band and its codec; each is there only if it was asked for."""

    spectrum: Tensor

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: int = 16000,
        telephone: bool = False,
        codec: bool = False,
    ) -> None:
        """`num_samples` is S. Raises ValueError for a rate that cannot hold what is asked for."""
        super().__init__()
        if (telephone or codec) and sample_rate < CODEC_RATE:
            raise ValueError(
                f"augment: a telephone has {CODEC_RATE} Hz, got crops of {sample_rate} Hz; set "
                "augment.telephone_prob and augment.codec_prob to 0"
            )
        taps_L = band_filter(sample_rate) if telephone else np.ones(1)
        self.delay = len(taps_L) // 2
        self.num_fft = scipy.fft.next_fast_len(num_samples + len(taps_L) - 1, real=True)
        taps = torch.from_numpy(taps_L)
        spectrum = torch.fft.rfft(taps, n=self.num_fft).to(torch.complex64)
        self.register_buffer("spectrum", spectrum, persistent=False)
        common = math.gcd(sample_rate, CODEC_RATE)
        rates = (sample_rate // common, CODEC_RATE // common) if codec else (1, 1)
        self.to_codec = resampler_between(*rates)
        self.from_codec = resampler_between(*rates[::-1])

    def keep_band(self, wave_PS: Tensor) -> Tensor:
        """(P, S) of the telephone's band alone, not delayed."""
        spectrum = torch.fft.rfft(wave_PS, n=self.num_fft) * self.spectrum
        wave = torch.fft.irfft(spectrum, n=self.num_fft)
        return wave[:, self.delay : self.delay + wave_PS.shape[1]]

    def code(self, wave_CS: Tensor, codec_C: Tensor) -> Tensor:
        """(C, S) as it comes out of the codec, with nothing above 4 kHz."""
        coded = through_g711(self.to_codec(wave_CS), codec_C)
        return self.from_codec(coded)[:, : wave_CS.shape[1]]
