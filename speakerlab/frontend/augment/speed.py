"""Speed: a crop is played faster or slower; the changed pitch counts as another speaker.

It is resampled by an exact ratio. `Codec` resamples to a telephone's rate with the same module.
Letters: B rows of the batch, R rows that are changed, S samples, T strides of a resampler, P phases
of a stride (its output samples), K samples of a filter.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import Augmentation

MAX_RATIO = 1000  # a resampler holds a filter per output phase
# Within -70 dB of soxr HQ up to 6 kHz, and no slower than torchaudio's default (-18 dB).
ZERO_CROSSINGS = 13  # of a filter, on each side
KAISER_BETA = 7.0


class Speed(Augmentation):
    """Change of speed. All speeds are equally likely; the group of a draw is its speed's index."""

    changes_voice = True

    def __init__(self, *, speeds: Sequence[float], num_samples: int) -> None:
        """Take `speeds`, the first 1, and `num_samples`, a crop's length after the change."""
        super().__init__()
        self.num_speeds = len(speeds)
        # Samples of a recording that a crop needs at each speed.
        self.num_read = [round(num_samples * speed) for speed in speeds]
        self.num_samples = num_samples
        self.resamplers = nn.ModuleList(resampler(speed) for speed in speeds)

    def draw(self, rng: np.random.Generator) -> Draw | None:
        speed = int(rng.integers(self.num_speeds))
        if speed == 0:  # the first speed is 1: no change
            return None
        return Draw({}, speed)

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        """Return waves of a crop's length."""
        num_read = self.num_read[draws.group]
        resample = self.resamplers[draws.group]
        read_R = x_R[:, :num_read]
        played_R = resample(read_R)

        # Rounding may give a sample too many or, at half speed or less, one too few.
        missing = self.num_samples - played_R.shape[1]
        if missing > 0:
            played_R = F.pad(played_R, (0, missing))
        return played_R[:, : self.num_samples]


def resampler(speed: float) -> nn.Module:
    """Return a module that plays a wave `speed` times as fast, a ratio of small integers."""
    ratio = Fraction(str(speed)).limit_denominator()
    larger = max(ratio.numerator, ratio.denominator)
    has_small_integers = larger <= MAX_RATIO
    if not (ratio > 0 and has_small_integers):
        raise ValueError(
            f"augment: speed {speed} must be positive, with at most three digits; use"
            " e.g. 0.9"
        )
    return resampler_between(ratio.numerator, ratio.denominator)


def resampler_between(old_rate: int, new_rate: int) -> nn.Module:
    """Return a module from one sampling rate to another, without a delay."""
    if old_rate == new_rate:
        return nn.Identity()
    return Resampler(old_rate, new_rate)


class Resampler(nn.Module):
    """Windowed-sinc resampler: torchaudio's filters, without its copy of the padded wave."""

    kernel: Tensor

    def __init__(self, old_rate: int, new_rate: int) -> None:
        super().__init__()
        divisor = math.gcd(old_rate, new_rate)
        # In a stride, the filters turn `old` samples into `new` samples: 11 into 10 at speed 1.1.
        self.old = old_rate // divisor
        self.new = new_rate // divisor
        kernel, self.width = sinc_filters(self.old, self.new)
        self.register_buffer("kernel", kernel, persistent=False)

    def forward(self, wave_BS: Tensor) -> Tensor:
        """Return waves of equal duration at the new rate; the number of samples is rounded up."""
        num_samples = wave_BS.shape[1]
        # Whole strides: where `old` is 10, 23 samples lack 7.
        missing = -num_samples % self.old
        if missing:
            wave_BS = F.pad(wave_BS, (0, missing))

        # Each output phase is a filter; the phases of a stride follow each other in time.
        phases_BPT = F.conv1d(
            wave_BS[:, None],
            self.kernel,
            stride=self.old,
            padding=self.width,
        )
        phases_BTP = phases_BPT.transpose(1, 2)
        played_BS = phases_BTP.flatten(1)
        num_played = -(-num_samples * self.new // self.old)  # rounded up
        return played_BS[:, :num_played]


def sinc_filters(old: int, new: int) -> tuple[Tensor, int]:
    """Return kernel_P1K, fp32, of `new` phases per `old` samples, and the padding on each side.

    Output p of a stride is the wave at time p / new: a sum of samples, weighted with a sinc whose
    zeros are as far apart as samples at the lower rate, times a Kaiser window. The values are those
    of torchaudio's `Resample`, bit for bit.
    """
    lower = min(old, new)
    width = math.ceil(ZERO_CROSSINGS * old / lower)

    # Times in strides. From 3 samples to 2, the samples are at 0, 1/3, 2/3 and so on to both sides,
    # the outputs at 0 and 1/2.
    sample_K = torch.arange(-width, width + old, dtype=torch.float64) / old
    minus_output_P = torch.arange(0, -new, -1) / new  # fp32, as in torchaudio
    time_PK = minus_output_P[:, None] + sample_K
    # In units of the distance between two zeros. What is beyond the last zero is put there, where
    # the sinc is 0.
    distance_PK = time_PK * lower
    distance_PK = distance_PK.clamp(-ZERO_CROSSINGS, ZERO_CROSSINGS)

    beta = torch.tensor(KAISER_BETA)
    place_PK = distance_PK / ZERO_CROSSINGS  # from -1 to 1
    shape_PK = torch.sqrt(1 - place_PK**2)
    window_PK = torch.i0(beta * shape_PK) / torch.i0(beta)

    angle_PK = distance_PK * math.pi
    sinc_PK = torch.where(angle_PK == 0, 1.0, angle_PK.sin() / angle_PK)
    # A wider sinc sums up more samples.
    gain = lower / old
    kernel_PK = sinc_PK * (window_PK * gain)
    kernel_P1K = kernel_PK.float()[:, None]
    return kernel_P1K, width
