"""Codec: a crop goes through the eight bits of a telephone's codec (ITU-T G.711), at its 8 kHz.

Amplitudes beyond [-1, 1] are clipped. Letters: R rows that are changed, S samples.
"""

import numpy as np
import torch
from torch import Tensor

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import INT16_SCALE, Augmentation
from speakerlab.frontend.resampling import resampler_between

LAWS = ("mu-law", "A-law")  # the draw `law` is an index into these
CODEC_RATE = 8000
MU_LAW_BIAS = 132.0  # added to a 16-bit magnitude, and taken from it again
LOWEST_OCTAVE = 128.0  # where mu-law's steps are smallest; A-law's stop shrinking an octave earlier
STEPS = 16  # in an octave
EXPONENT_BITS = 0x7F800000  # of a float32


class Codec(Augmentation):
    """mu-law or A-law, each as often; nothing is left above 4 kHz."""

    def __init__(self, *, codec_prob: float, sample_rate: int = 16000) -> None:
        super().__init__()
        refuse_below_codec_rate(sample_rate)
        self.prob = codec_prob
        self.to_codec = resampler_between(sample_rate, CODEC_RATE)
        self.from_codec = resampler_between(CODEC_RATE, sample_rate)

    def draw(self, rng: np.random.Generator) -> Draw | None:
        return Draw({"law": int(rng.integers(len(LAWS)))}) if rng.random() < self.prob else None

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        coded = through_g711(self.to_codec(x_R), draws.values["law"])
        return self.from_codec(coded)[:, : x_R.shape[1]]


def refuse_below_codec_rate(sample_rate: int) -> None:
    """Raise ValueError for a sample rate that cannot hold what a telephone transmits."""
    if sample_rate < CODEC_RATE:
        raise ValueError(
            f"augment: a telephone transmits {CODEC_RATE} Hz, but crops have {sample_rate} Hz; set "
            "augment.telephone_prob and augment.codec_prob to 0"
        )


def through_g711(wave_RS: Tensor, law_R: Tensor) -> Tensor:
    """Return the samples after G.711 coding and decoding; `law_R`: 0 for mu-law, 1 for A-law.

    Both laws quantise a magnitude in 16 even steps an octave; mu-law first adds a bias, A-law does
    not let the steps shrink in its lowest octave.
    """
    law_R1 = law_R[:, None].float()
    bias_R1, lowest_R1 = MU_LAW_BIAS * (1 - law_R1), LOWEST_OCTAVE * (1 + law_R1)
    magnitude_RS = (wave_RS.abs() * INT16_SCALE + bias_R1).clamp(max=INT16_SCALE - 1)
    # The power of two below: the exponent's bits alone, exact and faster than a logarithm.
    octave_RS = (magnitude_RS.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    step_RS = torch.maximum(octave_RS, lowest_R1) / STEPS
    decoded_RS = ((magnitude_RS / step_RS).floor() + 0.5) * step_RS - bias_R1
    return torch.copysign(decoded_RS, wave_RS) / INT16_SCALE
