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
    if not (ratio > 0 and max(ratio.numerator, ratio.denominator) <= MAX_RATIO):
        raise ValueError(
            f"augment: speed {speed} must be positive, with at most three digits; use e.g. 0.9"
        )
    return resampler_between(ratio.numerator, ratio.denominator)


def resampler_between(old_rate: int, new_rate: int) -> nn.Module:
    """Return a module from one sampling rate to another, without a delay."""
    return nn.Identity() if old_rate == new_rate else Resampler(old_rate, new_rate)


class Resampler(nn.Module):
    """torchaudio's filters, without its copy of the padded wave."""

    kernel: Tensor

    def __init__(self, old_rate: int, new_rate: int) -> None:
        super().__init__()
        from torchaudio.transforms import Resample

        # Within -70 dB of soxr HQ up to 6 kHz, and no slower than the narrow default (-18 dB).
        made = Resample(
            old_rate,
            new_rate,
            resampling_method="sinc_interp_kaiser",
            lowpass_filter_width=13,
            rolloff=1.0,
            beta=7.0,
        )
        self.old, self.new, self.width = old_rate // made.gcd, new_rate // made.gcd, made.width
        self.register_buffer("kernel", made.get_buffer("kernel"), persistent=False)

    def forward(self, wave_BS: Tensor) -> Tensor:
        """Return as many samples as the new rate has in the same time, rounded up."""
        num_samples = wave_BS.shape[1]
        if missing := -num_samples % self.old:
            wave_BS = F.pad(wave_BS, (0, missing))
        phases = F.conv1d(wave_BS[:, None], self.kernel, stride=self.old, padding=self.width)
        played_BS = phases.transpose(1, 2).flatten(1)
        return played_BS[:, : -(-num_samples * self.new // self.old)]
