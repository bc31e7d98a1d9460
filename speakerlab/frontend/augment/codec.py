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
# Of each law: what is subtracted from a magnitude, and added again; where its lowest octave begins.
OFFSETS = (-132 / INT16_SCALE, 0.0)
LOWEST_OCTAVES = (128 / INT16_SCALE, 256 / INT16_SCALE)
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
        if rng.random() >= self.prob:
            return None
        law = int(rng.integers(len(LAWS)))
        return Draw({"law": law, "offset": OFFSETS[law], "lowest": LOWEST_OCTAVES[law]})

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        offset_R1, lowest_R1 = (draws.values[key][:, None] for key in ("offset", "lowest"))
        coded = through_g711(self.to_codec(x_R), offset_R1, lowest_R1)
        return self.from_codec(coded)[:, : x_R.shape[1]]


def refuse_below_codec_rate(sample_rate: int) -> None:
    """Raise ValueError for a sample rate that cannot hold what a telephone transmits."""
    if sample_rate < CODEC_RATE:
        raise ValueError(
            f"augment: a telephone transmits {CODEC_RATE} Hz, but crops have {sample_rate} Hz; set "
            "augment.telephone_prob and augment.codec_prob to 0"
        )


def through_g711(wave_RS: Tensor, offset_R1: Tensor, lowest_R1: Tensor) -> Tensor:
    """Return the samples after G.711 coding and decoding by the laws with these constants.

    Both laws quantise a magnitude in 16 even steps an octave; mu-law first adds a bias, A-law does
    not let the steps shrink in its lowest octave.
    """
    magnitude_RS = (wave_RS.abs() - offset_R1).clamp(max=1 - 1 / INT16_SCALE)
    # The power of two below: the exponent's bits alone, exact and faster than a logarithm.
    octave_RS = (magnitude_RS.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    step_RS = torch.maximum(octave_RS, lowest_R1) / STEPS
    steps_RS = torch.div(magnitude_RS, step_RS, rounding_mode="trunc")
    decoded_RS = torch.addcmul(offset_R1, steps_RS + 0.5, step_RS)
    return torch.copysign(decoded_RS, wave_RS)
