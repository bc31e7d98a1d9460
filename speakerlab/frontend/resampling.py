"""Changes of the sampling rate by an exact ratio. In: wave_BS, float32. Out: the same, resampled.

Letters: B rows of the batch, S samples.
"""

from fractions import Fraction

from torch import Tensor, nn
from torch.nn import functional as F

MAX_RATIO = 1000  # a resampler holds a filter per output phase


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
