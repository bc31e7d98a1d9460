"""Speed: a crop is played faster or slower; the changed pitch counts as another speaker.

It is resampled by an exact ratio. `Codec` resamples to a telephone's rate with the same module.
Letters: B rows of the batch, R rows that are changed, S samples, W samples of the longest row as
read.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import Augmentation

MAX_RATIO = 1000  # a resampler holds a filter per output phase


class Speed(Augmentation):
    """Change of speed. All speeds are equally likely; the group of a draw is its speed's index."""

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
        played_R = resample(x_R[:, :num_read])

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
    """torchaudio's filters, without its copy of the padded wave."""

    kernel: Tensor

    def __init__(self, old_rate: int, new_rate: int) -> None:
        super().__init__()
        from torchaudio.transforms import Resample

        # Within -70 dB of soxr HQ up to 6 kHz, and no slower than the narrow default (-18 dB).
        resample = Resample(
            old_rate,
            new_rate,
            resampling_method="sinc_interp_kaiser",
            lowpass_filter_width=13,
            rolloff=1.0,
            beta=7.0,
        )
        # The filters turn `old` samples into `new` samples.
        self.old = old_rate // resample.gcd
        self.new = new_rate // resample.gcd
        self.width = resample.width
        kernel = resample.get_buffer("kernel")
        self.register_buffer("kernel", kernel, persistent=False)

    def forward(self, wave_BS: Tensor) -> Tensor:
        """Return waves of equal duration at the new rate; the number of samples is rounded up."""
        num_samples = wave_BS.shape[1]
        missing = -num_samples % self.old
        if missing:
            wave_BS = F.pad(wave_BS, (0, missing))

        # Each output phase is a filter; the phases of a stride follow each other in time.
        phases = F.conv1d(
            wave_BS[:, None],
            self.kernel,
            stride=self.old,
            padding=self.width,
        )
        in_time = phases.transpose(1, 2)
        played_BS = in_time.flatten(1)
        num_played = -(-num_samples * self.new // self.old)  # rounded up
        return played_BS[:, :num_played]
