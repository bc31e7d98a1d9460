"""Codec: a crop goes through the eight bits of a telephone's codec (ITU-T G.711), at its 8 kHz.

Amplitudes beyond [-1, 1] are clipped. Letters: R rows that are changed, S samples.
"""

import numpy as np
import torch
from torch import Tensor

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import INT16_SCALE, Augmentation
from speakerlab.frontend.augment.speed import resampler_between

LAWS = ("mu-law", "A-law")  # the draw `law` is an index into these
CODEC_RATE = 8000
# Of each law: the offset subtracted from a magnitude before the steps and added after them (below 0
# for mu-law, which adds a bias of 132), and the magnitude where its lowest octave begins.
OFFSETS = (-132 / INT16_SCALE, 0.0)
LOWEST_OCTAVES = (128 / INT16_SCALE, 256 / INT16_SCALE)
STEPS = 16  # in an octave
EXPONENT_BITS = 0x7F800000  # of a float32


class Codec(Augmentation):
    """Coding by mu-law or A-law, equally often; removes all frequencies above 4 kHz."""

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
        values = {
            "law": law,
            "offset": OFFSETS[law],
            "lowest": LOWEST_OCTAVES[law],
        }
        return Draw(values)

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        offset_R = draws.values["offset"]
        lowest_R = draws.values["lowest"]
        narrowband_R = self.to_codec(x_R)
        coded_R = through_g711(
            narrowband_R,
            offset_R1=offset_R[:, None],
            lowest_R1=lowest_R[:, None],
        )
        # Resampling rounds the length up.
        wideband_R = self.from_codec(coded_R)
        num_samples = x_R.shape[1]
        return wideband_R[:, :num_samples]


def refuse_below_codec_rate(sample_rate: int) -> None:
    """Raise ValueError for a sample rate below the rate of a telephone's codec."""
    if sample_rate < CODEC_RATE:
        raise ValueError(
            f"augment: a telephone transmits {CODEC_RATE} Hz, but crops have"
            f" {sample_rate} Hz; set augment.telephone_prob and augment.codec_prob to 0"
        )


def through_g711(wave_RS: Tensor, offset_R1: Tensor, lowest_R1: Tensor) -> Tensor:
    """Return the samples after G.711 coding and decoding by the laws with these constants.

    Both laws quantise a magnitude in 16 even steps an octave; mu-law first adds a bias, A-law does
    not let the steps shrink in its lowest octave.
    """
    largest = 1 - 1 / INT16_SCALE
    magnitude_RS = wave_RS.abs() - offset_R1
    magnitude_RS = magnitude_RS.clamp(max=largest)

    # The power of two below, 0.25 for 0.3: the exponent's bits alone, exact and faster than a
    # logarithm.
    exponent_RS = magnitude_RS.view(torch.int32) & EXPONENT_BITS
    octave_RS = exponent_RS.view(torch.float32)
    step_RS = torch.maximum(octave_RS, lowest_R1) / STEPS

    # Decoding returns the middle of the step.
    steps_RS = torch.div(magnitude_RS, step_RS, rounding_mode="trunc")
    middle_RS = steps_RS + 0.5
    decoded_RS = torch.addcmul(offset_R1, middle_RS, step_RS)
    return torch.copysign(decoded_RS, wave_RS)
